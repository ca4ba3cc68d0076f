"""Slurm, asked: every question to it is a function that returns data, and what the data means is said in words.

Nothing here starts a run. Facts and judgement are apart, so that each rule is tested on text:

    cluster_facts()           partitions, nodes, accounts, job ids: a few short questions      -> Cluster
    problems(spec, cluster)   what sbatch would let through although it can never run          -> refusals, warnings
    queue()                   one squeue for all runs of this user: the controller serves everyone
    pending_in_words(job)     why a job does not run yet, and whether it ever will

Why we check at all: by default sbatch accepts more nodes than there are, a time limit above the partition's, and a
dependency on a job that nobody knows; the job then waits for ever, or starts without what it was to wait for. And
`sbatch --test-only` refuses a job that only waits for a drained node. Seen on 22.05.
"""

import contextlib
import difflib
import functools
import getpass
import itertools
import math
import os
import re
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pithtrain.errors import Problem, SlurmError
from pithtrain.spec import RunSpec

WAITS_S = (1.0, 3.0, 9.0)  # between tries while the controller is away: a restart of it takes a few seconds
LONGEST_CALL_S = 120.0  # Slurm's own time-outs end a call before
AWAY = re.compile(
    r"unable to contact|socket timed out|connection refused|connect failure|standby mode|zero bytes were transmitted"
    r"|unable to establish controller|temporarily unable|authentication error"
    r"|unexpected message received",  # what `scontrol requeue` says of a connection that was refused
    re.IGNORECASE,
)
_BROKEN = {"BOOT_FAIL", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT"}
ENDED = _BROKEN | {"CANCELLED", "COMPLETED", "DEADLINE", "PREEMPTED", "REVOKED"}


# ---- commands --------------------------------------------------------------------------------------------------------


def call(*command: str, input_text: str | None = None) -> str:
    """stdout of a Slurm command. Raises SlurmError with Slurm's own words; a controller that is away is asked again
    three times, 13 s in all, before that. Not for sbatch proper: a second try could submit twice."""
    return _ask(command, input_text).stdout


def _ask(
    command: Sequence[str], input_text: str | None = None, waits_s: Sequence[float] | None = None
) -> "subprocess.CompletedProcess[str]":
    run = functools.partial(subprocess.run, capture_output=True, text=True, errors="replace")
    said, conf = "", os.environ.get("SLURM_CONF")
    if conf and not os.path.exists(conf):  # Slurm itself would look for it for a minute
        raise SlurmError(f"SLURM_CONF = {conf}: there is no such file")
    for wait_s in (*(WAITS_S if waits_s is None else waits_s), None):
        try:
            done = run(command, input=input_text or "", env=_environment(), timeout=LONGEST_CALL_S)
            if done.returncode == 0:
                return done
            said = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
            if not AWAY.search(said):
                raise SlurmError(f"{command[0]}: {said.removeprefix(f'{command[0]}: ')}")
        except FileNotFoundError:
            raise SlurmError(f"there is no `{command[0]}` on PATH: {os.environ.get('PATH', '')}") from None
        except subprocess.TimeoutExpired:
            said = f"no answer in {LONGEST_CALL_S:.0f} s"
        if wait_s is not None:
            time.sleep(wait_s)
    raise SlurmError(f"Slurm does not answer: {said}\n  see:  make cluster-status, scontrol ping")


def _maybe(*command: str) -> list[str]:
    """The lines of an answer that many clusters cannot give: asked once, none where it fails."""
    with contextlib.suppress(SlurmError):
        return _ask(command, waits_s=()).stdout.splitlines()
    return []


def _environment() -> dict[str, str]:
    """Ours without what bends Slurm's answers: an outer job's variables, the user's own output formats, a language."""
    bends = re.compile(r"SLURM_(?!CONF|JWT)|S(BATCH|CONTROL|QUEUE|INFO|ACCT|CANCEL|RUN)_")
    kept = {name: value for name, value in os.environ.items() if not bends.match(name)}
    return kept | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}  # times come as seconds since 1970


def configured() -> bool:
    """Whether this machine belongs to a cluster, which need not answer just now."""
    if not (shutil.which("sbatch") and shutil.which("srun")):
        return False
    try:
        return bool(os.environ.get("SLURM_CONF") or _ask(["sinfo", "--noheader"], waits_s=()))
    except SlurmError as error:
        return "establish a configuration source" not in str(error)


