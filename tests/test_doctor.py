"""The verdicts on text, the probes on this machine, the commands of other programs as fakes in PATH."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pithtrain import doctor, slurm
from pithtrain.cli import app
from pithtrain.doctor import Check
from pithtrain.errors import SlurmError
from pithtrain.spec import SlurmSection


def by_name(checks: list[Check]) -> dict[str, Check]:
    found = {check.name: check for check in checks}
    assert len(found) == len(checks), "two checks have one name"
    return found


def put(folder: Path, name: str, script: str) -> None:
    """A program in a folder of PATH."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_how_the_answers_are_told() -> None:
    shown = doctor.text([Check("a", "OK", "well"), Check("longer", "FAIL", "broken", "mend it")])
    assert shown.splitlines() == [
        "OK    a       well",
        "FAIL  longer  broken",
        "              -> mend it",
        "1 OK, 0 WARN, 1 FAIL",
    ]


@pytest.mark.parametrize(("verdict", "code"), [("OK", 0), ("WARN", 0), ("FAIL", 1)])
def test_the_command_for_programs(monkeypatch: pytest.MonkeyPatch, verdict: Any, code: int) -> None:
    monkeypatch.setattr(doctor, "check_host", lambda output_dir: [Check("a", verdict, "so", "mend it")])
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert json.loads(done.stdout) == [{"name": "a", "verdict": verdict, "found": "so", "mend": "mend it"}]
    assert done.exit_code == code


# ---- this machine ----------------------------------------------------------------------------------------------------


def test_packages_that_are_missing_or_old_are_named_in_one_command() -> None:
    have = {"numpy": "1.26.4", "rich": "9.0", "torch": "2.13.0+cu130"}
    lines = ["numpy>=1.26", "rich>=13", "torch>=2.11", "typer>=0.15", "ruff>=0.9; extra == 'dev'"]
    check = doctor.judge_packages(lines, have.get)
    assert check.verdict == "FAIL"
    assert check.found == "numpy 1.26.4, rich 9.0, torch 2.13.0+cu130, typer missing"
    assert check.mend == f"{sys.executable} -m pip install 'rich>=13' 'typer>=0.15'"
    assert doctor.judge_packages(lines[:1], have.get) == Check("packages", "OK", "numpy 1.26.4")


H100 = "NVIDIA H100 80GB HBM3, 570.86.15"


@pytest.mark.parametrize(
    ("listed", "seen", "built_for", "given", "trouble", "verdict", "says"),
    [
        (None, 0, None, None, [], "OK", "no GPU"),
        (f"{H100}\n{H100}", 2, "13.0", "2", [], "OK", f"2 x {H100}"),
        (H100, 0, None, None, [], "FAIL", "built for CPUs alone"),
        (H100, 0, "13.0", None, [], "FAIL", "torch sees none"),
        (None, 0, "13.0", "4", [], "WARN", "Slurm gives 4 GPUs"),
        (H100, 1, "13.0", None, ["GPU 0: 20 GiB are taken by another process"], "WARN", "20 GiB"),
        (H100, 1, "13.0", None, ["GPU 0: CUDA error: uncorrectable ECC error"], "FAIL", "ECC"),
    ],
)
def test_devices(
    listed: str | None,
    seen: int,
    built_for: str | None,
    given: str | None,
    trouble: list[str],
    verdict: str,
    says: str,
) -> None:
    check = doctor.judge_devices(listed, seen, built_for, given, trouble)
    assert check.verdict == verdict
    assert says in check.found
    assert bool(check.mend) == (verdict != "OK")


def test_a_collective_s_cause_is_who_failed_and_not_who_waited() -> None:
    measured = json.dumps([2e-5, 310.0])
    well = doctor.judge_collective("nccl", [0, 0], [f"some banner\n{measured}", measured])
    assert well == Check("collectives", "OK", "NCCL over 2 GPUs: small all-reduce 20 us, 64 MiB at 310 GB/s")
    slow = doctor.judge_collective("nccl", [0, 0], [json.dumps([2e-5, 1.5])] * 2)
    assert slow.verdict == "WARN"
    assert "topo -m" in slow.mend
    bad = doctor.judge_collective("gloo", [-9, 1], ["", "Traceback\nRuntimeError: no interface lo"])
    assert bad.found == "gloo over 2 processes: rank 1: RuntimeError: no interface lo"
    hung = doctor.judge_collective("nccl", [-9, -9], ["", ""])
    assert hung.found == f"NCCL over 2 GPUs: rank 0: no answer within {doctor.COLLECTIVE_S} s"
    assert bad.verdict == hung.verdict == "FAIL"


