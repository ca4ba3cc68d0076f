"""Fixtures that more than one test file uses."""

import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # before triton is imported: its interpreter runs our kernels on CPU tensors
    os.environ.setdefault("TRITON_INTERPRET", "1")

from torch._dynamo.utils import counters

import cluster
from harness import Pool

MISSING = [tool for tool in cluster.TOOLS if shutil.which(tool, path=cluster.search_path()) is None]
NO_SLURM = f"no {', '.join(MISSING)} here: apt-get install slurm-wlm munge" if MISSING else None


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Processes for multi-rank tests, started once."""
    started = Pool()
    yield started
    started.close()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`torch.compile` traces, partitions and guards, and compiles nothing; its counters begin at zero."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    yield
    torch._dynamo.reset()


def short_folder() -> Path:
    """A new folder for a cluster: munge's socket wants a shorter path than pytest's own folders have."""
    return Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))


@pytest.fixture(scope="session")
def slurm() -> Iterator[dict[str, str]]:
    """A real local Slurm of two nodes with four fake GPUs each: the environment for its commands, SLURM_CONF in it."""
    if NO_SLURM:
        pytest.skip(NO_SLURM)
    folder = short_folder()
    cluster.up(folder)
    yield cluster.environment(folder)
    cluster.down(folder)
    shutil.rmtree(folder)
