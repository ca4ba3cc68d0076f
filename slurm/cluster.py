"""A real Slurm on one machine: two nodes with fake GPUs, for trying a run's whole life and for our own tests.

    .venv/bin/python slurm/cluster.py up | down | status [--dir D]         make cluster-up, cluster-down, cluster-status

Nothing of it is simulated but the hardware: slurmctld, one slurmd per node and munge run as the calling user (root or
not), without systemd, cgroups or accounting, and everything they write lies in one folder D:

    D/slurm.conf  gres.conf     what `up` writes; `export SLURM_CONF=D/slurm.conf` is all that a user needs
    D/state  spool  log  run    the controller's memory, the nodes' scripts, logs, pid files and munge's socket
    D/dev/gpu0 ...              links to /dev/null: tasks get CUDA_VISIBLE_DEVICES as on a real node, and no device

Up in under a second. Several clusters stand side by side, each with a munge key and free ports of its own. Partition
`high` preempts `train` (20 s of grace, then requeue), so a preemption is one `sbatch -p high` away. What differs from
a real cluster: node names do not resolve, and the nodes share one host's ports, memory and /dev/shm.
"""

import argparse
import contextlib
import os
import pwd
import random
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL

from pithtrain.errors import SlurmError

DEFAULT = Path(os.path.expanduser("~/.pithtrain/cluster"))  # a home that cannot be found is no reason to fail here
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
FIRST_PORT, LAST_PORT = 10000, 14999  # below those of runs (15000 on) and the kernel's ephemeral ones (32768 on)
LONGEST_SOCKET = 107  # bytes of a Unix socket's path
KILL_WAIT_S = 10
UP_WITHIN_S = DOWN_WITHIN_S = 60


@dataclass(frozen=True)
class Status:
    """`daemons`: which of them live. `nodes`: state by name, {} where the controller does not answer."""

    daemons: dict[str, bool]
    nodes: dict[str, str]
    jobs: int

    @property
    def is_up(self) -> bool:
        return bool(self.daemons) and all(self.daemons.values())


def slurm_conf(folder: Path, user: str, host: str, ports: list[int], gpus: int) -> str:
    """slurm.conf of a cluster in `folder`: the controller at ports[0], node n<i> at ports[i + 1], all run by `user`.
    Clusters of one host number their jobs from different ids, because a run derives its rendezvous port from the job
    id; an earlier cluster's ids in this folder go on."""
    nodes = "\n".join(
        f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={max(4, gpus)} RealMemory=8000"
        f" Gres=gpu:{gpus} State=UNKNOWN"
        for i, port in enumerate(ports[1:])
    )
    # linuxproc follows a task's children even when they leave its process group, and asks for root
    tracking = "linuxproc" if user == "root" else "pgid"
    first_job = 1 + 1000 * (zlib.crc32(os.fsencode(folder)) % 1000)
    return f"""\
ClusterName=pithtrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={_munge_socket(folder)}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
FirstJobId={first_job}
# no cgroups, no accounting, no plugins that want a site's set-up
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# the nodes have what stands here, whatever the machine has
SlurmdParameters=config_overrides
ReturnToService=2
EnforcePartLimits=ALL
# somebody waits: look at the queue every two seconds, give up a node soon, forget jobs after a minute
SchedulerParameters=bf_interval=2,sched_interval=2
KillWait={KILL_WAIT_S}
SlurmdTimeout=15
MinJobAge=60
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=train Nodes=ALL MaxTime=1-0 DefaultTime=60 PriorityTier=10 GraceTime=20 Default=YES
PartitionName=high Nodes=ALL MaxTime=1-0 DefaultTime=60 PriorityTier=20 PreemptMode=OFF
"""


def gres_conf(folder: Path, nodes: int, gpus: int) -> str:
    """gres.conf: every node has the same `gpus` files, each a link to /dev/null. A count without files makes the nodes
    invalid, and regular files give tasks no CUDA_VISIBLE_DEVICES."""
    names, files = ",".join(f"n{i}" for i in range(nodes)), "gpu0" if gpus == 1 else f"gpu[0-{gpus - 1}]"
    return f"AutoDetect=off\nNodeName={names} Name=gpu File={folder}/dev/{files}\n"


def up(folder: Path = DEFAULT, nodes: int = 2, gpus: int = 4) -> bool:
    """Start a cluster in `folder` and wait until its nodes answer; False where it was up already. Daemons that died are
    started again under the conf they had; a cluster that is down gets a new conf, with ports that are free now. Raises
    SlurmError where Slurm is not installed, or with the ends of the logs where it stays down."""
    folder = _checked(folder)
    before = status(folder)
    if before.is_up:
        return False
    if not any(before.daemons.values()):
        _write(folder, nodes, gpus)
    for daemon in _daemons(folder):
        if _pid(folder, daemon) is None:
            _start(folder, daemon)

    def all_answer() -> bool:
        now, good = status(folder), {"idle", "mixed", "allocated", "completing"}  # idle*: a node that does not answer
        return now.is_up and len(now.nodes) == len(now.daemons) - 2 and set(now.nodes.values()) <= good

    if not _wait(all_answer, UP_WITHIN_S):
        raise _failure(folder, f"the cluster in {folder} did not come up within {UP_WITHIN_S} s")
    return True