def requeue(job_id: str) -> None:
    """Kill the job's tasks and queue it again under its id; it starts two minutes later at the earliest."""
    call("scontrol", "requeue", job_id)


def release(job_id: str) -> None:
    """Let a held job start."""
    call("scontrol", "release", job_id)


def update(job_id: str, **fields: str) -> None:
    """Change a job that waits, under scontrol's names: StartTime="now", ExcNodeList="n3", Comment="..."."""
    call("scontrol", "update", f"JobId={job_id}", *(f"{name}={value}" for name, value in fields.items()))


def cancel(job_id: str, signal: str | None = None) -> None:
    """End a job; or send its ranks a signal, such as USR2, which asks them to save and stop."""
    call("scancel", *([f"--signal={signal}"] if signal else []), job_id)


def test_only(script_text: str, may_wait: bool = False) -> str:  # noqa: PT028  it is no test
    """When Slurm would start this script, in words. Raises SlurmError with its words where it refuses the script, but
    where the job `may_wait` for nodes that are down, drained or reserved: Slurm calls such a job impossible."""
    try:
        said = _ask(["sbatch", "--test-only"], script_text).stderr.strip()
    except SlurmError as error:
        if may_wait and "node configuration is not available" in str(error):
            return "Slurm cannot say when it starts: it waits for nodes that are down, drained or reserved"
        raise
    if match := re.search(r"to start at (\d+) using .* on nodes? (\S+)", said):
        wait_s = int(match[1]) - time.time()
        return f"Slurm would start it {'now' if wait_s < 60 else f'in {words(wait_s)}'} on {match[2]}"
    return said


# ---- reading Slurm's text --------------------------------------------------------------------------------------------


def fields(line: str) -> dict[str, str]:
    """One line of `scontrol show ... -o`. Values hold spaces and `=` (OS, Reason, Comment): a new field begins with a
    capital letter, so `Comment=step=3 loss=2.1` is one."""
    found = re.finditer(r"(?:^|\s)([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)", line)
    return {match[1]: match[2] for match in found if match[2] not in ("(null)", "N/A")}


def seconds(text: str) -> float:
    """A duration as Slurm writes it, [D-][HH:]MM:SS; infinite for UNLIMITED, NOT_SET and other words."""
    if not re.fullmatch(r"(\d+-)?[\d:]+", text):
        return math.inf
    days, _, clock = text.rpartition("-")
    return 86400 * int(days or 0) + sum(60**i * int(part) for i, part in enumerate(reversed(clock.split(":"))))


def words(duration_s: float) -> str:
    """A duration in its two largest units: 45s, 1m40s, 2h, 1d6h."""
    left, parts = max(0, round(duration_s)), list[str]()
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count}{unit}" if count else "")
    return "".join(parts[:2]) or "0s"


def hostnames(text: str) -> list[str]:
    """The nodes of a list such as `n[00-02,7],login`."""
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[\]\s]|\[[^\]]*\])+", text):
        choices: list[list[str]] = []
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", item):
            spans = re.findall(r"(\d+)(?:-(\d+))?", ranges)
            inside = [str(at).zfill(len(low)) for low, high in spans for at in range(int(low), int(high or low) + 1)]
            choices.append([plain] if plain else inside)
        names.extend(map("".join, itertools.product(*choices)))
    return names


# ---- jobs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A job that the controller remembers. `start`: Unix time at which it began, or is expected to; `time_left_s`: of
    its limit, None where there is no limit; `comment`: what the run last said of itself."""

    job_id: str
    name: str
    state: str
    reason: str
    nodes: str
    comment: str
    start: float | None
    restarts: int
    time_left_s: float | None

    @property
    def held(self) -> bool:
        """Whether somebody must release it before it can start."""
        return self.state == "PENDING" and HELD.search(self.reason) is not None


_COLUMNS = ["JobID", "Name", "State", "Reason", "NodeList", "StartTime", "TimeLeft", "RestartCnt", "Comment"]
_SEPARATOR = "\x1f"  # stands in no name and no comment


def queue() -> dict[str, Job]:
    """This user's jobs by id: those that wait or run, and for a while (MinJobAge) those that have ended."""
    columns = ",".join(f"{column}:{_SEPARATOR}" for column in _COLUMNS)  # a width of nothing cuts nothing
    return read_queue(call("squeue", "--me", "--states=all", "--noheader", "--Format", columns))