def test_a_collective_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "COLLECTIVE_S", 0.5)
    assert "no answer within 0.5 s" in doctor.collective().found


def test_a_login_is_found_and_its_key_is_not_shown(tmp_path: Path) -> None:
    key = "k" * 40
    assert "no login" in doctor.login({}, tmp_path)
    assert doctor.login({"WANDB_API_KEY": key}, tmp_path) == "a key in WANDB_API_KEY"
    (tmp_path / ".netrc").write_text(f"machine wandb.example.org\n  login user\n  password {key}\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert "no login" in doctor.login({}, tmp_path)
    own = {"WANDB_BASE_URL": "https://wandb.example.org/"}
    assert doctor.login(own, tmp_path) == "logged in to wandb.example.org"
    (tmp_path / ".netrc").write_text("not a netrc file")
    assert "no login" in doctor.login(own, tmp_path)


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_kinds_that_other_machines_see() -> None:
    for kind in ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "fuse.juicefs", "virtiofs"):
        assert doctor.SHARED.match(kind), kind
    for kind in ("ext4", "xfs", "overlay", "tmpfs", "btrfs", "fuseblk"):
        assert not doctor.SHARED.match(kind), kind


@pytest.mark.parametrize(
    ("gib", "inodes", "verdict"),
    [(500, None, "OK"), (500, 10**6, "OK"), (20, 10**6, "WARN"), (0.5, None, "FAIL"), (500, 3, "FAIL")],
)
def test_free_space(gib: float, inodes: int | None, verdict: str) -> None:
    assert doctor.judge_free(gib, inodes).verdict == verdict


def test_the_probes_of_a_folder_leave_nothing_behind(tmp_path: Path) -> None:
    """The folder need not exist: before a first run the one above it is looked at."""
    checks = by_name(list(doctor.folder(tmp_path / "runs" / "deep")))
    assert [*checks] == ["folder", "free space", "writing", "locks", "clock"]
    assert all(checks[name].verdict == "OK" for name in ("writing", "locks", "clock")), checks
    assert str(tmp_path) in checks["folder"].found
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_to_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **fields: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)  # root may write anywhere
    last = [*doctor.folder(tmp_path)][-1]
    assert (last.name, last.verdict, last.found) == ("writing", "FAIL", f"{tmp_path}: Permission denied")


def test_a_disk_that_fills_while_it_is_probed_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    last = [*doctor.folder(tmp_path)][-1]
    assert (last.name, last.verdict, last.found) == ("writing", "FAIL", f"{tmp_path}: No space left on device")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lets_in", ["nobody", "two"])
def test_locks_that_do_not_lock(lets_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: object, how: int) -> None:
        if lets_in == "nobody":
            raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    check = by_name(list(doctor.folder(tmp_path)))["locks"]
    assert check.verdict == ("FAIL" if lets_in == "nobody" else "WARN")


# ---- Slurm -----------------------------------------------------------------------------------------------------------

CONFIG = """\
Configuration data as of 2026-11-29T19:25:56
AccountingStorageType   = accounting_storage/slurmdbd
EnforcePartLimits       = NO
JobRequeue              = 1
KillWait                = 30 sec
MinJobAge               = 300 sec
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
ProctrackType           = proctrack/cgroup
SchedulerParameters     = bf_interval=2,sched_interval=2
SLURM_VERSION           = 22.05.8
"""
PARTITIONS = """\
PartitionName=train Default=YES GraceTime=60 MaxTime=1-00:00:00 PreemptMode=REQUEUE State=UP TotalNodes=2
PartitionName=high Default=NO GraceTime=0 MaxTime=UNLIMITED PreemptMode=OFF State=UP TotalNodes=4
"""


def limits(change: Mapping[str, str], partition: str = PARTITIONS) -> dict[str, Check]:
    rows = [slurm.fields(line) for line in partition.splitlines()]
    return by_name(list(doctor.judge_limits(doctor.parse_config(CONFIG) | change, rows)))