def down(folder: Path = DEFAULT) -> bool:
    """Cancel every job, wait for the queue to empty, stop the daemons; False where nothing was running. The order
    matters: a slurmd that is killed leaves its steps behind. What is left after all, because a controller was dead or a
    task stuck, is killed by the SLURM_CONF in its environment."""
    folder = _checked(folder)
    if not any(status(folder).daemons.values()) and not _job_processes(folder):
        return False
    if _pid(folder, "slurmctld") is not None:
        _ask(folder, "scancel", *_ask(folder, "squeue", "--noheader", "--format=%A").split())
        _wait(lambda: not _ask(folder, "squeue", "--noheader"), DOWN_WITHIN_S)
    _stop_daemons(folder)
    for pid in _job_processes(folder):
        _signal(pid, signal.SIGKILL)
    _wait(lambda: not _job_processes(folder), 5)
    return True


def status(folder: Path = DEFAULT) -> Status:
    """What runs in `folder`; asks the processes first, so that it answers at once where the controller is away."""
    folder = folder.absolute()
    daemons = {daemon: _pid(folder, daemon) is not None for daemon in _daemons(folder)}
    nodes = jobs = ""
    if daemons.get("slurmctld"):
        nodes = _ask(folder, "sinfo", "--noheader", "--Node", "--format=%N %T")
        jobs = _ask(folder, "squeue", "--noheader", "--format=%A")
    states = dict(line.split() for line in nodes.splitlines())
    return Status(daemons, states, len(jobs.split()))


# ---- files -----------------------------------------------------------------------------------------------------------


def _checked(folder: Path) -> Path:
    """The absolute folder, after making sure that a cluster can live in it."""
    missing = [tool for tool in TOOLS if shutil.which(tool, path=search_path()) is None]
    if missing:
        raise SlurmError(f"no {', '.join(missing)} on this machine; apt-get install slurm-wlm munge")
    folder = folder.absolute()
    if len(os.fsencode(_munge_socket(folder))) > LONGEST_SOCKET:
        rule = f"munge's socket {_munge_socket(folder)} is longer than a socket's path may be ({LONGEST_SOCKET} bytes)"
        raise SlurmError(f"{rule}; choose a shorter folder, such as /tmp/slurm")
    if any(character in str(folder) for character in " ,#=[]%"):
        raise SlurmError(f"the folder {folder} holds a character that slurm.conf reads as its own; choose another")
    return folder


def _write(folder: Path, nodes: int, gpus: int) -> None:
    """Make the folder of a cluster that is not running. The state of an earlier one stays, and with it the job ids."""
    if nodes < 1 or gpus < 1:
        raise SlurmError(f"a cluster has at least 1 node of 1 GPU; asked for {nodes} of {gpus}")
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise SlurmError(f"user id {os.getuid()} has no name on this machine, and Slurm needs one") from None
    for name in ("state", "log", "spool", "run", "dev"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for gpu in range(gpus):
        link = folder / "dev" / f"gpu{gpu}"
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    key = folder / "munge.key"
    if not key.exists():
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
    conf = slurm_conf(folder, user, socket.gethostname(), _free_ports(nodes + 1), gpus)
    (folder / "slurm.conf").write_text(conf, encoding="utf-8")
    (folder / "gres.conf").write_text(gres_conf(folder, nodes, gpus), encoding="utf-8")


def _munge_socket(folder: Path) -> Path:
    return folder / "run" / "munge.socket"


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, at random, so that two `up` at one moment rarely choose the same."""
    found: list[int] = []
    for port in random.sample(range(FIRST_PORT, LAST_PORT + 1), LAST_PORT + 1 - FIRST_PORT):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            found.append(port)
        if len(found) == count:
            return found
    raise SlurmError(f"fewer than {count} free ports from {FIRST_PORT} to {LAST_PORT}")


def _failure(folder: Path, what: str) -> SlurmError:
    """Stop what did start of a cluster; the error, with the ends of the logs."""
    said = [f"{what}; the logs in {folder / 'log'} end with"]
    for log in sorted((folder / "log").glob("*.log")):
        end = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        said += [f"--- {log.name}", *end] if end else []
    _stop_daemons(folder)
    return SlurmError("\n".join(said))


# ---- processes -------------------------------------------------------------------------------------------------------


def search_path() -> str:
    """Debian keeps daemons in /usr/sbin, which a user's PATH may lack."""
    return os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"


def environment(folder: Path) -> dict[str, str]:
    """The caller's without any outer job's or cluster's variables, and with this cluster's conf."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SQUEUE"))}
    return kept | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": search_path()}


def _ask(folder: Path, *command: str) -> str:
    """A Slurm command's output; "" where it fails or takes longer than 10 s."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            command, env=environment(folder), stdin=DEVNULL, stderr=DEVNULL, text=True, timeout=10
        )
    return ""


