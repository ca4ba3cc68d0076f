"""The benchmarks run and print numbers that fit each other; how large they are is no test's matter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_checkpoint_bench_measures_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/checkpoint.py", "--folder", tmp_path, "--sample-gib", "0.03", "--steps", "1"]
    sets = ["training.global_batch_size=2", "model.num_hidden_layers=2", "data.sources=[{path: none}]"]
    command += [word for text in [*sets, "data.tokenizer=null"] for word in ("--set", text)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    share = found["async_stall_s"] / found["save_s"]
    assert found["async_stall_of_save"] == pytest.approx(share, rel=0.05, abs=0.01) and share > 0
    for name in ("save", "load", "async_write"):
        assert found[f"{name}_gb_s"] == pytest.approx(found["bytes"] / found[f"{name}_s"] / 1e9, abs=2e-3)
    assert set(found["disk_write_gb_s"]) == set(found["disk_read_gb_s"]) == {"1", "4"}
    assert found["save_of_disk"] > 0 and found["load_of_disk"] > 0 and found["step_s"] > 0
    assert list(tmp_path.iterdir()) == []
