"""Is this machine fit to train, and are the nodes? Each answer is OK, WARN or FAIL; what is not OK says its mend.

Why a program and not a page. What stops a first run on a new cluster is nearly always one of few things (a build of
torch without CUDA, a folder that is not shared, a name that does not resolve, a limit of the site that takes the save's
time away), and each shows hours later as something else: a hang, a lost connection, a job that is gone.

    check_host(runs/)        about 10 s: versions, devices, collectives on this machine, the run folder, Slurm's limits
    check_nodes(2, runs/)    the same on two nodes, by one `srun` of one task each, and what lies between them: does
                             each see what another writes, do their clocks agree, do all meet, is one slow

A node's task is this module, `python -m pithtrain.doctor node FOLDER`. It prints JSON lines about its machine before it
meets the others and one after, so a node that hangs is known by its silence. The tasks meet as the ranks of a run
do, at the address and port of `worker.init_method`.

Asking and judging are apart: a function `judge_...` sees text and numbers only and is tested on them. No secret is
printed: of a W&B login only whether there is one.
"""

# torch.distributed is partly untyped:
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportPrivateImportUsage=false

import contextlib
import dataclasses
import datetime
import fcntl
import importlib.metadata
import json
import math
import netrc
import os
import platform
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from pithtrain import slurm, worker
from pithtrain.errors import SlurmError
from pithtrain.spec import SlurmSection

OLDEST_TORCH = (2, 11)
LITTLE_FREE_GIB = 50.0  # a checkpoint takes 12 bytes per parameter: 45 GiB for 4 billion
NO_FREE_GIB = 1.0
SLOW_PROBE_S = 1.0  # to write 1 MiB, flush and rename it: milliseconds on a disk, tens of them on a file server
LEAST_SHM_MIB = 512  # NCCL wants tens of MiB of /dev/shm per process; containers often have 64
LEAST_STOP_S = 30  # to finish a step and save
SKEW_S = 2.0  # between clocks: which error came first is told by them
SMI_S = 30  # nvidia-smi answers in one or two; with a GPU that fell off the bus, never
COLLECTIVE_S = 60  # the most that the collectives on one host may take
JOIN_S = 120  # from one node's readiness to the last one's
SEEN_S = 10  # for a file to appear on another node: file servers cache for a few seconds
QUEUE_S, NODES_S = 120, 300  # that srun waits for free nodes; then for all that they do
LARGE_MIB = {"nccl": 64, "gloo": 4}  # of a tensor whose bandwidth is measured
ROUNDS = 10
LONGEST_FOUND = 400  # characters of an answer that a node sends
PIP = f"{sys.executable} -m pip install"
ELSEWHERE = "output_dir: choose a folder elsewhere"
LEAST_GPU_GB_S = 5.0  # all-reduce on one host: NVLink gives hundreds, PCIe 10 to 40, a detour through the host less
SLOW_LINK = 0.5  # of the median link

# whose files other machines can see
SHARED = re.compile(r"nfs|lustre|gpfs|beegfs|ceph|weka|panfs|orangefs|glusterfs|smb|cifs|9p|virtiofs|fuse\.")


@dataclasses.dataclass(frozen=True)
class Check:
    """One answer. `found`: what is so; `mend`: a command or one concrete act, "" where all is well."""

    name: str
    verdict: Literal["OK", "WARN", "FAIL"]
    found: str
    mend: str = ""


# ---- the two doors, and how the answers are told ---------------------------------------------------------------------


def check_host(output_dir: Path) -> list[Check]:
    """This machine, and what the configuration of its Slurm means for a run."""
    return [*_machine(output_dir), *_slurm()]


