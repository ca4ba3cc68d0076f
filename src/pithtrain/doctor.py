"""Is this machine fit to train, and are the nodes? Each answer is OK, WARN or FAIL; what is not OK says its mend.

What stops a first run on a new cluster is nearly always one of few things (a build of torch without CUDA, a folder that
is not shared, a name that does not resolve, a limit of the site that takes the save's time away), and each shows hours
later as something else: a hang, a lost connection, a job that is gone.

    check_host(runs/)        about 10 s: versions, devices, collectives on this machine, the run folder, Slurm's limits
    check_nodes(2, runs/)    the same on two nodes, by one `srun` of one task each, and what lies between them

A node's task is this module, `python -m pithtrain.doctor node FOLDER`. It prints JSON lines about its machine before it
meets the others, as the ranks of a run do, and one after, so a node that hangs is known by its silence.

Asking and judging are apart: a function `judge_...` sees text and numbers only and is tested on them. No secret is
printed: of a W&B login only whether there is one.
"""

# torch.distributed is partly untyped:
# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportPrivateImportUsage=false

import contextlib
import dataclasses
import datetime
import fcntl
import functools
import importlib.metadata
import json
import netrc
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pithtrain import catalog, rundir, slurm, worker
from pithtrain.errors import SlurmError, me
from pithtrain.spec import SlurmSection
from pithtrain.watch import usable_cores

LEAST_STOP_S = 30  # to finish a step and save
SKEW_S = 2.0  # between clocks: which error came first is told by them
COLLECTIVE_S = 60  # the most that the collectives on one host may take
SEEN_S = 10  # for a file to appear on another node: file servers cache for a few seconds
QUEUE_S, NODES_S = 120, 300  # that srun waits for free nodes; then for all that they do
LARGE_MIB = {"nccl": 64, "gloo": 4}  # of a tensor whose bandwidth is measured
LEAST_GPU_GB_S = 5.0  # all-reduce on one host: NVLink gives hundreds, PCIe 10 to 40, a detour through the host less
PIP = f"{sys.executable} -m pip install"
ELSEWHERE = "output_dir: choose a folder elsewhere"

MEETING_MENDS = {  # what the error of a node that cannot meet the others says -> what to do
    "nccl": "slurm.env: NCCL_SOCKET_IFNAME (`ip -brief address` on a node), NCCL_IB_HCA (`ibv_devices`), with a `=`",
    "gloo|resolve|hostname": "slurm.env: GLOO_SOCKET_IFNAME, the interface between the nodes (`ip -brief address`)",
    "listen|connect|address": "slurm.env: MASTER_ADDR and MASTER_PORT, both open between the nodes",
}
# whose files other machines can see
SHARED = re.compile(r"nfs|lustre|gpfs|beegfs|ceph|weka|panfs|orangefs|glusterfs|smb|cifs|9p|virtiofs|fuse\.")


@dataclasses.dataclass(frozen=True)
class Check:
    """One answer. `found`: what is so; `mend`: a command or one concrete act, "" where all is well."""

    name: str
    verdict: Literal["OK", "WARN", "FAIL"]
    found: str
    mend: str = ""


def check_host(output_dir: Path) -> list[Check]:
    """This machine, and what the configuration of its Slurm means for a run."""
    return [*_machine(output_dir), *_slurm()]