def test_a_site_that_lets_runs_stop_and_go_on() -> None:
    checks = limits({})
    assert {check.verdict for check in checks.values()} == {"OK"}
    assert checks["partition train*"].found == "2 nodes, up to 1-00:00:00, preempted by requeue with 90 s to save"
    assert checks["partition high"].found == "4 nodes, up to unlimited, never preempted"


@pytest.mark.parametrize(
    ("change", "partition", "name", "says"),
    [
        ({"KillWait": "10 sec"}, PARTITIONS, "stopping", "10 s from scancel"),
        ({"ProctrackType": "proctrack/pgid"}, PARTITIONS, "tracking", "pgid"),
        ({"KillWait": "5 sec"}, "PartitionName=a GraceTime=10 PreemptMode=REQUEUE", "partition a", "15 s to save"),
        ({}, "PartitionName=a GraceTime=0 PreemptMode=CANCEL", "partition a", "Slurm restarts nothing"),
        ({}, "PartitionName=a GraceTime=60 PreemptMode=GANG,SUSPEND", "partition a", "suspended"),
        ({}, "PartitionName=a State=DOWN", "partition a", "; down"),
    ],
)
def test_what_a_site_does_that_costs_steps_is_warned_of(
    change: Mapping[str, str], partition: str, name: str, says: str
) -> None:
    check = limits(change, partition)[name]
    assert check.verdict == "WARN"
    assert says in check.found
    assert check.mend


def test_without_preemption_no_partition_is_warned_of() -> None:
    row = "PartitionName=a GraceTime=0 PreemptMode=CANCEL"
    assert limits({"PreemptType": "preempt/none"}, row)["partition a"].verdict == "OK"


def test_a_controller_that_is_away_fails_and_the_rest_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*command: str, input_text: str | None = None) -> str:
        raise SlurmError("Unable to contact slurm controller\n  more")

    monkeypatch.setattr(slurm, "configured", lambda: True)
    monkeypatch.setattr(slurm, "call", away)
    monkeypatch.setattr(doctor, "collective", lambda: Check("collectives", "OK", ""))
    checks = by_name(doctor.check_host(tmp_path))
    assert checks["slurm"].verdict == "FAIL"
    assert checks["slurm"].found == "Unable to contact slurm controller"
    assert {"python", "torch", "folder", "git"} <= checks.keys()


def test_accounting_that_does_not_answer_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*command: str, input_text: str | None = None) -> str:
        if command[0] == "sacct":
            raise SlurmError("sacct: error: slurmdbd is away")
        return CONFIG if "config" in command else PARTITIONS

    monkeypatch.setattr(slurm, "configured", lambda: True)
    monkeypatch.setattr(slurm, "call", call)
    monkeypatch.setattr(doctor, "collective", lambda: Check("collectives", "OK", ""))
    check = by_name(doctor.check_host(tmp_path))["accounting"]
    assert check.verdict == "WARN"
    assert "MinJobAge = 300 sec" in check.found


# ---- several nodes ---------------------------------------------------------------------------------------------------