def read_queue(answer: str) -> dict[str, Job]:
    """The jobs in squeue's answer to `queue`."""
    jobs: dict[str, Job] = {}
    for line in answer.splitlines():
        row = [part.strip().removeprefix("(null)") for part in line.split(_SEPARATOR)]
        if len(row) == len(_COLUMNS) + 1:
            job_id, name, state, reason, nodes, start, left, restarts, comment, _ = row
            began, left_s = float(start) if start.isdecimal() else None, seconds(left)
            limit_s = None if math.isinf(left_s) else left_s
            jobs[job_id] = Job(job_id, name, state, reason, nodes, comment, began, int(restarts or 0), limit_s)
    return jobs


def show_job(job_id: str) -> dict[str, str]:
    """All that the controller knows of a job, under scontrol's names; {} where it has forgotten it."""
    try:
        return fields(call("scontrol", "show", "job", "--oneliner", job_id))
    except SlurmError as error:
        if "invalid job id" in str(error).lower():
            return {}
        raise


def accounting_state(job_id: str) -> str | None:
    """The job's state in the accounting database, which remembers it for good; None where there is none to ask."""
    rows = _maybe("sacct", "--allocations", "--noheader", "--parsable2", "--format=State", f"--jobs={job_id}")
    return rows[0].split()[0] if rows else None  # `CANCELLED by 1000` is CANCELLED


HELD = re.compile("JobHeld|JobHoldMaxRequeue|requeued.*held", re.IGNORECASE)
_NEVER = {  # what the reason says -> why the job will never start as it is
    "JobHeldUser|job.requeued.in.held": "it is held: `resume` lets it go on",
    "JobHeldAdmin": "an administrator holds it",
    "JobHoldMaxRequeue|launch.failed.requeued": "it is held after too many failed launches",
    "PartitionTimeLimit": "slurm.time is above the limit of its partition",
    "PartitionNodeLimit": "slurm.nodes is outside the limits of its partition",
    "PartitionConfig|BadConstraints": "its partition has no such nodes: too many asked for, or too much of each",
    "DependencyNeverSatisfied": "the job that it depends on did not end as asked",
    "PartitionInactive": "its partition takes no jobs",
    "Invalid(Account|QOS)|(Account|QOS)NotAllowed": "its account or QOS may not use this partition",
    "DeadLine": "its deadline is over",
    r"(QOS|Assoc)Max\w*Per(Job|Node)|MaxWallDurationPerJob|QOSMin": "it is outside what its QOS or account gives a job",
}
_YET = {  # what the reason says -> what the job waits for
    "None": "the scheduler has not looked at it yet",
    "Priority": "waits behind jobs of higher priority",
    "Resources|NodeDown": "waits for nodes to become free",
    "Nodes.required.for.job": "waits for nodes that are down, drained or reserved",
    "ReqNodeNotAvail.*reserved|Reservation": "waits for nodes that are reserved for others",
    "ReqNodeNotAvail": "waits for nodes that are down or drained",
    "Dependency": "waits for another job to end",
    "PartitionDown": "waits for its partition to be opened",
    "Licenses": "waits for licenses",
    "Cleaning|Prolog|BurstBuffer": "is being prepared or cleaned up",
    r"(QOS|Assoc)\w*(Minutes|Mins)": "waits until its account or QOS has hours again",
    "QOS|Assoc|AccountingPolicy": "waits until other jobs of its account or QOS have ended",
}


def pending_in_words(job: Job, now: float) -> str:
    """Why a job that waits does not run, in one line: `restarts in 1m40s`, `will never start because ...`."""
    wait_s = 0 if job.start is None else job.start - now
    if job.reason == "BeginTime":
        soon = "as soon as nodes are free" if wait_s < 1 else f"in {words(wait_s)}"
        return f"{'restarts' if job.restarts else 'starts'} {soon}"
    for pattern, why in _NEVER.items():
        if re.match(pattern, job.reason, re.IGNORECASE):
            return f"will never start because {why} ({job.reason})"
    waits = next((what for pattern, what in _YET.items() if re.match(pattern, job.reason, re.IGNORECASE)), "waits")
    expected = f", expected to start in {words(wait_s)}" if wait_s > 0 else ""
    return f"{waits}{expected} ({job.reason})"