def check_nodes(nodes: int, output_dir: Path, site: SlurmSection | None = None) -> list[Check]:
    """Each of `nodes` nodes, and the collectives between them, in one job that takes them whole where they have GPUs.
    `site`: a run's slurm section, for where and how; without one srun reads SLURM_PARTITION, SLURM_ACCOUNT, ... Ends
    within QUEUE_S + NODES_S."""
    site = site or SlurmSection()
    if not slurm.configured():
        return [Check("nodes", "FAIL", "there is no Slurm on this machine", "run it where `sinfo` answers")]
    command = ["timeout", "--foreground", "--signal=INT", str(QUEUE_S + NODES_S)]  # on SIGINT srun ends its job
    command += ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--job-name=pithtrain-doctor"]
    command += [f"--immediate={QUEUE_S}", f"--time={NODES_S // 60 + 1}", "--quit-on-interrupt"]
    command += ["--kill-on-bad-exit=0", "--cpu-bind=none"]  # a bad node must not silence the others
    where = {name: getattr(site, name) for name in ("partition", "account", "qos", "constraint", "exclude")}
    command += [f"--{name}={value}" for name, value in where.items() if value is not None]
    command += [*_whole_nodes(site.partition), *site.srun_args]
    if site.setup:
        command += ["bash", "-c", "\n".join([*site.setup, 'exec "$@"']), "doctor"]
    command += [sys.executable, "-m", "pithtrain.doctor", "node", str(output_dir.absolute())]
    env = os.environ | site.env
    done = subprocess.run(command, env=env, input="", capture_output=True, text=True, errors="replace")
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"doctor":')]
    listed = next((report["nodes"] for report in reports if "nodes" in report), "")
    return judge_nodes(reports, slurm.hostnames(listed), done.stderr)


def text(checks: Sequence[Check]) -> str:
    """A table, each mend under its line; the last line counts."""
    width = max((len(check.name) for check in checks), default=0)
    lines: list[str] = []
    for check in checks:
        lines.append(f"{check.verdict:<4}  {check.name:<{width}}  {check.found}")
        lines += [f"{'':<{width + 6}}  -> {check.mend}"] if check.mend else []
    verdicts = [check.verdict for check in checks]
    return "\n".join([*lines, ", ".join(f"{verdicts.count(each)} {each}" for each in ("OK", "WARN", "FAIL"))])


def _judge(name: str, well: bool, found: str, mend: str, bad: Literal["WARN", "FAIL"] = "WARN") -> Check:
    return Check(name, "OK", found) if well else Check(name, bad, found, mend)


# ---- this machine ----------------------------------------------------------------------------------------------------