def reports(hosts: list[str], **changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What so many well nodes print; `changes`: by host, fields of its meeting."""
    lines: list[dict[str, Any]] = []
    for rank, host in enumerate(hosts):
        lines.append({"doctor": host, "nodes": ",".join(hosts)})
        for name, found in (("host", "4 cores"), ("torch", "2.13.0"), ("devices", "8 x H100")):
            lines.append({"doctor": host, "check": {"name": name, "verdict": "OK", "found": found, "mend": ""}})
        met = {"rank": rank, "clock_s": 0.001 * rank, "seen_s": 0.1, "small_s": 1e-4, "gb_s": 40.0}
        lines.append({"doctor": host, "met": met | changes.get(host, {})})
    lines += [{"doctor": hosts[0], "link": [rank, 45.0 + rank]} for rank in range(1, len(hosts))]
    return lines


def test_well_nodes() -> None:
    hosts = ["n0", "n1", "n2"]
    checks = by_name(doctor.judge_nodes(reports(hosts), hosts, ""))
    assert {check.verdict for check in checks.values()} == {"OK"}
    assert checks["n1"].found == "3 of 3 checks are well; 4 cores; 8 x H100"
    assert checks["meeting"].found == "3 nodes: small all-reduce 100 us, large at 40 GB/s"
    assert checks["shared folder"].found == "a file of n0 is seen by all within 0.1 s"
    assert checks["clocks"].found == "at most 0.002 s apart, n2 from n0"


def test_a_node_that_cannot_start_a_task_is_named() -> None:
    hosts = ["n0", "n1", "n10"]
    told = [line for line in reports(hosts) if line["doctor"] != "n1" and "met" not in line]
    told += [{"doctor": "n0", "error": "DistStoreError: 2/3 clients joined"}]
    said = "slurmstepd: error: execve(): python: No such file\nsrun: error: n10: task 2: Terminated\n"
    said += "srun: error: n1: task 1: Exited with exit code 2\n"
    checks = by_name(doctor.judge_nodes(told, hosts, said))
    assert checks["n1"].found == "its task ended before it could tell: n1: task 1: Exited with exit code 2"
    assert "--exclude n1" in checks["n1"].mend
    assert checks["n0 meeting"].verdict == checks["n10 meeting"].verdict == "FAIL"
    assert "no answer" in checks["n10 meeting"].found
    assert "meeting" not in checks


def test_a_node_with_a_fault_of_its_own_is_named() -> None:
    hosts = ["n0", "n1"]
    told = reports(hosts)
    fault = {"name": "writing", "verdict": "FAIL", "found": "/runs: Read-only file system", "mend": "elsewhere"}
    told.insert(1, {"doctor": "n1", "check": fault})
    checks = by_name(doctor.judge_nodes(told, hosts, ""))
    assert checks["n1 writing"] == Check("n1 writing", "FAIL", "/runs: Read-only file system", "elsewhere")
    assert checks["n1"].found.startswith("3 of 4 checks are well")


def test_nodes_that_differ_are_told_from_the_majority() -> None:
    hosts = ["n0", "n1", "n2"]
    told = reports(hosts)
    old = {"name": "torch", "verdict": "OK", "found": "2.11.0", "mend": ""}
    told = [line | {"check": old} if line["doctor"] == "n0" and "2.13.0" in str(line) else line for line in told]
    check = by_name(doctor.judge_nodes(told, hosts, ""))["n0 torch"]
    assert (check.verdict, check.found) == ("WARN", "unlike the others: 2.11.0; they: 2.13.0")


def test_what_lies_between_nodes() -> None:
    hosts = ["n0", "n1", "n2", "n3"]
    told = reports(hosts, n1={"seen_s": None}, n2={"clock_s": -7.5})
    told = [line if line.get("link", [0])[0] != 3 else line | {"link": [3, 4.0]} for line in told]
    checks = by_name(doctor.judge_nodes(told, hosts, ""))
    assert checks["shared folder"].verdict == "FAIL"
    assert checks["shared folder"].found == "n1 does not see a file that n0 wrote"
    assert checks["clocks"].verdict == "WARN"
    assert "7.500 s apart, n2 from n0" in checks["clocks"].found
    assert checks["n3 link"].found == "4 GB/s from n0; usual: 46"
    assert "--exclude n3" in checks["n3 link"].mend
    assert "n1 link" not in checks


@pytest.mark.parametrize(
    ("error", "mend"),
    [
        ("RuntimeError: [enforce fail at gloo/transport] unable to resolve hostname", "GLOO_SOCKET_IFNAME"),
        ("DistNetworkError: The client socket has failed to connect to [n0]:15001", "MASTER_ADDR"),
        ("DistBackendError: NCCL error in: ..., invalid usage", "NCCL_SOCKET_IFNAME"),
        ("CUDA error: unspecified launch failure", "--exclude n1"),
    ],
)
def test_a_meeting_that_fails_says_what_to_set(error: str, mend: str) -> None:
    told = [line for line in reports(["n0", "n1"]) if "met" not in line or line["doctor"] == "n0"]
    checks = by_name(doctor.judge_nodes([*told, {"doctor": "n1", "error": error}], ["n0", "n1"], ""))
    assert checks["n1 meeting"].found == error
    assert mend in checks["n1 meeting"].mend


def test_srun_s_own_words_where_no_node_was_given() -> None:
    said = "srun: job 7 queued\nsrun: error: Unable to allocate resources: Requested nodes are busy\n"
    [check] = doctor.judge_nodes([], [], said)
    assert check.found == "Unable to allocate resources: Requested nodes are busy"
    assert "are free" in check.mend
    [check] = doctor.judge_nodes([], [], "srun: error: Node count specification invalid\n")
    assert "sinfo -N" in check.mend


def test_nodes_are_asked_for_whole_where_they_have_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "NodeName=a Gres=gpu:h100:8(S:0-1) Partitions=x\nNodeName=b Gres=gpu:4 Partitions=y\nNodeName=c Partitions=z"
    monkeypatch.setattr(slurm, "call", lambda *command: rows)
    assert doctor._whole_nodes(None) == ["--gpus-per-node=4", "--exclusive", "--mem=0"]
    assert doctor._whole_nodes("x,z")[0] == "--gpus-per-node=8"
    assert doctor._whole_nodes("z") == ["--mem=4G"]


def test_without_slurm_there_are_no_nodes_to_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "configured", lambda: False)
    [check] = doctor.check_nodes(2, tmp_path)
    assert (check.verdict, check.mend) == ("FAIL", "run it where `sinfo` answers")


def test_one_srun_of_one_task_a_node_as_a_run_would_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partition, environment, setup and srun arguments are the spec's; our lines are picked out of what tasks print."""
    lines = "\n".join(json.dumps(line) for line in reports(["n0", "n1"]))
    (tmp_path / "out").write_text(f"NCCL version 2.28\n{lines}\n")
    binaries = tmp_path / "bin"
    put(binaries, "srun", f'printf "%s\\n" "$NCCL_IB_HCA" "$@" > {tmp_path}/arguments; cat {tmp_path}/out')
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "configured", lambda: True)
    monkeypatch.setattr(slurm, "call", lambda *command: "NodeName=n0 Gres=gpu:4 Partitions=high\n")
    site = SlurmSection(
        partition="high", env={"NCCL_IB_HCA": "=mlx5_0"}, setup=("module load cuda",), srun_args=("-v",)
    )
    checks = doctor.check_nodes(2, tmp_path / "runs", site)
    assert not [check for check in checks if check.verdict == "FAIL"]
    said = (tmp_path / "arguments").read_text()
    arguments = said.splitlines()
    for expected in ("=mlx5_0", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=4", "--partition=high", "-v"):
        assert expected in arguments
    assert 'bash\n-c\nmodule load cuda\nexec "$@"\ndoctor\n' in said
    assert arguments[-2:] == ["node", f"{tmp_path}/runs"]


# ---- for real --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_this_machine_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every check answers, none with our own mistake; the collective of two processes is measured."""
    monkeypatch.setattr(slurm, "configured", lambda: False)
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t" * 7)
    checks = doctor.check_host(tmp_path)
    named = by_name(checks)
    for name in ("host", "python", "packages", "torch", "devices", "nccl", "cudnn", "triton", "collectives", "folder"):
        assert named[name].verdict in ("OK", "WARN"), named[name]
    assert re.search(r"small all-reduce [\d,]+ us", named["collectives"].found)
    assert all(check.mend for check in checks if check.verdict != "OK")
    assert "s3cr3t" not in doctor.text(checks)
    assert named["slurm"].found.startswith("none here")


@pytest.mark.slow
def test_two_nodes_for_real(slurm: dict[str, str], tmp_path: Path) -> None:
    """The real srun, rendezvous and collective; what the local cluster's nodes lack is a warning that says so."""
    code = "import dataclasses, json, sys; from pathlib import Path; from pithtrain import doctor as d, spec\n"
    code += "site = spec.SlurmSection(partition='high', setup=['export A=1'])\n"
    code += "checks = d.check_nodes(2, Path(sys.argv[1]), site) + d.check_host(Path(sys.argv[1]))\n"
    code += "print(json.dumps([dataclasses.asdict(check) for check in checks]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=slurm, capture_output=True, text=True, check=True, timeout=200
    )
    checks = {each["name"]: Check(**each) for each in json.loads(done.stdout)}
    assert not [check for check in checks.values() if check.verdict == "FAIL"]
    assert checks["meeting"].found.startswith("2 nodes: small all-reduce")
    assert checks["shared folder"].verdict == checks["clocks"].verdict == "OK"
    for host in ("n0", "n1"):
        assert "Slurm gives 4 GPUs" in checks[f"{host} devices"].found
    assert "partition train*" in checks
    assert checks["accounting"].found.startswith("none")
    assert not list(tmp_path.iterdir())
