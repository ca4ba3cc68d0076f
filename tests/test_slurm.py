"""Slurm's answers as data, what is refused before sbatch, and why a job waits; the texts are a real Slurm 22.05.8's."""

import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fake_run import spec_file, wait_for
from pithtrain import slurm, submit
from pithtrain.errors import SlurmError
from pithtrain.rundir import RunDir
from pithtrain.slurm import Cluster, Job
from pithtrain.spec import RunSpec, load

PARTITIONS = """\
PartitionName=train AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A \
DefaultTime=01:00:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=20 Hidden=NO MaxNodes=UNLIMITED MaxTime=1-00:00:00 \
MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=n[0-1] PriorityJobFactor=1 PriorityTier=10 RootOnly=NO ReqResv=NO \
OverSubscribe=NO OverTimeLimit=NONE PreemptMode=REQUEUE State=UP TotalCPUs=8 TotalNodes=2 SelectTypeParameters=NONE \
JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=8,mem=16000M,node=2,billing=8
PartitionName=low AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A DefaultTime=NONE \
DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=YES MaxNodes=1 MaxTime=00:10:00 MinNodes=0 LLN=NO \
MaxCPUsPerNode=UNLIMITED Nodes=n1 PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO OverSubscribe=NO \
OverTimeLimit=NONE PreemptMode=REQUEUE State=DRAIN TotalCPUs=4 TotalNodes=1 SelectTypeParameters=NONE \
JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=4,mem=8000M,node=1,billing=4
"""
NODES = """\
NodeName=n0 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=0.79 AvailableFeatures=(null) \
ActiveFeatures=(null) Gres=gpu:4 NodeAddr=127.0.0.1 NodeHostName=head Port=10398 Version=22.05.8 OS=Linux 6.18.44-fc \
#1 SMP PREEMPT_DYNAMIC @0  RealMemory=8000 AllocMem=0 FreeMem=21686 Sockets=4 Boards=1 State=IDLE ThreadsPerCore=1 \
TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=train  BootTime=2026-11-29T16:13:50 CfgTRES=cpu=4,mem=8000M,\
billing=4 AllocTRES= CapWatts=n/a CurrentWatts=0 AveWatts=0 ExtSensorsJoules=n/s ExtSensorsWatts=0 ExtSensorsTemp=n/s
NodeName=n1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUEfctv=4 CPUTot=4 CPULoad=0.32 AvailableFeatures=h100,rack1 \
ActiveFeatures=h100,rack1 Gres=gpu:h100:4(S:0-1),nic:1 NodeAddr=127.0.0.1 NodeHostName=head Port=12327 \
Version=22.05.8 OS=Linux 6.18.44-fc #1 SMP PREEMPT_DYNAMIC @0  RealMemory=8000 MemSpecLimit=500 State=IDLE+DRAIN \
ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=train,low  BootTime=1795968830 \
AllocTRES= ExtSensorsTemp=n/s Reason=bad gpu k=v, see ticket [root@1795981035]
"""
QUEUE = [  # id, name, state, reason, nodes, start, time left, restarts, comment
    ["996017", "pend", "PENDING", "Resources", "", "1795980871", "5:00", "0", "(null)"],
    ["996019", "dep", "PENDING", "Dependency", "", "N/A", "5:00", "0", "(null)"],
    ["996015", "held", "PENDING", "JobHeldUser", "", "N/A", "5:00", "0", "pithtrain ab step=3 loss=2.1"],
    ["996016", "run", "RUNNING", "None", "n[0-1]", "1795980571", "1-00:04:26", "2", "(null)"],
    ["996018", "begin", "CANCELLED", "BeginTime", "", "1795980605", "UNLIMITED", "0", "(null)"],
]


def text_of(rows: Sequence[Sequence[str]]) -> str:
    return "".join("\x1f".join([*row, "\n"]) for row in rows)