def _machine(output_dir: Path) -> Iterator[Check]:
    """What is asked on a login node and on each compute node."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield Check("host", "OK", f"{usable_cores()} cores, {memory:.0f} GiB of memory")
    yield Check("python", "OK", f"{sys.version.split()[0]}, {sys.executable}")
    known = rundir.installed("pithtrain") is not None  # else the code comes from PYTHONPATH alone
    yield judge_packages((known and importlib.metadata.requires("pithtrain")) or [], rundir.installed)
    yield from _torch()
    yield collective()
    if (shm := Path("/dev/shm")).exists():
        free = shutil.disk_usage(shm).free / 2**20
        mend = "mount -o remount,size=16G /dev/shm; for a container, --shm-size=16g"
        # NCCL wants tens of MiB per process; containers often have 64
        yield _judge("shm", free >= 512, f"{free:,.0f} MiB free in /dev/shm, through which NCCL talks", mend)
    yield from folder(output_dir)
    mask = os.umask(0o077)
    os.umask(mask)
    mend = "umask 022 in your shell's profile: others may write to the files that you make"
    yield _judge("umask", mask & 0o022 == 0o022, f"{mask:04o}", mend)
    git = rundir.answer("git", "--version")
    mend = "install git: without it a run's commit is not recorded"
    yield _judge("git", git is not None, (git or "not found").removeprefix("git version ").strip(), mend)
    yield Check("wandb", "OK", login(os.environ, Path.home()))


def judge_packages(requirements: Sequence[str], version_of: Callable[[str], str | None]) -> Check:
    """What the package asks for, lines like `numpy>=1.26`, against what is installed. Lines of extras have a marker."""
    asked = {match[1]: match[2] for line in requirements if (match := re.fullmatch(r"([\w.-]+)>=([\d.]+)", line))}
    have = {name: version_of(name) or "missing" for name in asked}
    old = [f"'{name}>={least}'" for name, least in asked.items() if _numbers(have[name]) < _numbers(least)]
    found = ", ".join(f"{name} {version}" for name, version in have.items())
    return _judge("packages", not old, found or "pithtrain itself is not installed", f"{PIP} {' '.join(old)}", "FAIL")


def _numbers(version: str) -> list[int]:
    """2.13.0+cu130 -> [2, 13, 0]; what is missing has none."""
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]


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
    yield _judge("torch", _numbers(torch.__version__) >= [2, 11], found, reinstall, "FAIL")
    seen, trouble = torch.cuda.device_count() if torch.cuda.is_available() else 0, list[str]()
    for index in range(seen):
        try:
            free, total = torch.cuda.mem_get_info(index)
            if total - free > 2 * 2**30:
                trouble.append(f"GPU {index}: {(total - free) / 2**30:.0f} GiB are taken by another process")
            if torch.ones(1024, device=f"cuda:{index}").sum().item() != 1024:
                trouble.append(f"GPU {index}: computes wrongly")
        except Exception as error:
            trouble.append(f"GPU {index}: {str(error).splitlines()[0]}")
    listed = rundir.answer("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    yield judge_devices(listed, seen, built_for, os.environ.get("SLURM_GPUS_ON_NODE"), trouble)
    if seen > 1:
        yield transport(seen)
    versions = {"nccl": None, "cudnn": torch.backends.cudnn.version(), "triton": rundir.installed("triton")}
    with contextlib.suppress(Exception):  # a build for CPUs alone has none
        from torch.cuda import nccl

        versions["nccl"] = ".".join(map(str, nccl.version()))
    for name, version in versions.items():
        found = str(version or ("missing" if seen else "none, and no GPU wants it"))
        yield _judge(name, version is not None or not seen, found, reinstall, "FAIL")


def transport(gpus: int) -> Check:
    """How tokens reach experts on other GPUs of this host, if a run's moe.transport is auto."""
    import torch

    from pithtrain.ops import symmetric

    try:
        reason = symmetric.why_not([symmetric.seat(torch.device("cuda", gpu)) for gpu in range(gpus)], nvlink=True)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    used = f"nccl: {reason}" if reason else f"symmetric: NVLink joins all {gpus} GPUs"
    return Check("expert traffic", "OK", f"moe.transport=auto is {used}")


def judge_devices(listed: str | None, seen: int, built_for: str | None, given: str | None, trouble: list[str]) -> Check:
    """`listed`: nvidia-smi's lines (name, driver), None where it gave none; `seen`: by torch; `given`: by Slurm."""
    gpus = [line for line in (listed or "").splitlines() if ", " in line]
    if seen:
        found = f"{seen} x {gpus[0] if gpus else 'a GPU that nvidia-smi does not tell of'}"
        busy = all("another process" in words for words in trouble)
        mend = "`nvidia-smi` shows whose; slurm.exclusive=true keeps others away" if busy else "--exclude this node"
        return _judge("devices", not trouble, "; ".join([found, *trouble]), mend, "WARN" if busy else "FAIL")
    if gpus:
        found = f"nvidia-smi lists {len(gpus)} x {gpus[0]}, torch sees none"
        if built_for is None:
            return Check("devices", "FAIL", f"{found}: it is built for CPUs alone", "install a build of torch for CUDA")
        why = f"{sys.executable} -c 'import torch; torch.cuda.init()'"
        mend = f"{why} says why: CUDA_VISIBLE_DEVICES is empty, or the driver older than CUDA {built_for}"
        return Check("devices", "FAIL", found, mend)
    mend = "--exclude this node, whose driver is broken (the GPUs of `make cluster-up` are fake: leave them)"
    return _judge("devices", not given, f"Slurm gives {given} GPUs, no driver answers" if given else "no GPU", mend)


