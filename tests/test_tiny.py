"""configs/tiny*.yaml run unchanged on the meshes of at most 8 processes that they promise, and are one run on each."""

from pathlib import Path

import numpy as np
import pytest

from harness import Pool, distance, run_mesh
from pithtrain.spec import RunSpec, load

CONFIGS = Path(__file__).parent.parent / "configs"
MESHES = [
    (pp, dp, ep) for pp in (1, 2, 3, 4) for dp in (1, 2, 4, 8) for ep in (1, 2, 4) if pp * dp * ep <= 8
]  # 21: dp and ep powers of two


FEW = [(2, 1, 2), (4, 1, 1), (1, 4, 2), (2, 1, 4), (3, 2, 1)]


def tiny(config: str, pp: int, dp: int, ep: int) -> RunSpec:
    mesh = [f"parallelism.pipeline_parallel_size={pp}", f"parallelism.expert_parallel_size={ep}"]
    return load(CONFIGS / config, [*mesh, f"slurm.gpus_per_node={pp * dp * ep}"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "meshes"), [("tiny.yaml", MESHES), ("tiny-deepseek-v2.yaml", FEW), ("tiny-gpt-oss.yaml", FEW)]
)
def test_first_step_is_the_same_on_every_mesh(pool: Pool, config: str, meshes: list[tuple[int, int, int]]) -> None:
    want = run_mesh(pool, tiny(config, 1, 1, 1))
    for mesh in meshes:
        got = run_mesh(pool, tiny(config, *mesh))
        np.testing.assert_array_equal(got.counts, want.counts, str(mesh))
        np.testing.assert_allclose(got.losses, want.losses, rtol=1e-6, err_msg=str(mesh))
        np.testing.assert_allclose(got.norms, want.norms, rtol=1e-5, err_msg=str(mesh))
        for name, grad in want.first_grads.items():
            assert distance(got.first_grads[name], grad) <= 1e-5, f"{name} on {mesh}"