def job(reason: str, start: float | None = None, restarts: int = 0) -> Job:
    return Job("7", "a", "PENDING", reason, "", "", start, restarts, None)


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_fields_keep_what_holds_spaces_and_equal_signs() -> None:
    first, second = map(slurm.fields, NODES.splitlines())
    assert first["OS"] == "Linux 6.18.44-fc #1 SMP PREEMPT_DYNAMIC @0" and first["RealMemory"] == "8000"
    assert first["CfgTRES"] == "cpu=4,mem=8000M,billing=4" and first["AllocTRES"] == "" and "Owner" not in first
    assert second["Reason"] == "bad gpu k=v, see ticket [root@1795981035]"
    line = "JobId=9 CPUs/Task=1 ReqB:S:C:T=0:0:*:* WorkDir=/a b Comment=pithtrain ab step=3 loss=2.1  StdErr=/x Power= "
    assert slurm.fields(line) == {
        "JobId": "9",
        "CPUs/Task": "1",
        "ReqB:S:C:T": "0:0:*:*",
        "WorkDir": "/a b",
        "Comment": "pithtrain ab step=3 loss=2.1",
        "StdErr": "/x",
        "Power": "",
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [("4:58", 298), ("01:00:00", 3600), ("1-00:00:30", 86430), ("0:00", 0), ("UNLIMITED", math.inf), ("", math.inf)],
)
def test_seconds(text: str, value: float) -> None:
    assert slurm.seconds(text) == value


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0, "0s"), (-3, "0s"), (45, "45s"), (100, "1m40s"), (59.7, "1m"), (7200, "2h"), (3605, "1h"), (109000, "1d6h")],
)
def test_words(duration_s: float, text: str) -> None:
    assert slurm.words(duration_s) == text


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("n0", ["n0"]),
        ("n0, n1", ["n0", "n1"]),
        ("n[0-2,7],login", ["n0", "n1", "n2", "n7", "login"]),
        ("gpu[008-010]-a", ["gpu008-a", "gpu009-a", "gpu010-a"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
    ],
)
def test_hostnames(text: str, names: list[str]) -> None:
    assert slurm.hostnames(text) == names


def test_the_queue() -> None:
    jobs = slurm.read_queue(text_of([*QUEUE, ["no", "such", "row"]]))
    assert list(jobs) == [row[0] for row in QUEUE]
    running, held = jobs["996016"], jobs["996015"]
    assert (running.state, running.nodes, running.start, running.restarts) == ("RUNNING", "n[0-1]", 1795980571, 2)
    assert (running.time_left_s, running.comment, running.held) == (86666, "", False)
    assert (held.comment, held.start, held.held) == ("pithtrain ab step=3 loss=2.1", None, True)
    assert jobs["996018"].time_left_s is None and jobs["996018"].state in slurm.ENDED
    assert job("job requeued in held state").held and not job("BeginTime").held


def test_partitions_and_nodes() -> None:
    train, low = slurm.read_partitions(PARTITIONS)
    assert (train.name, train.default, train.state, train.max_nodes, low.max_nodes) == (
        "train",
        True,
        "UP",
        math.inf,
        1,
    )
    assert (train.max_time_s, train.default_time_s, low.default_time_s) == (86400, 3600, 600)
    n0, n1 = slurm.read_nodes(NODES)
    assert (n0.cpus, n0.memory_mib, n0.gpus, n0.host, n0.up) == (4, 8000, (("", 4),), "head", True)
    assert (n1.memory_mib, n1.gpus, n1.num_gpus, n1.up) == (7500, (("h100", 4),), 4, False)
    assert n1.features == {"h100", "rack1"} and n1.partitions == {"train", "low"}


@pytest.mark.parametrize(
    "state", ["IDLE", "MIXED", "ALLOCATED", "IDLE+CLOUD+POWERED_DOWN", "IDLE+PLANNED", "COMPLETING"]
)
def test_nodes_that_a_job_can_have(state: str) -> None:
    assert replace(slurm.read_nodes(NODES)[0], state=state).up


@pytest.mark.parametrize("state", ["DOWN*", "IDLE*", "IDLE+DRAIN", "MIXED+DRAIN", "DOWN", "IDLE+MAINTENANCE+RESERVED"])
def test_nodes_that_no_job_can_have_now(state: str) -> None:
    assert not replace(slurm.read_nodes(NODES)[0], state=state).up


# ---- why a job waits -------------------------------------------------------------------------------------------------


def test_a_requeued_job_says_when_it_restarts() -> None:
    assert slurm.pending_in_words(job("BeginTime", 1100, restarts=1), 1000) == "restarts in 1m40s"
    assert slurm.pending_in_words(job("BeginTime", 4600), 1000) == "starts in 1h"
    assert slurm.pending_in_words(job("BeginTime", 990, restarts=1), 1000) == "restarts as soon as nodes are free"


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        ("JobHeldUser", "it is held"),
        ("job requeued in held state", "it is held"),
        ("JobHeldAdmin", "administrator"),
        ("launch failed requeued held", "failed launches"),
        ("PartitionTimeLimit", "slurm.time"),
        ("PartitionNodeLimit", "slurm.nodes"),
        ("PartitionConfig", "too many asked for"),
        ("DependencyNeverSatisfied", "did not end as asked"),
        ("QOSMaxWallDurationPerJobLimit", "gives a job"),
        ("AssocMaxNodePerJobLimit", "gives a job"),
        ("InvalidQOS", "may not use"),
    ],
)
def test_what_will_never_start(reason: str, why: str) -> None:
    said = slurm.pending_in_words(job(reason), 0)
    assert said.startswith("will never start because ") and why in said and said.endswith(f"({reason})")