# ---- the cluster -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A node: `state` as IDLE+DRAIN or DOWN*, `gpus` as (type or "", how many), `host` the machine behind the name."""

    name: str
    state: str
    cpus: int
    memory_mib: float
    gpus: tuple[tuple[str, int], ...]
    features: frozenset[str]
    partitions: frozenset[str]
    host: str

    @property
    def up(self) -> bool:
        """Whether a job could get it, now or when others have ended."""
        off = r"\*|(?<!_)DOWN|DRAIN|FAIL|ERROR|UNKNOWN|FUTURE|INVAL|MAINT|RESERVED|NOT_RESPONDING|REBOOT"
        return re.search(off, self.state) is None

    @property
    def num_gpus(self) -> int:
        return sum(count for _, count in self.gpus)

    @property
    def shown_gpus(self) -> str:
        return ",".join(f"gpu:{kind}:{count}" if kind else f"gpu:{count}" for kind, count in self.gpus) or "no GPU"


@dataclass(frozen=True)
class Partition:
    """A queue and its limits; math.inf where there is none."""

    name: str
    default: bool
    state: str
    max_nodes: float
    max_time_s: float
    default_time_s: float


@dataclass(frozen=True)
class Cluster:
    """What `problems` judges by. `accounts`: of this user, and `qos`: of all; empty where there is no accounting
    database. `jobs`: every id that the controller knows. `mounts`, `host`: this host's /proc/mounts and its name."""

    partitions: tuple[Partition, ...]
    nodes: tuple[Node, ...]
    accounts: frozenset[str] = frozenset()
    qos: frozenset[str] = frozenset()
    jobs: frozenset[str] = frozenset()
    mounts: str = ""
    host: str = ""

    @property
    def whole(self) -> bool:
        """Whether no node is down, drained or reserved."""
        return all(node.up for node in self.nodes)


def cluster_facts(spec: RunSpec) -> Cluster:
    """What Slurm says of itself now; of accounts and job ids only where this spec names one."""
    show, account = ("scontrol", "--all", "--oneliner", "show"), ("sacctmgr", "--noheader", "--parsable2", "show")
    depends = "dependency" in spec.slurm.additional_parameters
    asked = spec.slurm.account or spec.slurm.qos
    return Cluster(
        partitions=read_partitions(call(*show, "partition")),
        nodes=read_nodes(call(*show, "node")),
        accounts=frozenset(_maybe(*account, "assoc", f"user={getpass.getuser()}", "format=account") if asked else ()),
        qos=frozenset(_maybe(*account, "qos", "format=name") if asked else ()),
        jobs=frozenset(call("squeue", "--states=all", "--noheader", "--format=%A %F").split() if depends else ()),
        mounts=mounts(),
        host=socket.gethostname(),
    )


def read_partitions(answer: str) -> tuple[Partition, ...]:
    """The partitions in the answer of `scontrol show partition -o`."""
    return tuple(
        Partition(
            name=row["PartitionName"],
            default=row.get("Default") == "YES",
            state=row.get("State", "UP"),
            max_nodes=float(row["MaxNodes"]) if row.get("MaxNodes", "").isdecimal() else math.inf,
            max_time_s=seconds(row.get("MaxTime", "")),
            default_time_s=min(seconds(row.get("DefaultTime", "")), seconds(row.get("MaxTime", ""))),
        )
        for row in map(fields, answer.splitlines())
        if "PartitionName" in row
    )


_GPUS = re.compile(r"(?:^|,)gpu:(?:([^:,()]+):)?(\d+)")  # gpu:4, gpu:h100:8(S:0-1), gpu:a100:2,nic:1


def read_nodes(answer: str) -> tuple[Node, ...]:
    """The nodes in the answer of `scontrol show node -o`."""
    return tuple(
        Node(
            name=row["NodeName"],
            state=row.get("State", "UNKNOWN"),
            cpus=int(row.get("CPUEfctv", row.get("CPUTot", 0))),
            memory_mib=float(row.get("RealMemory", 0)) - float(row.get("MemSpecLimit", 0)),
            gpus=tuple((kind, int(count)) for kind, count in _GPUS.findall(row.get("Gres", ""))),
            features=frozenset(re.findall(r"[^,\s]+", row.get("AvailableFeatures", ""))),
            partitions=frozenset(re.findall(r"[^,\s]+", row.get("Partitions", ""))),
            host=row.get("NodeHostName", row["NodeName"]),
        )
        for row in map(fields, answer.splitlines())
        if "NodeName" in row
    )