def collective() -> Check:
    """All-reduces between processes of this host: over NCCL where there are two GPUs or more, else over gloo."""
    gpus = 0
    with contextlib.suppress(Exception):
        import torch

        gpus = min(torch.cuda.device_count(), 8) if torch.cuda.is_available() else 0
    backend, size = ("nccl", gpus) if gpus > 1 else ("gloo", 2)
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    command = [sys.executable, "-m", "pithtrain.doctor", "collective", backend, str(size)]
    run = functools.partial(subprocess.run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=COLLECTIVE_S)

    def task(rank: int) -> tuple[int, str]:
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = run([*command, f"{there}/store", str(rank)], env=env, text=True, errors="replace")
            return done.returncode, done.stdout.strip()
        return -9, ""  # killed

    with tempfile.TemporaryDirectory(prefix="pithtrain-doctor-") as there, ThreadPoolExecutor(size) as pool:
        codes, said = zip(*pool.map(task, range(size)), strict=True)
    return judge_collective(backend, codes, said)


def judge_collective(backend: str, codes: Sequence[int], said: Sequence[str]) -> Check:
    """`said`: what each process printed; its last line is a measurement, or why there is none."""
    if backend == "nccl":
        who = f"NCCL over {len(codes)} GPUs"
        mend = f"`nvidia-smi topo -m` shows the links; NCCL_P2P_DISABLE=1 {me()} doctor goes round direct access"
    else:
        who, mend = f"gloo over {len(codes)} processes", "ip link set lo up: the loopback interface may be down"
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


def folder(output_dir: Path) -> Iterator[Check]:
    """Does the file system under the runs keep what rundir relies on: flushed, renamed at once, locked for one."""
    there = _existing(output_dir)
    kind = slurm.file_system(there, slurm.mounts()) or "unknown"
    reach = "shared" if SHARED.match(kind) else "this machine's memory" if kind == "tmpfs" else "this machine's own"
    yield _judge("folder", kind != "tmpfs", f"{there}: {kind}, {reach}", ELSEWHERE)
    about = os.statvfs(there)
    yield judge_free(about.f_bavail * about.f_frsize / 2**30, about.f_favail if about.f_files else None)
    try:
        with tempfile.TemporaryDirectory(prefix=".pithtrain-doctor-", dir=there, ignore_cleanup_errors=True) as probe:
            yield from _probe(Path(probe))
    except OSError as error:
        yield Check("writing", "FAIL", f"{there}: {error.strerror}", f"chmod u+w {there}; or {ELSEWHERE}")