@pytest.mark.parametrize(
    ("reason", "what"),
    [
        ("None", "not looked at it yet"),
        ("Priority", "higher priority"),
        ("Resources", "nodes to become free"),
        ("Dependency", "another job to end"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "down or drained"),
        ("ReqNodeNotAvail, May be reserved for other job", "reserved for others"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", "are down"),
        ("PartitionDown", "to be opened"),
        ("QOSMaxJobsPerUserLimit", "other jobs of its account"),
        ("AssocGrpGRESMinutes", "hours again"),
        ("Licenses", "licenses"),
        ("SomethingNew", "waits"),
    ],
)
def test_what_a_job_waits_for(reason: str, what: str) -> None:
    said = slurm.pending_in_words(job(reason), 0)
    assert what in said and "never" not in said and said.endswith(f"({reason})")


def test_the_expected_start_is_told() -> None:
    assert slurm.pending_in_words(job("Resources", 5400), 0) == (
        "waits for nodes to become free, expected to start in 1h30m (Resources)"
    )


# ---- before sbatch ---------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Cluster:
    """Two nodes of 4 GPUs, 32 CPUs and 8000 MiB, both up, on two hosts."""
    partitions = slurm.read_partitions(PARTITIONS)
    as_two = {"state": "IDLE", "cpus": 32, "memory_mib": 8000}
    nodes = tuple(replace(node, host=node.name, **as_two) for node in slurm.read_nodes(NODES))
    return Cluster(partitions, nodes, jobs=frozenset({"7"}), host="head.lab.org", mounts="server:/x / nfs4 rw 0 0\n")


def spec(tmp_path: Path, *overrides: str) -> RunSpec:
    base = "slurm.cpus_per_task=null", "training.global_batch_size=480"
    given = {override.partition("=")[0] for override in overrides}
    kept = [override for override in base if override.partition("=")[0] not in given]
    return load(spec_file(tmp_path), [*kept, *overrides])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["slurm.partition=trian"],
            "slurm.partition = 'trian': there is no such partition; have train*, low; did you mean train?",
        ),
        (["slurm.nodes=5"], "slurm.nodes = 5: train has 2 (2 up, 0 drained)"),
        (
            ["slurm.time=1-00:00:01"],
            "slurm.time = '1-00:00:01': is above train's limit; "
            "use at most 1d: the run continues by itself across limits",
        ),
        (["training.device=cuda", "slurm.gpus_per_node=8"], "slurm.gpus_per_node = 8: nodes of train have gpu:4"),
        (
            ["slurm.gpus_per_node=8", "slurm.cpus_per_task=8"],
            "slurm.cpus_per_task = 8: 8 tasks x 8 cpus = 64 > 32 per node; nodes of train have 32 cpus",
        ),
        (
            ["slurm.gpus_per_node=40"],
            "slurm.gpus_per_node = 40: 40 tasks x 1 cpus = 40 > 32 per node; nodes of train have 32 cpus",
        ),
        (["slurm.mem=8001"], "slurm.mem = '8001': nodes of train have 8000M; 0 takes all of a node"),
        (["slurm.mem=1T"], "slurm.mem = '1T': nodes of train have 8000M; 0 takes all of a node"),
        (
            ["slurm.constraint=h100&rak1"],
            "slurm.constraint = 'h100&rak1': no node of train has the feature rak1; have h100, rack1; "
            "did you mean rack1?",
        ),
        (
            ["slurm.constraint='[h100*1&80gb*2]'"],
            "slurm.constraint = '[h100*1&80gb*2]': no node of train has the feature 80gb; have h100, rack1",
        ),
        (
            ["slurm.exclude='n[1-2]'"],
            "slurm.exclude = 'n[1-2]': there is no node n2; have n0, n1",
        ),
        (["slurm.exclude=n1", "slurm.nodes=2"], "slurm.nodes = 2: train has 1 (1 up, 0 drained) without the 1 of"),
        (
            ["slurm.additional_parameters={nodelist: m7}"],
            "slurm.additional_parameters.nodelist = 'm7': there is no node m7; have n0, n1",
        ),
        (
            ["slurm.additional_parameters={dependency: 'afterok:7:99999'}"],
            "slurm.additional_parameters.dependency = 'afterok:7:99999': job 99999 is unknown to Slurm",
        ),
        (
            ["slurm.account=lap"],
            "slurm.account = 'lap': is unknown to Slurm, or not yours; have lab; did you mean lab?",
        ),
        (["slurm.qos=x"], "slurm.qos = 'x': is unknown to Slurm, or not yours; have normal"),
        (
            ["slurm.time=null", "slurm.signal_delay_s=1800"],
            "slurm.time = null: train then gives 1h, and slurm.signal_delay_s = 1800 must be below half; set it",
        ),
    ],
)
def test_refused(tmp_path: Path, cluster: Cluster, overrides: list[str], said: str) -> None:
    """Case 18 of the service's matrix, line by line: nothing else is said beside it."""
    known = replace(
        cluster,
        accounts=frozenset({"lab"}),
        qos=frozenset({"normal"}),
        nodes=tuple(replace(node, gpus=(("", 4),)) for node in cluster.nodes),
    )
    refusals, warnings = slurm.problems(spec(tmp_path, *overrides), known)
    assert [str(one)[: len(said)] for one in refusals] == [said] and warnings == []
    assert said == str(refusals[0]) or len(said) > 60