def check_nodes(nodes: int, output_dir: Path, site: SlurmSection | None = None) -> list[Check]:
    """Each of `nodes` nodes, and the collectives between them, in one job that takes them whole where they have GPUs.

    `site`: a run's slurm section, of which the job gets what says where and how (partition, account, env, setup,
    srun_args); without one, what any srun reads: SLURM_PARTITION, SLURM_ACCOUNT, ... Ends within QUEUE_S + NODES_S.
    """
    site = site or SlurmSection()
    if not slurm.configured():
        return [Check("nodes", "FAIL", "there is no Slurm on this machine", "run it where `sinfo` answers")]
    command = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--job-name=pithtrain-doctor"]
    command += [f"--immediate={QUEUE_S}", f"--time={math.ceil(NODES_S / 60) + 1}", "--quit-on-interrupt"]
    command += ["--kill-on-bad-exit=0", "--cpu-bind=none"]  # a bad node must not silence the others
    where = {name: getattr(site, name) for name in ("partition", "account", "qos", "constraint", "exclude")}
    command += [f"--{name}={value}" for name, value in where.items() if value is not None]
    command += [*_whole_nodes(site.partition), *site.srun_args]
    if site.setup:
        command += ["bash", "-c", "\n".join([*site.setup, 'exec "$@"']), "doctor"]
    command += [sys.executable, "-m", "pithtrain.doctor", "node", str(output_dir.absolute())]
    task = subprocess.Popen(
        command,
        env=os.environ | site.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        out, said = task.communicate(timeout=QUEUE_S + NODES_S)
    except subprocess.TimeoutExpired:
        task.send_signal(signal.SIGINT)  # srun then ends its job
        out, said = task.communicate()
    reports = [json.loads(line) for line in out.splitlines() if line.startswith('{"doctor":')]
    listed = next((report["nodes"] for report in reports if "nodes" in report), None)
    return judge_nodes(reports, slurm.hostnames(listed or ""), said)


def text(checks: Sequence[Check]) -> str:
    """A table, each mend under its line; the last line counts."""
    width = max((len(check.name) for check in checks), default=0)
    lines: list[str] = []
    for check in checks:
        lines.append(f"{check.verdict:<4}  {check.name:<{width}}  {check.found}")
        if check.mend:
            lines.append(f"{'':<{width + 6}}  -> {check.mend}")
    counts = [f"{sum(check.verdict == verdict for check in checks)} {verdict}" for verdict in ("OK", "WARN", "FAIL")]
    return "\n".join([*lines, ", ".join(counts)])


def as_json(checks: Sequence[Check]) -> str:
    """A list of objects with the fields of `Check`."""
    return json.dumps([dataclasses.asdict(check) for check in checks])


def failed(checks: Sequence[Check]) -> bool:
    return any(check.verdict == "FAIL" for check in checks)


# ---- this machine ----------------------------------------------------------------------------------------------------


def _machine(output_dir: Path) -> Iterator[Check]:
    """What is asked on a login node and on each compute node."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Check("host", "OK", f"{cores} cores, {memory:.0f} GiB of memory")
    yield Check("python", "OK", f"{platform.python_version()}, {sys.executable}")
    known = _installed("pithtrain") is not None  # else the code comes from PYTHONPATH alone
    yield judge_packages((known and importlib.metadata.requires("pithtrain")) or [], _installed)
    yield from _torch()
    yield collective()
    if (shm := Path("/dev/shm")).exists():
        free = shutil.disk_usage(shm).free / 2**20
        mend = "mount -o remount,size=16G /dev/shm; for a container, --shm-size=16g"
        yield _judge("shm", free >= LEAST_SHM_MIB, f"{free:,.0f} MiB free in /dev/shm, through which NCCL talks", mend)
    yield from folder(output_dir)
    mask = os.umask(0o077)
    os.umask(mask)
    mend = "umask 022 in your shell's profile: others may write to the files that you make"
    yield _judge("umask", mask & 0o022 == 0o022, f"{mask:04o}", mend)
    git = _answer("git", "--version")
    mend = "install git: without it a run's commit is not recorded"
    yield _judge("git", git is not None, (git or "not found").removeprefix("git version "), mend)
    yield Check("wandb", "OK", login(os.environ, Path.home()))


def _judge(name: str, well: bool, found: str, mend: str, bad: Literal["WARN", "FAIL"] = "WARN") -> Check:
    return Check(name, "OK", found) if well else Check(name, bad, found, mend)


def _answer(*command: str, timeout_s: float = 10) -> str | None:
    """A command's stripped output; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def judge_packages(requirements: Sequence[str], version_of: Callable[[str], str | None]) -> Check:
    """What the package asks for, lines like `numpy>=1.26`, against what is installed. Lines of extras have a marker."""
    found: list[str] = []
    missing: list[str] = []
    for line in requirements:
        if match := re.fullmatch(r"([\w.-]+)>=([\d.]+)", line):
            version = version_of(match[1])
            found.append(f"{match[1]} {version or 'missing'}")
            if version is None or _numbers(version) < _numbers(match[2]):
                missing.append(f"'{line}'")
    return _judge(
        "packages",
        not missing,
        ", ".join(found) or "pithtrain itself is not installed",
        f"{PIP} {' '.join(missing)}",
        bad="FAIL",
    )


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cu130 -> (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _torch() -> Iterator[Check]:
    """torch itself, the devices it sees, the libraries it brings."""
    reinstall = f"{PIP} --force-reinstall 'torch>=2.11'"
    try:
        import torch
    except Exception as error:  # an ImportError, or an OSError for a library of its own that is missing
        yield Check("torch", "FAIL", f"cannot be imported: {error}", reinstall)
        return
    built_for = torch.version.cuda
    found = f"{torch.__version__}, built for {f'CUDA {built_for}' if built_for else 'CPUs alone'}"
    yield _judge("torch", _numbers(torch.__version__) >= OLDEST_TORCH, found, reinstall, bad="FAIL")
    listed = _answer("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", timeout_s=SMI_S)
    trouble: list[str] = []
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(seen):
        try:
            free, total = torch.cuda.mem_get_info(index)
            if total - free > 2 * 2**30:
                trouble.append(f"GPU {index}: {(total - free) / 2**30:.0f} GiB are taken by another process")
            one = torch.ones(1024, device=f"cuda:{index}")
            if (one + one).sum().item() != 2048:
                trouble.append(f"GPU {index}: computes wrongly")
        except Exception as error:
            trouble.append(f"GPU {index}: {str(error).splitlines()[0]}")
    yield judge_devices(listed, seen, built_for, os.environ.get("SLURM_GPUS_ON_NODE"), trouble)
    nccl = cudnn = None
    with contextlib.suppress(Exception):  # a build for CPUs alone has neither
        import torch.cuda.nccl

        nccl = ".".join(map(str, cast(tuple[int, ...], torch.cuda.nccl.version())))
        cudnn = str(torch.backends.cudnn.version())
    for name, version in (("nccl", nccl), ("cudnn", cudnn), ("triton", _installed("triton"))):
        well = version is not None or not seen
        yield _judge(name, well, version or ("missing" if seen else "none, and no GPU wants it"), reinstall, bad="FAIL")


def judge_devices(listed: str | None, seen: int, built_for: str | None, given: str | None, trouble: list[str]) -> Check:
    """`listed`: nvidia-smi's lines (name, driver), None where it gave none; `seen`: by torch; `given`: by Slurm."""
    gpus = [line for line in (listed or "").splitlines() if ", " in line]
    if seen:
        found = f"{seen} x {gpus[0] if gpus else 'a GPU that nvidia-smi does not tell of'}"
        busy = all("another process" in words for words in trouble)
        mend = "`nvidia-smi` shows whose; slurm.exclusive=true keeps others away" if busy else "--exclude this node"
        return _judge("devices", not trouble, "; ".join([found, *trouble]), mend, bad="WARN" if busy else "FAIL")
    if gpus:
        found = f"nvidia-smi lists {len(gpus)} x {gpus[0]}, torch sees none"
        if built_for is None:
            return Check("devices", "FAIL", f"{found}: it is built for CPUs alone", "install a build of torch for CUDA")
        why = f"{sys.executable} -c 'import torch; torch.cuda.init()'"
        mend = f"{why} says why: CUDA_VISIBLE_DEVICES is empty, or the driver older than CUDA {built_for}"
        return Check("devices", "FAIL", found, mend)
    mend = "--exclude this node, whose driver is broken (the GPUs of `pithtrain cluster up` are fake: leave them)"
    return _judge("devices", not given, f"Slurm gives {given} GPUs, no driver answers" if given else "no GPU", mend)


def collective() -> Check:
    """All-reduces between processes of this host: over NCCL where there are two GPUs or more, else over gloo."""
    gpus = 0
    with contextlib.suppress(Exception):
        import torch

        gpus = min(torch.cuda.device_count(), 8) if torch.cuda.is_available() else 0
    backend, size = ("nccl", gpus) if gpus > 1 else ("gloo", 2)
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    with tempfile.TemporaryDirectory(prefix="pithtrain-doctor-") as there:
        command = [sys.executable, "-m", "pithtrain.doctor", "collective", backend, str(size), f"{there}/store"]
        outputs = [Path(there) / f"{rank}.txt" for rank in range(size)]
        tasks: list[subprocess.Popen[bytes]] = []
        for rank, output in enumerate(outputs):
            with output.open("wb") as file:
                tasks.append(subprocess.Popen([*command, str(rank)], env=env, stdout=file, stderr=subprocess.STDOUT))
        deadline = time.monotonic() + COLLECTIVE_S
        try:
            while None in [task.poll() for task in tasks] and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            for task in tasks:
                task.kill()
                task.wait()
        said = [output.read_text(errors="replace").strip() for output in outputs]
        return judge_collective(backend, [task.returncode for task in tasks], said)


def judge_collective(backend: str, codes: Sequence[int], said: Sequence[str]) -> Check:
    """`said`: what each process printed; its last line is a measurement, or why there is none."""
    who = f"{'NCCL over {} GPUs' if backend == 'nccl' else 'gloo over {} processes'}".format(len(codes))
    mend = "ip link set lo up: the loopback interface may be down"
    if backend == "nccl":
        mend = "`nvidia-smi topo -m` shows the links; NCCL_P2P_DISABLE=1 pithtrain doctor goes round direct access"
    if any(codes):
        first = max(range(len(codes)), key=lambda rank: codes[rank])  # who was killed here waited for another
        last = (said[first].splitlines() or [f"no answer within {COLLECTIVE_S} s"])[-1]
        return Check("collectives", "FAIL", f"{who}: rank {first}: {last}", mend)
    small_s, gb_s = json.loads(said[0].splitlines()[-1])
    found = f"{who}: small all-reduce {small_s * 1e6:,.0f} us, {LARGE_MIB[backend]} MiB at {gb_s:.3g} GB/s"
    return _judge("collectives", backend == "gloo" or gb_s >= LEAST_GPU_GB_S, found, mend)


def login(env: Mapping[str, str], home: Path) -> str:
    """Whether W&B would find a key, in words, never the key."""
    if env.get("WANDB_API_KEY"):
        return "a key in WANDB_API_KEY"
    host = urlsplit(env.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        if netrc.netrc(env.get("NETRC") or home / ".netrc").authenticators(host):
            return f"logged in to {host}"
    return "no login; `wandb login` before logging.wandb.mode=online"


# ---- the folder of the runs ------------------------------------------------------------------------------------------


def folder(output_dir: Path) -> Iterator[Check]:
    """Does the file system under the runs keep what rundir relies on: flushed, renamed at once, locked for one."""
    there = _existing(output_dir)
    mounts = Path("/proc/self/mounts")
    kind = (slurm.file_system(there, mounts.read_text()) if mounts.exists() else "") or "unknown"
    reach = "shared" if SHARED.match(kind) else "this machine's memory" if kind == "tmpfs" else "this machine's own"
    yield _judge("folder", kind != "tmpfs", f"{there}: {kind}, {reach}", ELSEWHERE)
    about = os.statvfs(there)
    yield judge_free(about.f_bavail * about.f_frsize / 2**30, about.f_favail if about.f_files else None)
    try:
        probe = Path(tempfile.mkdtemp(prefix=".pithtrain-doctor-", dir=there))
    except OSError as error:
        yield Check("writing", "FAIL", f"{there}: {error.strerror}", f"chmod u+w {there}; or {ELSEWHERE}")
        return
    try:
        yield _writing(probe)
        yield _locks(probe)
        before = time.time()
        (probe / "clock").touch()
        skew = (before + time.time()) / 2 - (probe / "clock").stat().st_mtime
        found = f"{skew:+.1f} s from that of the folder's file system"
        yield _judge("clock", abs(skew) < SKEW_S, found, "chronyc makestep, or have this machine's clock synchronised")
    except OSError as error:
        yield Check("writing", "FAIL", f"{there}: {error.strerror}", ELSEWHERE)
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def _existing(path: Path) -> Path:
    """The folder itself or, before the first run, the one above it that is there."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())


def judge_free(gib: float, inodes: int | None) -> Check:
    """`inodes`: how many files can still be made; None where the file system does not count them."""
    found = f"{gib:,.0f} GiB" + ("" if inodes is None else f" and {inodes:,} files")
    mend = f"remove old checkpoints (one takes 12 bytes per parameter), or {ELSEWHERE}"
    full = gib < NO_FREE_GIB or (inodes is not None and inodes < 10_000)
    return _judge("free space", not full and gib >= LITTLE_FREE_GIB, found, mend, bad="FAIL" if full else "WARN")


def _writing(probe: Path) -> Check:
    """Write, flush, rename over an older file, flush the folder: what makes a marker and a checkpoint whole."""
    began = time.monotonic()
    (probe / "whole").write_text("old")
    with (probe / "aside").open("wb") as file:
        file.write(b"n" * 2**20)
        file.flush()
        os.fsync(file.fileno())
    (probe / "aside").replace(probe / "whole")
    handle = os.open(probe, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    took = time.monotonic() - began
    if (probe / "whole").read_bytes() != b"n" * 2**20:
        return Check("writing", "FAIL", "a file renamed over another still reads as the old one", ELSEWHERE)
    return _judge("writing", took < SLOW_PROBE_S, f"1 MiB flushed and renamed in {took * 1e3:,.0f} ms", ELSEWHERE)


def _locks(probe: Path) -> Check:
    with (probe / "lock").open("w") as one, (probe / "lock").open("w") as other:
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            mend = f"mount it with locks (lustre: -o flock), or {ELSEWHERE}"
            return Check("locks", "FAIL", f"flock: {error.strerror}", mend)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Check("locks", "OK", "flock lets one in")
    return Check("locks", "WARN", "flock lets two in at once", f"give one command for a run at a time, or {ELSEWHERE}")


# ---- Slurm -----------------------------------------------------------------------------------------------------------


def _slurm() -> Iterator[Check]:
    if not slurm.configured():
        yield Check("slurm", "OK", "none here: `submit` starts processes of this machine")
        return
    try:
        began = time.monotonic()
        config = parse_config(slurm.call("scontrol", "show", "config"))
        took = time.monotonic() - began
        listed = slurm.call("scontrol", "show", "partition", "--oneliner")
    except SlurmError as error:
        yield Check("slurm", "FAIL", str(error).splitlines()[0], "`pithtrain cluster status`, `scontrol ping`")
        return
    yield Check("slurm", "OK", f"{config.get('SLURM_VERSION', '?')}, its controller answers in {took * 1e3:,.0f} ms")
    kept = f"an ended job is known for MinJobAge = {config.get('MinJobAge', '?')}, after that by its run directory"
    if config.get("AccountingStorageType", "").endswith("none"):
        yield Check("accounting", "OK", f"none: {kept}")
    else:
        try:
            slurm.call("sacct", "--allocations", "--noheader", "--starttime=now")
            yield Check("accounting", "OK", "sacct answers")
        except SlurmError as error:
            yield Check("accounting", "WARN", f"{str(error).splitlines()[0]}; {kept}", "`sacctmgr ping`")
    yield from judge_limits(config, [slurm.fields(line) for line in listed.splitlines()])


def parse_config(answer: str) -> dict[str, str]:
    """`scontrol show config`: lines of `Name = value`."""
    pairs = (line.split("=", 1) for line in answer.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _seconds(value: str) -> int:
    """`30 sec` or `30` -> 30."""
    return int(value.partition(" ")[0])


def judge_limits(config: Mapping[str, str], partitions: Sequence[Mapping[str, str]]) -> Iterator[Check]:
    """What the site's settings mean for stopping and going on. They are not ours: each mend is what a user can do."""
    for row in partitions:
        name = f"{row.get('PartitionName')}{'*' if row.get('Default') == 'YES' else ''}"
        found, mend = _preemption(config, row)
        facts = f"{row.get('TotalNodes')} nodes, up to {row.get('MaxTime', '?').lower()}, {found}"
        up = row.get("State", "UP") == "UP"
        mend = mend if up else "slurm.partition: choose another, `sinfo -s` shows them"
        yield _judge(f"partition {name}", up and not mend, facts if up else f"{facts}; {row['State'].lower()}", mend)
    wait = _seconds(config.get("KillWait", "30"))
    mend = "stop runs with `pithtrain cancel RUN`: it waits for the save"
    yield _judge("stopping", wait >= LEAST_STOP_S, f"KillWait: {wait} s from scancel to the kill", mend)
    yield Check("requeue", "OK", f"JobRequeue: {config.get('JobRequeue', '?')}; a run's script asks for it in any case")
    tracked = config.get("ProctrackType", "").removeprefix("proctrack/")
    mend = "a process that left its group outlives a kill: `pgrep -u $USER python` on the node finds it"
    yield _judge("tracking", tracked != "pgid", f"ProctrackType: {tracked}", mend)
    strict = config.get("EnforcePartLimits", "NO")
    yield Check("limits", "OK", f"EnforcePartLimits: {strict}; `submit` looks by itself for what can never start")


def _preemption(config: Mapping[str, str], row: Mapping[str, str]) -> tuple[str, str]:
    """What preemption does to a job of this partition, and what to do about it, "" where nothing."""
    mode = row.get("PreemptMode", "OFF")
    if config.get("PreemptType", "").endswith("none") or mode == "OFF":
        return "never preempted", ""
    grace = _seconds(row.get("GraceTime", "0"))
    time_s = grace + _seconds(config.get("KillWait", "30"))
    found = f"preempted by {mode.lower()} with {time_s} s to save"
    often = "checkpoint.interval: save as often as steps may be lost"
    if "SUSPEND" in mode:
        return f"{found} (a suspended run outlives its collectives' time-outs)", "slurm.partition: choose another"
    if mode == "CANCEL" and grace == 0:
        return f"{found} (Slurm restarts nothing)", f"{often}; afterwards `pithtrain resume RUN`"
    return found, often if time_s < LEAST_STOP_S else ""


# ---- several nodes ---------------------------------------------------------------------------------------------------


def _whole_nodes(partition: str | None) -> list[str]:
    """Options of srun by which a job gets all GPUs, cores and memory of its nodes; little where they have no GPU."""
    nodes = slurm.read_nodes(slurm.call("scontrol", "show", "node", "--oneliner"))
    names = frozenset((partition or "").split(","))
    counts = [node.num_gpus for node in nodes if node.num_gpus and (partition is None or names & node.partitions)]
    return [f"--gpus-per-node={min(counts)}", "--exclusive", "--mem=0"] if counts else ["--mem=4G"]


def node(output_dir: Path) -> None:
    """A node's task: JSON lines about this machine, then about the meeting with the others. Does not return.

    The lines are short, since srun cuts those of more than 1024 bytes and mixes the pieces of different tasks.
    """

    def say(**fields: Any) -> None:
        print(json.dumps({"doctor": os.environ["SLURMD_NODENAME"], **fields}), flush=True)

    say(nodes=os.environ["SLURM_STEP_NODELIST"])
    for check in _machine(output_dir):
        say(check=dataclasses.asdict(dataclasses.replace(check, found=check.found[:LONGEST_FOUND])))
    token = f"{os.environ['SLURM_JOB_ID']}-{os.environ['SLURM_STEP_ID']}"
    shared = _existing(output_dir) / f".pithtrain-doctor-{token}"
    try:
        met, links = meet(shared)
        for rank, gb_s in links.items():
            say(link=[rank, gb_s])
        say(met=met)
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}".splitlines()[0][:LONGEST_FOUND])
    with contextlib.suppress(OSError):
        shared.unlink(missing_ok=True)
    sys.stdout.flush()
    os._exit(0)  # a communicator whose peer is gone must not hold this process


def meet(shared: Path) -> tuple[dict[str, Any], dict[int, float]]:
    """Measure what lies between the nodes, one rank each. `shared`: a file for rank 0 to make.

    clock_s   this clock minus rank 0's
    seen_s    until the file was seen here; None: never
    small_s   of a small all-reduce over all; gb_s: bus bandwidth of a large one

    And on rank 0 GB/s to each other rank and back: one bad cable slows the all-reduces of all alike, and names nobody.
    """
    import torch
    import torch.distributed as dist

    here = worker.seat(os.environ)
    rank, size = here.rank, here.world_size
    method = worker.init_method(os.environ | {"MASTER_ADDR": _address(os.environ)}, Path(os.devnull))
    address, timeout = urlsplit(method), datetime.timedelta(seconds=JOIN_S)
    store = dist.TCPStore(address.hostname or "", address.port or 0, size, rank == 0, timeout)
    clock_s = 0.0
    if rank == 0:
        with contextlib.suppress(OSError):  # then nobody sees it
            shared.touch()
        for other in range(1, size):  # each in turn: none waits in a queue while its clock is compared
            store.wait([f"ask{other}"])
            store.set(f"clock{other}", repr(time.time()))
        store.set("written", "")
    else:
        before = time.time()
        store.set(f"ask{rank}", "")
        rank_0_s = float(store.get(f"clock{rank}"))
        clock_s = (before + time.time()) / 2 - rank_0_s
    store.wait(["written"])
    began = time.monotonic()
    while shared.name not in os.listdir(shared.parent) and time.monotonic() - began < SEEN_S:
        time.sleep(0.1)
    seen_s = time.monotonic() - began
    # gloo in any case, as in a run: its flags and checkpoints are agreed on by it
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    small_s, gb_s = _all_reduce("gloo", "cpu")
    backend, device = "gloo", "cpu"
    group: Any = None
    if torch.cuda.is_available():
        backend, device, group = "nccl", "cuda:0", dist.new_group(backend="nccl", timeout=timeout)
        small_s, gb_s = _all_reduce(backend, device, group)
    tensor = torch.zeros(LARGE_MIB[backend] * 2**18, device=device)

    def there_and_back(other: int) -> None:
        for sender in (0, other):
            (dist.send if rank == sender else dist.recv)(tensor, other if rank == 0 else 0, group=group)

    others = range(1, size) if rank == 0 else [rank]
    seconds = {other: _seconds_of(lambda other=other: there_and_back(other), device) for other in others}
    links = {other: 8 * tensor.numel() / took / 1e9 for other, took in seconds.items() if rank == 0}
    dist.barrier()
    seen = seen_s if seen_s < SEEN_S else None
    return {"rank": rank, "clock_s": clock_s, "seen_s": seen, "small_s": small_s, "gb_s": gb_s}, links


def _address(env: Mapping[str, str]) -> str:
    """Rank 0's host. A batch script's srun tells it, ours is elsewhere; where a name does not resolve, Slurm knows."""
    host = env.get("MASTER_ADDR") or worker.first_host(env["SLURM_STEP_NODELIST"])
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return slurm.fields(slurm.call("scontrol", "show", "node", host, "--oneliner")).get("NodeAddr", host)
    return host


def _seconds_of(act: Callable[[], object], device: str) -> float:
    """The median time of a communication, after a first one that connects."""
    import torch

    took: list[float] = []
    for _ in range(1 + ROUNDS):
        began = time.monotonic()
        act()
        if device != "cpu":
            torch.cuda.synchronize()
        took.append(time.monotonic() - began)
    return statistics.median(took[1:])


def _all_reduce(backend: str, device: str, group: Any = None) -> tuple[float, float]:
    """(seconds of a small all-reduce over the group, by default of all ranks, GB/s of a large one).

    Bus bandwidth as NCCL's own tests count it: 2 (n - 1) / n times the bytes, per second.
    """
    import torch
    import torch.distributed as dist

    small, large = (torch.zeros(numel, device=device) for numel in (1, LARGE_MIB[backend] * 2**18))
    size = dist.get_world_size()
    small_s, large_s = (
        _seconds_of(lambda tensor=tensor: dist.all_reduce(tensor, group=group), device) for tensor in (small, large)
    )
    return small_s, 2 * (size - 1) / size * 4 * large.numel() / large_s / 1e9


def judge_nodes(reports: Sequence[Mapping[str, Any]], hosts: Sequence[str], said: str) -> list[Check]:
    """The nodes' lines as checks. `hosts`: the nodes of the job; `said`: what srun wrote to stderr."""
    errors = [line.partition("error: ")[2] for line in said.splitlines() if "error: " in line]
    if not reports:
        mend = "`sinfo` shows which nodes are free" if "busy" in said else "`sinfo -N -l` shows the state of each node"
        return [Check("nodes", "FAIL", (errors or ["srun ended without a word"])[0], mend)]
    about: dict[str, dict[str, Check]] = {each["doctor"]: {} for each in reports}
    for each in reports:
        if "check" in each:
            about[each["doctor"]][each["check"]["name"]] = Check(**each["check"])
    met = {each["doctor"]: each["met"] for each in reports if "met" in each}
    why = {each["doctor"]: each["error"] for each in reports if "error" in each}
    checks: list[Check] = []
    for host in hosts:
        if not about.get(host):
            words = next((line for line in errors if re.search(rf"\b{re.escape(host)}\b", line)), "no word from srun")
            checks.append(Check(host, "FAIL", f"its task ended before it could tell: {words}", _without(host)))
            continue
        told = about[host]
        bad = [dataclasses.replace(check, name=f"{host} {check.name}") for check in told.values() if check.mend]
        facts = [f"{len(told) - len(bad)} of {len(told)} checks are well"]
        facts += [told[name].found for name in ("host", "devices") if name in told]
        checks += [Check(host, "OK", "; ".join(facts)), *bad]
        if host not in met:
            found = why.get(host, "no answer from the meeting of all nodes")
            checks.append(Check(f"{host} meeting", "FAIL", found, _meeting_mend(host, found)))
    links = dict(each["link"] for each in reports if "link" in each)
    return [*checks, *_unlike(about), *(_between(met, links) if len(met) == len(hosts) else ())]


def _without(host: str) -> str:
    return f"leave it out: `pithtrain resume RUN --exclude {host}`, or `submit` with --set slurm.exclude={host}"


def _meeting_mend(host: str, found: str) -> str:
    if "nccl" in found.lower():
        return "slurm.env: NCCL_SOCKET_IFNAME (`ip -brief address` on a node), NCCL_IB_HCA (`ibv_devices`), with a `=`"
    if re.search(r"gloo|resolve|hostname", found, re.IGNORECASE):
        return "slurm.env: {GLOO_SOCKET_IFNAME: the interface between the nodes}, see `ip -brief address` on one"
    if re.search(r"listen|connect|address", found, re.IGNORECASE):
        return "slurm.env: {MASTER_ADDR: ..., MASTER_PORT: ...}, an address and a port that are open between the nodes"
    return _without(host)


def _unlike(about: Mapping[str, Mapping[str, Check]]) -> Iterator[Check]:
    """Versions and devices must be the same everywhere: ranks of different torch or NCCL hang, or differ in silence."""
    for name in ("python", "packages", "torch", "nccl", "devices"):
        told = {host: checks[name].found for host, checks in about.items() if name in checks}
        usual = statistics.mode(told.values() or [""])
        for host, found in told.items():
            if found != usual:
                yield Check(f"{host} {name}", "WARN", f"unlike the others: {found}; they: {usual}", _without(host))


def _between(met: Mapping[str, Mapping[str, Any]], links: Mapping[int, float]) -> Iterator[Check]:
    """What all nodes measured together; `links`: GB/s between rank 0 and the others, by rank."""
    host_of = {report["rank"]: host for host, report in met.items()}
    first = met[host_of[0]]
    found = f"{len(met)} nodes: small all-reduce {first['small_s'] * 1e6:,.0f} us, large at {first['gb_s']:.3g} GB/s"
    yield Check("meeting", "OK", found)
    blind = [host for host, report in met.items() if report["seen_s"] is None]
    found = f"{', '.join(blind) or 'no node'} does not see a file that {host_of[0]} wrote"
    if not blind:
        found = f"a file of {host_of[0]} is seen by all within {max(report['seen_s'] for report in met.values()):.1f} s"
    yield _judge("shared folder", not blind, found, f"{ELSEWHERE}, on a shared file system (`df -T`)", bad="FAIL")
    skews = {host: report["clock_s"] for host, report in met.items()}
    worst = max(skews, key=lambda host: abs(skews[host]))
    found = f"at most {abs(skews[worst]):.3f} s apart, {worst} from {host_of[0]}"
    yield _judge("clocks", abs(skews[worst]) < SKEW_S, found, f"chronyc makestep there, or {_without(worst)}")
    usual = statistics.median(links.values() or [0.0])
    for rank, gb_s in links.items():
        if gb_s < SLOW_LINK * usual:
            host = host_of[rank]
            yield Check(
                f"{host} link", "WARN", f"{gb_s:.3g} GB/s from {host_of[0]}; usual: {usual:.3g}", _without(host)
            )


def main(arguments: Sequence[str]) -> None:
    """`node FOLDER`, as check_nodes starts it; `collective BACKEND SIZE STORE RANK`, as collective does."""
    if arguments[0] == "node":
        node(Path(arguments[1]))
    import torch
    import torch.distributed as dist

    _, backend, size, store, rank = arguments
    device = "cpu" if backend == "gloo" else f"cuda:{rank}"
    if device != "cpu":
        torch.cuda.set_device(int(rank))
    timeout = datetime.timedelta(seconds=COLLECTIVE_S)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=int(rank), world_size=int(size), timeout=timeout
    )
    print(json.dumps(_all_reduce(backend, device)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