def _daemons(folder: Path) -> list[str]:
    """The daemons that `folder`'s conf asks for, in the order in which they start; [] before the first `up`."""
    conf = folder / "slurm.conf"
    nodes = conf.read_text(encoding="utf-8").count("NodeName=n") if conf.exists() else 0
    return ["munged", "slurmctld", *(f"slurmd-n{i}" for i in range(nodes))] if conf.exists() else []


def _start(folder: Path, daemon: str) -> None:
    """Start one daemon; each goes to the background by itself once it has read its conf."""
    program, _, node = daemon.partition("-")
    command = [program, "-f", str(folder / "slurm.conf"), *(["-N", node] if node else [])]
    if daemon == "munged":
        command = ["munged", f"--socket={_munge_socket(folder)}", f"--key-file={folder}/munge.key", "--num-threads=2"]
        command += [f"--pid-file={folder}/run/munged.pid", f"--seed-file={folder}/run/munge.seed"]
        command += [f"--log-file={folder}/log/munged.log", "--force"]  # also where a group may write
    # not a pipe: the daemon keeps what it is given open
    with (folder / "log" / "start.log").open("ab") as out:
        done = subprocess.run(command, env=environment(folder), cwd=folder, stdin=DEVNULL, stdout=out, stderr=out)
    if done.returncode != 0:
        raise _failure(folder, f"{' '.join(command)} ended with {done.returncode}")


def _pid(folder: Path, daemon: str) -> int | None:
    """The daemon's process id while it lives."""
    with contextlib.suppress(OSError, ValueError):
        pid = int((folder / "run" / f"{daemon}.pid").read_text())
        return pid if _is_daemon(folder, daemon, pid) else None
    return None


def _is_daemon(folder: Path, daemon: str, pid: int) -> bool:
    """Whether process `pid` is this daemon: after a reboot the number in a pid file is somebody else's."""
    with contextlib.suppress(OSError):
        program, *arguments = Path(f"/proc/{pid}/cmdline").read_text(errors="surrogateescape").split("\0")
        return program.endswith(daemon.partition("-")[0]) and any(f"{folder}/" in each for each in arguments)
    return False


def _stop_daemons(folder: Path) -> None:
    for daemon in reversed(_daemons(folder)):
        pid = _pid(folder, daemon)
        for number in (signal.SIGTERM, signal.SIGKILL):
            # asked to leave, a controller saves its state at once, then waits long for nodes that do not answer
            if pid is not None and _is_daemon(folder, daemon, pid):
                _signal(pid, number)
                _wait(lambda daemon=daemon, pid=pid: not _is_daemon(folder, daemon, pid), 10)


def _job_processes(folder: Path) -> list[int]:
    """Processes of this cluster's jobs, told by their environment, and the step daemons above them."""
    conf = b"\0SLURM_CONF=" + os.fsencode(folder / "slurm.conf") + b"\0"
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environ = b"\0" + (process / "environ").read_bytes() + b"\0"
            of_a_job = b"\0SLURM_JOB_ID=" in environ or (process / "cmdline").read_bytes().startswith(b"slurmstepd")
        except OSError:  # ended, or another user's
            continue
        if conf in environ and of_a_job:
            found.append(int(process.name))
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until `condition` holds; whether it did in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


# ---- the command -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="A real Slurm on this machine, with fake GPUs.")
    parser.add_argument("verb", choices=["up", "down", "status"])
    parser.add_argument("--dir", type=Path, default=DEFAULT, help="its folder; ~/.pithtrain/cluster otherwise")
    parser.add_argument("--nodes", type=int, default=2, help="of `up`: nodes, all of them this machine")
    parser.add_argument("--gpus", type=int, default=4, help="of `up`: fake GPUs of a node")
    options = parser.parse_args()
    folder: Path = options.dir
    export = f"  export SLURM_CONF={shlex.quote(str(folder.absolute() / 'slurm.conf'))}"
    try:
        if options.verb == "up":
            began = up(folder, options.nodes, options.gpus)
            print(f"{'up' if began else 'it was up already'}: {folder}\n{export}")
        elif options.verb == "down":
            print("down" if down(folder) else "it was not running")
        else:
            now = status(folder)
            daemons = (f"{name} {'runs' if alive else 'does not run'}" for name, alive in now.daemons.items())
            print(f"{'up' if now.is_up else 'down'}: {', '.join(daemons)}")
            print("\n".join(f"  {name}  {state}" for name, state in now.nodes.items()))
            print(f"  jobs: {now.jobs}\n{export}")
    except SlurmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