@pytest.mark.parametrize(
    "overrides",
    [
        ["slurm.nodes=2"],
        ["slurm.time=1-00:00:00"],
        ["slurm.time=null"],
        ["slurm.partition=train"],
        ["slurm.partition=low,train"],  # one of them fits
        ["training.device=cuda", "slurm.gpus_per_node=4"],
        ["slurm.gpus_per_node=4", "slurm.cpus_per_task=8"],
        ["slurm.mem=8000"],
        ["slurm.mem=7G"],
        ["slurm.constraint='h100&[rack1*1|rack1*2]'"],
        ["slurm.exclude=n0"],
        ["slurm.additional_parameters={dependency: 'after:7+10?singleton', nodelist: 'n[0-1]'}"],
    ],
)
def test_accepted_at_the_edge(tmp_path: Path, cluster: Cluster, overrides: list[str]) -> None:
    assert slurm.problems(spec(tmp_path, *overrides), cluster) == ([], [])


def test_nodes_that_differ_are_counted(tmp_path: Path, cluster: Cluster) -> None:
    n0, n1 = cluster.nodes
    mixed = replace(cluster, nodes=(replace(n0, gpus=(("a100", 2),)), n1))
    fits = spec(tmp_path, "training.device=cuda", "slurm.gpus_per_node=4")
    assert slurm.problems(fits, mixed) == ([], [])
    both = spec(tmp_path, "training.device=cuda", "slurm.gpus_per_node=4", "slurm.nodes=2")
    said = "slurm.gpus_per_node = 4: nodes of train have gpu:a100:2 (1 nodes), gpu:h100:4 (1 nodes)"
    assert [str(one) for one in slurm.problems(both, mixed)[0]] == [said]
    bare = replace(cluster, nodes=tuple(replace(node, gpus=()) for node in cluster.nodes))
    assert "have no GPU" in str(slurm.problems(fits, bare)[0][0])


def test_no_default_partition(tmp_path: Path, cluster: Cluster) -> None:
    none = replace(cluster, partitions=tuple(replace(one, default=False) for one in cluster.partitions))
    said = "slurm.partition = null: this cluster has no default partition; have train, low"
    assert [str(one) for one in slurm.problems(spec(tmp_path), none)[0]] == [said]


def test_a_limit_on_nodes(tmp_path: Path, cluster: Cluster) -> None:
    one = replace(cluster, partitions=tuple(replace(each, max_nodes=1) for each in cluster.partitions))
    refusals, warnings = slurm.problems(spec(tmp_path, "slurm.nodes=2"), one)
    assert [str(each) for each in refusals] == ["slurm.nodes = 2: train gives a job at most 1"] and warnings == []
    assert slurm.problems(spec(tmp_path), one) == ([], [])


def test_several_problems_are_told_together(tmp_path: Path, cluster: Cluster) -> None:
    wrong = spec(tmp_path, "slurm.nodes=3", "slurm.time=2880", "slurm.mem=64G", "slurm.exclude=m1")
    paths = [one.path for one in slurm.problems(wrong, cluster)[0]]
    assert paths == ["slurm.time", "slurm.nodes", "slurm.mem", "slurm.exclude"]