def _existing(path: Path) -> Path:
    """The folder itself or, before the first run, the one above it that is there."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())


def judge_free(gib: float, inodes: int | None) -> Check:
    """`inodes`: how many files can still be made; None where the file system does not count them."""
    found = f"{gib:,.0f} GiB" + ("" if inodes is None else f" and {inodes:,} files")
    mend = f"remove old checkpoints (one takes 12 bytes per parameter), or {ELSEWHERE}"  # 45 GiB for 4 billion
    full = gib < 1 or (inodes is not None and inodes < 10_000)
    return _judge("free space", not full and gib >= 50, found, mend, "FAIL" if full else "WARN")


def _probe(probe: Path) -> Iterator[Check]:
    """Write, flush, rename over an older file, flush the folder: what makes a marker and a checkpoint whole."""
    began = time.monotonic()
    (probe / "whole").touch()
    rundir.write_atomic(probe / "whole", "n" * 2**20)
    catalog.sync(probe)
    took = time.monotonic() - began  # milliseconds on a disk, tens of them on a file server
    yield _judge("writing", took < 1, f"1 MiB flushed and renamed in {took * 1e3:,.0f} ms", ELSEWHERE)
    yield _locks(probe / "lock")
    before = time.time()
    (probe / "clock").touch()
    skew = (before + time.time()) / 2 - (probe / "clock").stat().st_mtime
    found = f"{skew:+.1f} s from that of the folder's file system"
    yield _judge("clock", abs(skew) < SKEW_S, found, "chronyc makestep, or have this machine's clock synchronised")


def _locks(path: Path) -> Check:
    with path.open("w") as one, path.open("w") as other:
        try:
            for file in (one, other):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Check("locks", "OK", "flock lets one in")
        except OSError as error:
            mend = f"mount it with locks (lustre: -o flock), or {ELSEWHERE}"
            return Check("locks", "FAIL", f"flock: {error.strerror}", mend)
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
        yield Check("slurm", "FAIL", str(error).splitlines()[0], "`make cluster-status`, `scontrol ping`")
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
    return dict(re.findall(r"^(\S+)\s*= (.*?)\s*$", answer, re.MULTILINE))


def judge_limits(config: Mapping[str, str], partitions: Sequence[Mapping[str, str]]) -> Iterator[Check]:
    """What the site's settings mean for stopping and going on. They are not ours: each mend is what a user can do."""
    wait_s = slurm.seconds(config.get("KillWait", "30").removesuffix(" sec"))
    for row in partitions:
        name = f"{row.get('PartitionName')}{'*' if row.get('Default') == 'YES' else ''}"
        found, mend = _preemption(config.get("PreemptType", ""), row, wait_s)
        facts = f"{row.get('TotalNodes')} nodes, up to {row.get('MaxTime', '?').lower()}, {found}"
        if row.get("State", "UP") != "UP":
            facts += f"; {row['State'].lower()}"
            mend = "slurm.partition: choose another, `sinfo -s` shows them"
        yield _judge(f"partition {name}", not mend, facts, mend)
    mend = f"stop runs with `{me()} cancel RUN`: it waits for the save"
    yield _judge("stopping", wait_s >= LEAST_STOP_S, f"KillWait: {wait_s:.0f} s from scancel to the kill", mend)
    yield Check("requeue", "OK", f"JobRequeue: {config.get('JobRequeue', '?')}; a run's script asks for it in any case")
    tracked = config.get("ProctrackType", "").removeprefix("proctrack/")
    mend = "a process that left its group outlives a kill: `pgrep -u $USER python` on the node finds it"
    yield _judge("tracking", tracked != "pgid", f"ProctrackType: {tracked}", mend)
    strict = config.get("EnforcePartLimits", "NO")
    yield Check("limits", "OK", f"EnforcePartLimits: {strict}; `submit` looks by itself for what can never start")


def _preemption(kind: str, row: Mapping[str, str], wait_s: float) -> tuple[str, str]:
    """What preemption does to a job of this partition, and what to do about it, "" where nothing."""
    mode, grace_s = row.get("PreemptMode", "OFF"), slurm.seconds(row.get("GraceTime", "0"))
    if kind.endswith("none") or mode == "OFF":
        return "never preempted", ""
    found = f"preempted by {mode.lower()} with {grace_s + wait_s:.0f} s to save"
    often = "checkpoint.interval: save as often as steps may be lost"
    if "SUSPEND" in mode:
        return f"{found} (a suspended run outlives its collectives' time-outs)", "slurm.partition: choose another"
    if mode == "CANCEL" and grace_s == 0:
        return f"{found} (Slurm restarts nothing)", f"{often}; afterwards `{me()} resume RUN`"
    return found, often if grace_s + wait_s < LEAST_STOP_S else ""


# ---- several nodes ---------------------------------------------------------------------------------------------------


def _without(host: str) -> str:
    return f"leave it out: `{me()} resume RUN --exclude {host}`, or `submit` with --set slurm.exclude={host}"


