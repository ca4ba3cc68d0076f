"""Slurm's commands as shell scripts of a few lines, for what surrounds them: a test says what each answers.

`install` puts them first on PATH; every call leaves a line in FOLDER/called. What is not given answers as a quiet
cluster of two nodes with four GPUs each would.
"""

import os
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