def test_warnings(tmp_path: Path, cluster: Cluster) -> None:
    """What may be right all the same is no refusal."""
    n0, n1 = cluster.nodes
    drained = replace(cluster, nodes=(n0, replace(n1, state="IDLE+DRAIN")))
    assert not drained.whole and cluster.whole
    said = "slurm.nodes = 2: train has 2 (1 up, 1 drained): the job waits for nodes to come up"
    assert slurm.problems(spec(tmp_path, "slurm.nodes=2"), drained) == ([], [said])
    reserved = spec(tmp_path, "slurm.nodes=2", "slurm.additional_parameters={reservation: ours}")
    assert slurm.problems(reserved, drained) == ([], [])
    refusals, warnings = slurm.problems(
        spec(tmp_path, "slurm.partition=low", "slurm.time=10", "slurm.signal_delay_s=9"), cluster
    )
    assert refusals == [] and warnings == [
        "partition low is DRAIN: it starts no new job until an administrator opens it"
    ]
    refusals, warnings = slurm.problems(spec(tmp_path, "slurm.account=lab", "slurm.qos=x"), cluster)
    assert refusals == [] and [warning.split(" cannot")[0] for warning in warnings] == [
        "slurm.account = lab",
        "slurm.qos = x",
    ]


def test_a_run_directory_that_other_nodes_may_not_see(tmp_path: Path, cluster: Cluster) -> None:
    here = replace(cluster, mounts=f"overlay / overlay rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\n")
    refusals, warnings = slurm.problems(spec(tmp_path, "slurm.nodes=2"), here)
    assert refusals == [] and len(warnings) == 1 and f"{tmp_path}/runs is on a disk of this host (tmpfs)" in warnings[0]
    assert slurm.problems(spec(tmp_path), here) == ([], [])  # one node
    shared = replace(here, mounts=here.mounts.replace("tmpfs rw", "lustre rw"))
    assert slurm.problems(spec(tmp_path, "slurm.nodes=2"), shared) == ([], [])
    one_host = replace(here, nodes=tuple(replace(node, host="head") for node in here.nodes))
    assert slurm.problems(spec(tmp_path, "slurm.nodes=2"), one_host) == ([], [])


def test_file_system_of_a_path(tmp_path: Path) -> None:
    """The deepest mount decides, of two at one place the later; symlinks are followed; names hold spaces as \\040."""
    (tmp_path / "link").symlink_to(tmp_path / "a b")
    mounts = f"/dev/vda / ext4 rw 0 0\nautofs {tmp_path} autofs rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n"
    mounts += f"tmpfs {tmp_path}/a\\040b tmpfs rw 0 0\nodd\n"
    assert slurm.file_system(tmp_path / "not/there", mounts) == "nfs4"
    assert slurm.file_system(tmp_path / "link/c", mounts) == slurm.file_system(tmp_path / "a b", mounts) == "tmpfs"
    assert slurm.file_system(Path("/"), mounts) == "ext4" and slurm.file_system(Path("/x"), "") == ""


# ---- commands, played by scripts on PATH -----------------------------------------------------------------------------

REFUSED = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


class Fakes:
    """A folder that is all of PATH. Each fake appends its arguments to `calls`, and runs lines of shell."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "bin"
        self.folder.mkdir()
        self.log = folder / "calls"
        monkeypatch.setenv("PATH", str(self.folder))
        monkeypatch.delenv("SLURM_CONF", raising=False)

    def add(self, *names: str, does: str = "") -> None:
        for name in names:
            path = self.folder / name
            path.write_text(f'#!/bin/sh\nprintf "%s\\n" "{name} $*" >> {self.log}\n{does}\n')
            path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    assert slurm.WAITS_S == (1, 3, 9)
    monkeypatch.setattr(slurm, "WAITS_S", (0, 0, 0))
    return Fakes(tmp_path, monkeypatch)


@pytest.mark.parametrize("words", [REFUSED, "Unexpected message received for job 9", "Socket timed out on send/recv"])
def test_a_controller_that_is_away_is_asked_again(fakes: Fakes, words: str) -> None:
    """Case 13 of the service's matrix: three more times; then the error says where to look."""
    fakes.add(
        "squeue", does=f'[ "$(/usr/bin/wc -l < {fakes.log})" -ge 4 ] && echo ok || {{ echo "{words}" >&2; exit 1; }}'
    )
    assert slurm.call("squeue", "--me") == "ok\n"
    assert fakes.calls == ["squeue --me"] * 4
    fakes.add("squeue", does=f'echo "{words}" >&2; exit 1')
    with pytest.raises(SlurmError, match="make cluster-status") as caught:
        slurm.call("squeue")
    assert words in str(caught.value) and caught.value.exit_code == 1 and len(fakes.calls) == 8