# ---- can this spec run there? ----------------------------------------------------------------------------------------

LOCAL_DISKS = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "rootfs", "tmpfs", "xfs"}
Findings = Iterator[Problem | str]  # a Problem is refused, a text is a warning


def problems(spec: RunSpec, cluster: Cluster) -> tuple[list[Problem], list[str]]:
    """What can never run of this spec on this cluster, and warnings: what cannot run now, or cannot be known. Several
    partitions in one `slurm.partition` are alternatives: one that fits is enough."""
    known = [one.name for one in cluster.partitions]
    have = ", ".join(one.name + "*" * one.default for one in cluster.partitions)
    wanted, rule = [name for name in (spec.slurm.partition or "").split(",") if name], "there is no such partition"
    missing = [name for name in wanted if name not in known]
    found: list[Problem | str] = [_unknown("partition", name, rule, name, known, have) for name in missing]
    chosen = [one for one in cluster.partitions if (one.name in wanted if wanted else one.default)]
    if not wanted and not chosen:
        lacks = "this cluster has no default partition"
        found.append(Problem("slurm.partition", None, lacks, f"have {have or 'none'}"))
    judged = [list(_judge(spec, one, cluster)) for one in chosen] or [list[Problem | str]()]
    found += min(judged, key=lambda one: (sum(isinstance(item, Problem) for item in one), len(one)))
    found += _judge_rest(spec, cluster)
    return [one for one in found if isinstance(one, Problem)], [one for one in found if isinstance(one, str)]


def _judge(spec: RunSpec, partition: Partition, cluster: Cluster) -> Findings:
    """One partition: its limits, then its nodes, of which enough must have each thing that is asked for."""
    slurm, at, excluded = spec.slurm, partition.name, set(hostnames(spec.slurm.exclude or ""))
    if partition.state != "UP":
        yield f"partition {at} is {partition.state}: it starts no new job until an administrator opens it"
    minutes, usual_s = slurm.time_minutes, partition.default_time_s
    if minutes is not None and 60 * minutes > partition.max_time_s:
        hint = f"use at most {words(partition.max_time_s)}: the run continues by itself across limits"
        yield Problem("slurm.time", slurm.time, f"is above {at}'s limit", hint)
    elif minutes is None and usual_s <= 2 * slurm.signal_delay_s:
        rule = f"{at} then gives {words(usual_s)}, and slurm.signal_delay_s = {slurm.signal_delay_s} must be below half"
        yield Problem("slurm.time", None, rule, "set it")

    here = [node for node in cluster.nodes if at in node.partitions]
    nodes = [node for node in here if node.name not in excluded]
    up, drained = sum(node.up for node in nodes), sum("DRAIN" in node.state for node in nodes)
    counts = f"{at} has {len(nodes)} ({up} up, {drained} drained)"
    if slurm.nodes > len(nodes):
        without = f" without the {len(here) - len(nodes)} of slurm.exclude" if len(nodes) < len(here) else ""
        yield Problem("slurm.nodes", slurm.nodes, counts + without)
    elif slurm.nodes > partition.max_nodes:
        yield Problem("slurm.nodes", slurm.nodes, f"{at} gives a job at most {partition.max_nodes:.0f}")
    elif slurm.nodes > up and "reservation" not in slurm.additional_parameters:
        yield f"slurm.nodes = {slurm.nodes}: {counts}: the job waits for nodes to come up"

    def short(need: float, have: list[tuple[float, str]]) -> str:
        """ "" where enough nodes, or all, have what is needed; else what the nodes have, the most frequent first."""
        if sum(amount >= need for amount, _ in have) >= min(slurm.nodes, len(have)):
            return ""
        kinds = Counter(shown for _, shown in have).most_common(5)
        return ", ".join(kind if len(kinds) == 1 else f"{kind} ({count} nodes)" for kind, count in kinds)

    tasks, each = slurm.gpus_per_node, slurm.cpus_per_task or 1
    gpus = short(tasks, [(node.num_gpus, node.shown_gpus) for node in nodes])
    if gpus and spec.training.device != "cpu":
        yield Problem("slurm.gpus_per_node", tasks, f"nodes of {at} have {gpus}")
    if cpus := short(tasks * each, [(node.cpus, f"{node.cpus} cpus") for node in nodes]):
        path, value = ("cpus_per_task", each) if slurm.cpus_per_task else ("gpus_per_node", tasks)
        rule = f"{tasks} tasks x {each} cpus = {tasks * each} > {max(node.cpus for node in nodes)} per node"
        yield Problem(f"slurm.{path}", value, rule, f"nodes of {at} have {cpus}")
    unit = {"K": 1 / 1024, "G": 1024, "T": 1024**2}.get(slurm.mem[-1], 1)  # a number alone is in M, as for sbatch
    need = float(slurm.mem.rstrip("KMGT")) * unit
    if mem := short(need, [(node.memory_mib, f"{node.memory_mib:.0f}M") for node in nodes]):
        yield Problem("slurm.mem", slurm.mem, f"nodes of {at} have {mem}", "0 takes all of a node")
    features = {feature for node in nodes for feature in node.features}
    for name in re.split(r"[][&|,()!\s]|\*\d+", slurm.constraint or ""):  # h100&[rack1|rack2], [a*2&b*1]
        if nodes and name and name not in features:
            yield _unknown("constraint", slurm.constraint, f"no node of {at} has the feature {name}", name, features)