def _whole_nodes(partition: str | None) -> list[str]:
    """Options of srun by which a job gets all GPUs, cores and memory of its nodes; little where they have no GPU."""
    nodes = slurm.read_nodes(slurm.call("scontrol", "show", "node", "--oneliner"))
    names = frozenset((partition or "").split(","))
    counts = [node.num_gpus for node in nodes if node.num_gpus and (partition is None or names & node.partitions)]
    return [f"--gpus-per-node={min(counts)}", "--exclusive", "--mem=0"] if counts else ["--mem=4G"]


def node(output_dir: Path) -> None:
    """A node's task: JSON lines about this machine, then about the meeting with the others. The lines are short, since
    srun cuts those of more than 1024 bytes and mixes the pieces of different tasks."""

    def say(**fields: Any) -> None:
        print(json.dumps({"doctor": os.environ["SLURMD_NODENAME"], **fields}), flush=True)

    say(nodes=os.environ["SLURM_STEP_NODELIST"])
    for check in _machine(output_dir):
        say(check=dataclasses.asdict(dataclasses.replace(check, found=check.found[:400])))
    token = f"{os.environ['SLURM_JOB_ID']}-{os.environ['SLURM_STEP_ID']}"
    shared = _existing(output_dir) / f".pithtrain-doctor-{token}"
    try:
        import torch

        here, device = worker.seat(os.environ), "cuda:0" if torch.cuda.is_available() else "cpu"
        method = worker.init_method(os.environ | {"MASTER_ADDR": _address()}, Path(os.devnull))
        met, links = meet(here.rank, here.world_size, method, device, shared)
        for rank, gb_s in links.items():
            say(link=[rank, gb_s])
        say(met=met)
    except Exception as error:
        say(error=f"{type(error).__name__}: {error}".splitlines()[0][:400])
    with contextlib.suppress(OSError):
        shared.unlink(missing_ok=True)


def _address() -> str:
    """Rank 0's host. A batch script's srun tells it, ours is elsewhere; where a name does not resolve, Slurm knows."""
    host = os.environ.get("MASTER_ADDR") or slurm.hostnames(os.environ["SLURM_STEP_NODELIST"])[0]
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return slurm.fields(slurm.call("scontrol", "show", "node", host, "--oneliner")).get("NodeAddr", host)
    return host