def test_any_other_failure_is_slurms_own_words_at_once(fakes: Fakes) -> None:
    fakes.add("sbatch", does='echo "sbatch: error: invalid partition specified: trian" >&2; exit 1')
    with pytest.raises(SlurmError) as caught:
        slurm.call("sbatch", "--test-only", input_text="#!/bin/sh\n")
    assert str(caught.value) == "sbatch: error: invalid partition specified: trian" and len(fakes.calls) == 1
    with pytest.raises(SlurmError, match="there is no `scontrol` on PATH"):
        slurm.requeue("9")


def test_questions_are_asked_in_a_clean_environment(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an outer job, nor the user's formats, nor a language change the answer."""
    for name in ("SQUEUE_FORMAT", "SLURM_JOB_ID", "SBATCH_PARTITION", "SLURM_TIME_FORMAT", "SINFO_SORT"):
        monkeypatch.setenv(name, "odd")
    monkeypatch.setenv("SLURM_CONF", os.devnull)
    monkeypatch.setenv("LC_ALL", "de_DE")
    fakes.add("squeue", does="/usr/bin/env; /bin/cat")
    lines = slurm.call("squeue", input_text="typed").splitlines()
    assert {f"SLURM_CONF={os.devnull}", "LC_ALL=C", "SLURM_TIME_FORMAT=%s", "typed"} <= set(lines)
    assert not re.findall(r"^(?:SQUEUE|SBATCH|SINFO|SLURM_JOB).*", "\n".join(lines), re.MULTILINE)


def test_configured(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a configuration is no cluster; one whose controller is away is."""
    assert not slurm.configured()
    fakes.add("sbatch", "srun")
    nothing = "sinfo: fatal: Could not establish a configuration source"
    for does, answer in ((f'echo "{nothing}" >&2; exit 1', False), (f'echo "{REFUSED}" >&2; exit 1', True), ("", True)):
        fakes.add("sinfo", does=does)
        before = len(fakes.calls)
        assert slurm.configured() is answer and len(fakes.calls) == before + 1  # asked often: it waits for nobody
    fakes.add("sinfo", does=f'echo "{nothing}" >&2; exit 1')
    monkeypatch.setenv("SLURM_CONF", os.devnull)
    assert slurm.configured() and len(fakes.calls) == before + 1


def test_commands_that_change_a_job(fakes: Fakes) -> None:
    fakes.add("scontrol", "scancel")
    slurm.requeue("9")
    slurm.release("9")
    slurm.update("9", ExcNodeList="n[0-1]", Comment="a b")
    slurm.cancel("9")
    slurm.cancel("9", "USR2")
    assert fakes.calls == [
        "scontrol requeue 9",
        "scontrol release 9",
        "scontrol update JobId=9 ExcNodeList=n[0-1] Comment=a b",
        "scancel 9",
        "scancel --signal=USR2 9",
    ]


def test_a_job_that_slurm_has_forgotten(fakes: Fakes) -> None:
    """Nothing for an unknown id; an error for a controller that says nothing."""
    fakes.add("scontrol", does='echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    assert slurm.show_job("4242") == {}
    fakes.add("scontrol", does="echo JobId=9 JobState=RUNNING Comment=a b")
    assert slurm.show_job("9") == {"JobId": "9", "JobState": "RUNNING", "Comment": "a b"}
    fakes.add("scontrol", does=f'echo "{REFUSED}" >&2; exit 1')
    with pytest.raises(SlurmError):
        slurm.show_job("9")


def test_accounting_answers_or_not(fakes: Fakes) -> None:
    fakes.add("sacct", does='echo "Slurm accounting storage is disabled" >&2; exit 1')
    assert slurm.accounting_state("9") is None
    fakes.add("sacct", does='echo "sacct: error: Problem talking to the database: Connection refused" >&2; exit 1')
    assert slurm.accounting_state("9") is None and len(fakes.calls) == 2
    fakes.add("sacct")
    assert slurm.accounting_state("9") is None
    fakes.add("sacct", does='echo "CANCELLED by 0"')
    assert slurm.accounting_state("9") == "CANCELLED"


def test_when_it_would_start(fakes: Fakes) -> None:
    """--test-only in words; what it says of nodes that are down is no refusal."""
    start = 'echo "sbatch: Job 996008 to start at {} using 4 processors on nodes n[0-1] in partition train" >&2'
    fakes.add("sbatch", does=start.format(int(time.time())))
    assert slurm.test_only("#!/bin/sh\n") == "Slurm would start it now on n[0-1]"
    fakes.add("sbatch", does=start.format(int(time.time()) + 7225))
    assert slurm.test_only("#!/bin/sh\n") == "Slurm would start it in 2h on n[0-1]"
    fakes.add("sbatch", does='echo "allocation failure: Requested node configuration is not available" >&2; exit 1')
    assert "waits for nodes that are down" in slurm.test_only("#!/bin/sh\n", may_wait=True)
    with pytest.raises(SlurmError, match="sbatch: allocation failure: Requested node configuration"):
        slurm.test_only("#!/bin/sh\n")
    fakes.add("sbatch", does='echo "allocation failure: Invalid qos specification" >&2; exit 1')
    with pytest.raises(SlurmError, match="Invalid qos"):
        slurm.test_only("#!/bin/sh\n", may_wait=True)


def test_facts_ask_for_no_more_than_the_spec_names(fakes: Fakes, tmp_path: Path) -> None:
    """The queue of all users and the accounting database are asked only where there is something to look up."""
    (tmp_path / "partitions").write_text(PARTITIONS)
    (tmp_path / "nodes").write_text(NODES)
    fakes.add("scontrol", does=f'[ "$4" = node ] && /bin/cat {tmp_path}/nodes || /bin/cat {tmp_path}/partitions')
    fakes.add("squeue", does='echo "12 10"; echo "7 7"')
    fakes.add("sacctmgr", does='[ "$4" = qos ] && echo normal || echo lab')
    plain = slurm.cluster_facts(spec(tmp_path))
    assert [node.name for node in plain.nodes] == ["n0", "n1"] and len(plain.partitions) == 2
    assert fakes.calls == ["scontrol --all --oneliner show partition", "scontrol --all --oneliner show node"]
    named = "slurm.account=lab", "slurm.additional_parameters={dependency: 'afterok:10'}"
    facts = slurm.cluster_facts(spec(tmp_path, *named))
    assert (facts.accounts, facts.qos, facts.jobs) == ({"lab"}, {"normal"}, {"12", "10", "7"})
    fakes.add("sacctmgr", does='echo "You are not running a supported accounting_storage plugin" >&2; exit 1')
    assert slurm.cluster_facts(spec(tmp_path, *named)).accounts == frozenset()


# ---- the casebook ----------------------------------------------------------------------------------------------------


def test_case_013(tmp_path: Path) -> None:
    """Cores of a rank are asked of sbatch and restated on the step, which inherits nothing since Slurm 22.05; how they
    are bound is the user's to say, and the last word. (What each rank really sees is in its log: `preflight`.)"""
    wanted = spec(tmp_path, "slurm.cpus_per_task=8", "slurm.srun_args=[--cpu-bind=none]")
    script = submit.render(wanted, RunDir(tmp_path / "run"))
    assert "#SBATCH --cpus-per-task=8" in script.splitlines()
    step = re.search(r"^srun .*", script, re.MULTILINE)
    assert step is not None and " --cpus-per-task=8 --cpu-bind=none " in step[0]
    assert "--cpus-per-task" not in submit.render(spec(tmp_path), RunDir(tmp_path / "run"))


def test_case_024(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter stands in the script by its path, and where it is missing the job fails at once and names it."""
    missing = tmp_path / "a venv/bin/python"
    monkeypatch.setattr(sys, "executable", str(missing))
    script = submit.render(spec(tmp_path), RunDir(tmp_path / "run"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/srun").write_text(f"#!/bin/sh\necho started > {tmp_path}/started\n")
    (tmp_path / "bin/srun").chmod(0o755)
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0 and str(missing) in done.stderr and not (tmp_path / "started").exists()
    assert os.environ["PATH"] not in script


# ---- a real Slurm ----------------------------------------------------------------------------------------------------

SLEEPS = "#!/bin/sh\n#SBATCH --output=/dev/null --error=/dev/null --time=5 --mem=100\nsleep 300\n"


@pytest.fixture
def real(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process speaks to a real local Slurm."""
    for name, value in request.getfixturevalue("slurm").items():
        monkeypatch.setenv(name, value)


def sbatch(*options: str) -> str:
    return slurm.call("sbatch", "--parsable", *options, input_text=SLEEPS).strip()


def waits(job_id: str) -> str:
    one = slurm.queue()[job_id]
    return slurm.pending_in_words(one, time.time()) if one.state == "PENDING" else one.state


@pytest.mark.slow
@pytest.mark.usefixtures("real")
def test_jobs_of_a_real_slurm() -> None:
    """Jobs as they wait, run, are held, requeued, cancelled and unknown."""
    assert slurm.configured() and slurm.show_job("4242") == {} and slurm.accounting_state("1") is None
    held = sbatch("--hold", "--job-name=held", "--comment=pithtrain ab step=3 loss=2.1")
    behind, later = sbatch(f"--dependency=afterok:{held}"), sbatch("--begin=now+1hour")
    runs = sbatch("--job-name=runs", "--requeue")
    try:
        wait_for(lambda: waits(runs) == "RUNNING")
        one = slurm.queue()[held]
        assert (one.name, one.comment, one.held, one.start) == ("held", "pithtrain ab step=3 loss=2.1", True, None)
        assert slurm.show_job(held)["Comment"] == one.comment
        assert "it is held" in waits(held) and "another job to end" in waits(behind) and "starts in" in waits(later)
        running = slurm.queue()[runs]
        assert running.nodes in ("n0", "n1") and 200 < (running.time_left_s or 0) <= 300 and running.restarts == 0
        assert abs((running.start or 0) - time.time()) < 60

        slurm.call("scontrol", "requeuehold", runs)
        wait_for(lambda: slurm.queue()[runs].held)
        assert "never start" in waits(runs) and "resume" in waits(runs)
        slurm.release(runs)
        wait_for(lambda: waits(runs).startswith("restarts in"))
        assert slurm.queue()[runs].restarts == 1
        slurm.update(runs, ExcNodeList="n0", StartTime="now")
        wait_for(lambda: slurm.queue()[runs].nodes == "n1")
        slurm.requeue(runs)
        wait_for(lambda: waits(runs).startswith("restarts in 1m"))

        slurm.cancel(held)
        wait_for(lambda: "did not end as asked" in waits(behind))
        assert waits(held) == "CANCELLED"
        with pytest.raises(SlurmError, match="Invalid job id"):
            slurm.requeue("4242")
    finally:
        for job_id in (held, behind, later, runs):
            slurm.cancel(job_id)
        wait_for(lambda: all(one.state in slurm.ENDED for one in slurm.queue().values()))


@pytest.mark.slow
@pytest.mark.usefixtures("real")
def test_what_a_real_slurm_says_of_a_spec(tmp_path: Path) -> None:
    """Its partitions and nodes, its estimate, its refusal; a drained node makes a refusal a wait."""
    facts = slurm.cluster_facts(spec(tmp_path))
    assert {one.name: one.default for one in facts.partitions} == {"train": True, "high": False}
    assert [(node.name, node.num_gpus, node.up) for node in facts.nodes] == [("n0", 4, True), ("n1", 4, True)]
    both = spec(tmp_path, "slurm.nodes=2")
    assert slurm.problems(both, facts) == ([], [])  # both nodes are this host: its disk is theirs
    assert "would start it" in slurm.test_only(SLEEPS)
    with pytest.raises(SlurmError, match="sbatch: allocation failure"):
        slurm.test_only(SLEEPS.replace("--mem=100", "--mem=64G"))
    script = SLEEPS.replace("--mem=100", "--mem=100 --nodes=2")
    slurm.call("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=a test, k=v")
    try:
        facts = slurm.cluster_facts(both)
        assert "(1 up, 1 drained)" in slurm.problems(both, facts)[1][0] and not facts.whole
        assert "cannot say" in slurm.test_only(script, may_wait=not facts.whole)
    finally:
        slurm.call("scontrol", "update", "NodeName=n1", "State=RESUME")
    wait_for(lambda: "would start it" in slurm.test_only(script, may_wait=True))


@pytest.mark.slow
@pytest.mark.usefixtures("real")
def test_a_real_controller_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command says so in words that are known as such: the error names where to look, after three more tries."""
    conf = Path(os.environ["SLURM_CONF"]).read_text()
    elsewhere = tmp_path / "slurm.conf"
    elsewhere.write_text(re.sub(r"(?m)^SlurmctldPort=.*", "SlurmctldPort=9\nMessageTimeout=2", conf))
    monkeypatch.setenv("SLURM_CONF", str(elsewhere))
    monkeypatch.setattr(slurm, "WAITS_S", ())
    assert slurm.configured()
    asks = [slurm.queue, lambda: slurm.show_job("1"), lambda: slurm.requeue("1"), lambda: slurm.release("1")]
    asks += [lambda: slurm.cancel("1"), lambda: slurm.test_only(SLEEPS), lambda: slurm.update("1", Comment="x")]
    for ask in asks:
        with pytest.raises(SlurmError, match="Slurm does not answer"):
            ask()
