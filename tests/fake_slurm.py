"""Slurm's commands as shell scripts of a few lines, for what surrounds them: a test says what each answers.

`install` puts them first on PATH; every call leaves a line in FOLDER/called. What is not given answers as a quiet
cluster of two nodes with four GPUs each would.
"""

import os
import re
from pathlib import Path

import pytest

PARTITION = (
    "PartitionName=train Default=YES State=UP MaxNodes=UNLIMITED MaxTime=1-00:00:00 DefaultTime=NONE Nodes=n[0-1]"
)
NODE = "NodeName={0} CPUEfctv=32 RealMemory=64000 Gres=gpu:4 State=IDLE Partitions=train NodeHostName={0}"
SCONTROL = f"""
case "$*" in
    *"show partition"*) echo "{PARTITION}" ;;
    *"show job"*) echo "JobId=7 JobState=RUNNING PreemptTime=None" ;;
    *"show node"*) echo "{NODE.format("n0")}"; echo "{NODE.format("n1")}" ;;
esac
"""

# `scontrol show job --oneliner` of Slurm 22.05 as a batch script got it once its ranks had ended, names and paths aside
JOB = (
    "JobId=7 JobName=fake UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901756 Nice=0 Account=(null)"
    " QOS=(null) JobState={0} Dependency=(null) Requeue={1} BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime={2}"
    " TimeLimit=00:01:00 TimeMin=N/A SubmitTime=1795991867 EligibleTime=1795991867 AccrueTime=1795991867"
    " StartTime={3} SuspendTime=None SecsPreSuspend=0 LastSchedEval=1795991868 Scheduler=Main Partition=train"
    " AllocNode:Sid=localhost:14369 ReqNodeList=(null) ExcNodeList=(null) NodeList=n0 BatchHost=n0 NumNodes=1"
    " NumCPUs=2 NumTasks=4 CPUs/Task=1 ReqB:S:C:T=0:0:*:* TRES=cpu=4,mem=4G,node=2,billing=4 Socks/Node=*"
    " NtasksPerN:B:S:C=2:0:*:* CoreSpec=* MinCPUsNode=2 MinMemoryNode=2G MinTmpDiskNode=0 Features=(null)"
    " DelayBoot=00:00:00 OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null) Command=7.sh WorkDir=/"
    " StdErr=7_0_log.err StdIn=/dev/null StdOut=7_0_log.out Power= "
)
_START = "1795991868 EndTime={} Deadline=N/A PreemptEligibleTime=1795991868 PreemptTime={}"
_KILLED = "slurmstepd-n0: error: *** JOB 7 ON n0 CANCELLED AT 2026-11-29T22:38:20{} ***\n"
_NODE_FAILURE = _KILLED.format(" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS")
_PREEMPTION = _KILLED.format(" DUE TO PREEMPTION")
# a job that Slurm has queued again: one picture, whatever the reason
_AGAIN = ("COMPLETING Reason=None", "1 Restarts=1", "00:00:00", "1795991900 EndTime=1795991960 Deadline=N/A")
# how it ends -> the four parts of it that differ, and what stood in the batch script's log
ENDINGS = {
    "runs": ("RUNNING Reason=None", "1 Restarts=0", "00:00:02", _START.format(1795991928, None), ""),
    "runs, preempted": ("RUNNING Reason=None", "1 Restarts=0", "00:00:22", _START.format(1795991890, 1795991870), ""),
    "node lost": (*_AGAIN, _NODE_FAILURE),
    "node lost, --no-requeue": (
        "COMPLETING Reason=NodeDown",
        "0 Restarts=0",
        "00:00:32",
        _START.format(1795991900, None),
        _NODE_FAILURE,
    ),
    "preempted, PreemptMode=REQUEUE": (*_AGAIN, _PREEMPTION),
    "preempted, PreemptMode=CANCEL": (
        "COMPLETING Reason=None",
        "1 Restarts=0",
        "00:00:03",
        _START.format(1795991871, 1795991871),
        _PREEMPTION,
    ),
    "scontrol requeue": (*_AGAIN, _KILLED.format(" DUE TO JOB REQUEUE")),
    "time limit": (
        "COMPLETING Reason=TimeLimit",
        "1 Restarts=0",
        "00:01:07",
        _START.format(1795991935, None),
        _KILLED.format(" DUE TO TIME LIMIT"),
    ),
    "scancel": (
        "COMPLETING Reason=None",
        "1 Restarts=0",
        "00:00:02",
        _START.format(1795991870, None),
        _KILLED.format(""),
    ),
}


def show_job(ending: str = "runs", restarts: int = 0) -> str:
    """A scontrol for a job that ends this way in its attempt after `restarts` others; its nodes are up, all of them."""
    said = re.sub(r"Restarts=(\d+)", lambda match: f"Restarts={int(match[1]) + restarts}", JOB.format(*ENDINGS[ending]))
    return f"""
case "$*" in
    *"show job"*) echo "{said}" ;;
    *"show node"*) echo "{NODE.format("n0")}"; echo "{NODE.format("n1")}" ;;
esac
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **commands: str) -> None:
    """Fake commands, each the body of a shell script: `sbatch="echo ..."`."""
    quiet = {"sbatch": 'echo "Submitted batch job 7"', "scontrol": SCONTROL, "squeue": "", "srun": "", "sinfo": ""}
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    for name, text in {**quiet, "scancel": "", "sacct": "exit 1", "sacctmgr": "exit 1", **commands}.items():
        (binaries / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {folder}/called\n{text}\n')
        (binaries / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")


def called(folder: Path) -> str:
    return (folder / "called").read_text()


def queue_row(
    job_id: str, state: str, reason: str = "None", comment: str = "", restarts: int = 0, nodes: str = "n0"
) -> str:
    """A line of squeue as `slurm.queue` asks for it."""
    row = [job_id, "fake", state, reason, nodes, "N/A", "29:00", str(restarts), comment]
    return "".join(f"{cell}\x1f" for cell in row)