def _judge_rest(spec: RunSpec, cluster: Cluster) -> Findings:
    """Nodes, jobs and accounts that Slurm may not know, and the disk of the run."""
    slurm, more, nodes = spec.slurm, spec.slurm.additional_parameters, {node.name for node in cluster.nodes}
    for path, listed in (("exclude", slurm.exclude), ("additional_parameters.nodelist", more.get("nodelist"))):
        if unknown := [name for name in hostnames(str(listed or "")) if name not in nodes]:
            yield _unknown(path, listed, f"there is no node {', '.join(unknown[:20])}", unknown[0], nodes)
    dependency = str(more.get("dependency", ""))
    for job_id in re.findall(r":(\d+)", dependency):
        if job_id not in cluster.jobs:
            rule = f"job {job_id} is unknown to Slurm, which would start without waiting for it"
            yield Problem("slurm.additional_parameters.dependency", dependency, rule, "see `squeue --states=all`")
    for path, value, known in (("account", slurm.account, cluster.accounts), ("qos", slurm.qos, cluster.qos)):
        if value is not None and not known:
            yield f"slurm.{path} = {value} cannot be checked: Slurm's accounting does not answer"
        elif value is not None and value not in known:
            yield _unknown(path, value, "is unknown to Slurm, or not yours", value, known)
    kind, hosts = file_system(spec.output_dir, cluster.mounts), {node.host.partition(".")[0] for node in cluster.nodes}
    if slurm.nodes > 1 and kind in LOCAL_DISKS and hosts != {cluster.host.partition(".")[0]}:
        mend = "choose a folder on a shared file system, unless this one is exported"
        yield f"output_dir = {spec.output_dir} is on a disk of this host ({kind}), and every node must see it: {mend}"


def _unknown(key: str, value: object, rule: str, name: str, known: Collection[str], have: str = "") -> Problem:
    """That `name` is not among those that are known, which these are, and which of them was meant."""
    near, more = difflib.get_close_matches(name, known, 1), f" and {len(known) - 20} more" if len(known) > 20 else ""
    have = have or ", ".join(sorted(known)[:20]) + more or "none"
    return Problem(f"slurm.{key}", value, f"{rule}; have {have}", f"did you mean {near[0]}?" if near else "")


def mounts() -> str:
    """The text of /proc/mounts; "" where there is none."""
    return path.read_text() if (path := Path("/proc/mounts")).exists() else ""


def file_system(path: Path, mounts: str) -> str:
    """The type of the file system below a path, which need not exist, by the text of /proc/mounts; "" if unknown."""
    place, deepest, kind = Path(os.path.realpath(path)), 0, ""
    for _, mount, found, *_ in (row.split(" ") for row in mounts.splitlines() if row.count(" ") > 1):
        at = Path(mount.replace("\\040", " "))
        if place.is_relative_to(at) and len(at.parts) >= deepest:  # of two at one place, the later is on top
            deepest, kind = len(at.parts), found
    return kind