def meet(rank: int, size: int, method: str, device: str, shared: Path) -> tuple[dict[str, Any], dict[int, float]]:
    """Measure what lies between processes. `shared`: a file for rank 0 to make.

    clock_s   this clock minus rank 0's
    seen_s    until the file was seen here; None: never
    small_s   of a small all-reduce over all; gb_s: bus bandwidth of a large one, 2 (n - 1) / n times its bytes a second

    And on rank 0, where there are several hosts, GB/s to each other rank and back: one bad cable slows the all-reduces
    of all alike, and names nobody.
    """
    import torch
    import torch.distributed as dist

    backend, limit = "gloo", datetime.timedelta(seconds=120)  # from one node's readiness to the last one's
    if device != "cpu":
        backend = "cpu:gloo,cuda:nccl"  # gloo in any case, as in a run: its flags and checkpoints are agreed on by it
        torch.cuda.set_device(device)
    dist.init_process_group(backend, method, limit, size, rank)
    if rank == 0:
        with contextlib.suppress(OSError):  # then nobody sees it
            shared.touch()
    dist.all_reduce(torch.zeros(1))  # all leave it within milliseconds
    clocks: list[Any] = [time.time()] * size
    dist.all_gather_object(clocks, clocks[rank])
    began, seen_s = time.monotonic(), 0.0
    while shared.name not in os.listdir(shared.parent) and seen_s < SEEN_S:
        time.sleep(0.1)
        seen_s = time.monotonic() - began

    def seconds(act: Callable[[torch.Tensor], object], mib: float) -> float:
        """The median time of ten communications of a tensor, after a first one that connects."""
        tensor, took = torch.zeros(max(1, int(mib * 2**18)), device=device), list[float]()
        for _ in range(11):
            began = time.monotonic()
            act(tensor)
            if device != "cpu":
                torch.cuda.synchronize()
            took.append(time.monotonic() - began)
        return statistics.median(took[1:])

    def there_and_back(other: int, tensor: torch.Tensor) -> None:
        for sender in (0, other):
            (dist.send if rank == sender else dist.recv)(tensor, other if rank == 0 else 0)

    mib = LARGE_MIB["gloo" if device == "cpu" else "nccl"]
    small_s, large_s = (seconds(lambda tensor: dist.all_reduce(tensor), each) for each in (0, mib))
    gb = mib * 2**20 / 1e9
    others = range(0) if method.startswith("file:") else range(1, size) if rank == 0 else [rank]
    links = {other: 2 * gb / seconds(functools.partial(there_and_back, other), mib) for other in others}
    dist.all_reduce(torch.zeros(1))  # none leaves before the others have done
    met = {"rank": rank, "clock_s": clocks[rank] - clocks[0], "seen_s": seen_s if seen_s < SEEN_S else None}
    met |= {"small_s": small_s, "gb_s": 2 * (size - 1) / size * gb / large_s}
    return met, links if rank == 0 else {}


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
        told = about.get(host)
        if not told:
            words = next((line for line in errors if re.search(rf"\b{re.escape(host)}\b", line)), "no word from srun")
            checks.append(Check(host, "FAIL", f"its task ended before it could tell: {words}", _without(host)))
            continue
        bad = [dataclasses.replace(check, name=f"{host} {check.name}") for check in told.values() if check.mend]
        facts = [f"{len(told) - len(bad)} of {len(told)} checks are well"]
        facts += [told[name].found for name in ("host", "devices") if name in told]
        checks += [Check(host, "OK", "; ".join(facts)), *bad]
        if host not in met:
            found = why.get(host, "no answer from the meeting of all nodes")
            mends = [mend for what, mend in MEETING_MENDS.items() if re.search(what, found.lower())]
            checks.append(Check(f"{host} meeting", "FAIL", found, (mends or [_without(host)])[0]))
    links = dict(each["link"] for each in reports if "link" in each)
    return [*checks, *_unlike(about), *(_between(met, links) if len(met) == len(hosts) else ())]


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
    found = f"{', '.join(blind)} does not see a file that {host_of[0]} wrote"
    if not blind:
        found = f"a file of {host_of[0]} is seen by all within {max(report['seen_s'] for report in met.values()):.1f} s"
    yield _judge("shared folder", not blind, found, f"{ELSEWHERE}, on a shared file system (`df -T`)", "FAIL")
    worst, skew_s = max(((host, report["clock_s"]) for host, report in met.items()), key=lambda each: abs(each[1]))
    found = f"at most {abs(skew_s):.3f} s apart, {worst} from {host_of[0]}"
    yield _judge("clocks", abs(skew_s) < SKEW_S, found, f"chronyc makestep there, or {_without(worst)}")
    usual = statistics.median(links.values() or [0.0])
    for rank, gb_s in links.items():
        if gb_s < usual / 2:
            found = f"{gb_s:.3g} GB/s from {host_of[0]}; usual: {usual:.3g}"
            yield Check(f"{host_of[rank]} link", "WARN", found, _without(host_of[rank]))


def main(arguments: Sequence[str]) -> None:
    """`node FOLDER`, as check_nodes starts it; `collective DEVICE SIZE STORE RANK`, as collective does."""
    if arguments[0] == "node":
        node(Path(arguments[1]))
    else:
        _, backend, size, store, rank = arguments
        device = "cpu" if backend == "gloo" else f"cuda:{rank}"
        met, _ = meet(int(rank), int(size), f"file://{store}", device, Path(store))
        print(json.dumps([met["small_s"], met["gb_s"]]), flush=True)
    os._exit(0)  # a communicator whose peer is gone must not hold this process


if __name__ == "__main__":
    main(sys.argv[1:])
