"""Start a Python module with its signals held back: `python held.py -u -m MODULE ARGUMENTS`.

Between the start of a process and its first own handler lie imports that take a second, longer on a slow file system,
and a SIGTERM or SIGUSR2 that arrives there ends the rank before it can save anything, so that the whole job fails. Held
back, they wait in the kernel until `worker` has its handlers and lets them in (`Watch.install`, `Watch.log_to`).

Imports nothing but `signal` before that, and nothing of this package ever: it runs as a file, in the snapshot.
"""

import sys

if not sys.flags.safe_path:
    sys.path.pop(0)  # this file's folder: the package's modules are no top-level modules

import signal

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})


def main(arguments: list[str]) -> None:
    """Do what `python ARGUMENTS` would do; `-u` and `-m MODULE ...` are understood."""
    import os
    import runpy

    os.umask(os.umask(0o022) | 0o022)  # what a run writes is for others to read, and for nobody else to write
    if arguments[0] == "-u":
        arguments = arguments[1:]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    assert arguments[0] == "-m", "held.py runs modules"
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())  # as `python -m` has it
    sys.argv = arguments[1:]
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
