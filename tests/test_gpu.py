"""On a GPU: the engine against itself on the CPU, bf16 against fp32, two GPUs against one. Skipped without CUDA."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness import Pool, Ran, batches_of, distance, gather_ran, make_spec, run_mesh, steps_job
from pithtrain import catalog, checkpoint
from pithtrain.build import build
from pithtrain.ops.dispatch import Lane
from pithtrain.ops.grouped import grouped_linear
from pithtrain.ops.permute import order_slots, ordered_sum
from pithtrain.spec import from_dict
from pithtrain.train import train_step
from pithtrain.world import Place, connect

pytestmark = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

# widths that grouped_mm accepts: strides of 16 bytes
MODEL = {"vocab_size": 512, "hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "moe_intermediate_size": 128}
TRAINING = {"sequence_length": 128, "global_batch_size": 8}


def on(device: str, dtype: str, **sections: Any) -> dict[str, Any]:
    training = {**TRAINING, "device": device, "compute_dtype": dtype}
    return {"model": MODEL, "training": training, **sections}


def alone(changes: dict[str, Any], steps: int = 3) -> Ran:
    return gather_ran([steps_job(Place(0, 1, 0, "", 1), make_spec(**changes).model_dump(mode="json"), steps)])


@needs_gpu
def test_fp32_on_the_gpu_equals_the_cpu() -> None:
    """The same engine; only the order inside matmuls and reductions differs."""
    want, got = alone(on("cpu", "float32")), alone(on("cuda", "float32"))
    np.testing.assert_array_equal(got.counts[0], want.counts[0])
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-4)
    for name, grad in want.first_grads.items():
        # Box-Muller's logarithm and cosine round differently: the two start an ulp apart
        assert distance(got.first_grads[name], grad) < 1e-3, name


@needs_gpu
def test_bf16_on_the_gpu_follows_fp32() -> None:
    want, got = alone(on("cuda", "float32")), alone(on("cuda", "bfloat16"))
    np.testing.assert_allclose(got.losses, want.losses, rtol=2e-3)
    np.testing.assert_allclose(got.norms, want.norms, rtol=5e-2)
    # near ties choose another expert in bf16, and that moves a router's gradient most
    far = {name: distance(got.first_grads[name], grad) for name, grad in want.first_grads.items()}
    assert max(far.values()) < 0.4, far


@needs_gpu
def test_step_leaves_no_memory_behind() -> None:
    spec = make_spec(model=MODEL, training={**TRAINING, "device": "cuda"})
    with connect(Place(0, 1, 0, "", 1), spec.mesh, "cuda", spec.distributed) as world:
        engine = build(spec, world)
        batches = batches_of(spec, engine, 0)
        allocated = []
        for _ in range(6):
            train_step(engine, spec, batches, 1e-3)
            torch.cuda.synchronize()
            gc.collect()
            allocated.append(torch.cuda.memory_allocated())
    assert allocated[-1] == allocated[-2] == allocated[-3], allocated


MESHES = [(2, 1, 1), (1, 2, 1), (1, 1, 2)]


@needs_two
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "pp{}dp{}ep{}".format(*mesh))
@pytest.mark.parametrize("dispatch", ["dedup", "plain"])
def test_two_gpus_equal_one(pool: Pool, mesh: tuple[int, int, int], dispatch: str) -> None:
    """Over NCCL in fp32, with the bounds of the CPU tests."""
    changes = on("cuda", "float32", moe={"dispatch": dispatch})
    want = run_mesh(pool, make_spec(**changes), 3)
    got = run_mesh(pool, make_spec(*mesh, **changes), 3)
    np.testing.assert_array_equal(got.counts, want.counts)
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5)
    np.testing.assert_allclose(got.norms, want.norms, rtol=1e-5)
    for name, grad in want.first_grads.items():
        assert distance(got.first_grads[name], grad) < 1e-5, name


@needs_gpu
def test_case_073_more_than_2_to_the_31_elements() -> None:
    """310,000 rows of width 7168 (4.4 GB): marker rows at the end come back, through one expert too."""
    rows, width = 310_000, 7168
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    marks = torch.randn(4, width, device="cuda").bfloat16()
    x[-4:] = marks
    local = torch.zeros(rows, 1, dtype=torch.int64, device="cuda")
    local[-2:] = 1
    slots = order_slots(local, 2, rows)
    assert torch.equal(x[slots.row_R][-4:], marks)
    assert torch.equal(ordered_sum(x, slots.slot_Uq, torch.float32)[-4:].bfloat16(), marks)
    weight = torch.randn(2, 64, width, device="cuda").bfloat16() / 64
    for ends in ([rows - 2, rows], [rows, rows]):
        y = grouped_linear(x, weight, torch.tensor(ends, dtype=torch.int32, device="cuda"))
        last = 1 if ends[0] < rows else 0
        want = marks[-1].double() @ weight[last].double().t()
        assert distance(y[-1].double().cpu().numpy(), want.cpu().numpy()) < 1e-2


@needs_gpu
def test_case_074_memory_that_nobody_wrote_is_not_read() -> None:
    """The allocator's pool is full of NaN before each step; losses and gradients are those of a clean one."""
    spec = make_spec(**on("cuda", "bfloat16"))
    found = []
    for poison in (False, True):
        with connect(Place(0, 1, 0, "", 1), spec.mesh, "cuda", spec.distributed) as world:
            engine = build(spec, world)
            losses = []
            for step in range(3):
                if poison:
                    blocks = [torch.full((n,), float("nan"), device="cuda") for n in (1 << 26, *[1 << 18] * 64)]
                    del blocks
                result = train_step(engine, spec, batches_of(spec, engine, step), 1e-3)
                losses.append((result.stats.loss.item(), result.norm.item()))
            found.append(losses)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3)  # cuDNN's attention backward is not deterministic


def quiet_job(place: Place, fields: dict[str, Any]) -> float:
    """A step under torch's synchronisation check: any hidden wait of the host raises."""
    spec = from_dict(fields)
    with connect(place, spec.mesh, "cuda", spec.distributed) as world:
        engine = build(spec, world)
        batches = batches_of(spec, engine, 0)
        train_step(engine, spec, batches, 1e-3)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            result = train_step(engine, spec, batches, 1e-3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return result.norm.item()


@needs_gpu
def test_a_step_never_waits_for_the_device() -> None:
    assert quiet_job(Place(0, 1, 0, "", 1), make_spec(**on("cuda", "bfloat16")).model_dump(mode="json")) > 0


@needs_two
def test_a_step_waits_for_counts_alone(pool: Pool) -> None:
    """With expert parallelism the host waits on one event per MoE layer, which the check does not count."""
    pool.run(2, quiet_job, make_spec(1, 1, 2, **on("cuda", "bfloat16")).model_dump(mode="json"))


def deterministic_job(place: Place, fields: dict[str, Any], synchronised: bool) -> dict[str, Any]:
    """`synchronised`: nothing overlaps, the device is drained around every exchange."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    exchange = Lane.exchange

    def drained(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.synchronize()
        transfer = exchange(*args, **kwargs)
        torch.cuda.synchronize()
        return transfer

    with pytest.MonkeyPatch.context() as patch:
        if synchronised:
            patch.setattr(Lane, "exchange", drained)
        try:
            return steps_job(place, fields, 8)
        finally:
            torch.use_deterministic_algorithms(False)


@needs_two
def test_overlap_changes_nothing_bitwise(pool: Pool) -> None:
    """Streams, freed memory and reused buffers: eight steps with pairs in flight equal eight steps without."""
    spec = make_spec(1, 1, 2, **on("cuda", "bfloat16")).model_dump(mode="json")
    runs = [gather_ran(pool.run(2, deterministic_job, spec, drained)) for drained in (False, False, True)]
    for other in runs[1:]:
        assert other.losses == runs[0].losses
        assert other.norms == runs[0].norms
        for name, master in runs[0].masters.items():
            np.testing.assert_array_equal(other.masters[name], master, name)


@needs_gpu
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_of_a_gpu_is_the_state_of_its_step(tmp_path: Path, asynchronous: bool) -> None:
    """The copy to page-locked memory is over before the shards change, and the next save uses that memory again."""
    spec = make_spec(**on("cuda", "bfloat16"))
    with connect(Place(0, 1, 0, "", 1), spec.mesh, "cuda", spec.distributed) as world:
        engine = build(spec, world)
        saver = checkpoint.Saver(tmp_path, engine.zero, world, {}, asynchronous=asynchronous)
        want: list[dict[str, np.ndarray]] = []
        for step in (1, 2):
            train_step(engine, spec, batches_of(spec, engine, step), 1e-3)
            want.append(
                {
                    f"{kind}/{n}": getattr(p, kind).cpu().numpy()
                    for n, p in engine.zero.sharded.items()
                    for kind in checkpoint.KINDS
                }
            )
            saver.wait()
            saver.save(checkpoint.Position(step, 8 * step))
            for one in engine.zero.sharded.values():
                one.exp_avg.add_(1.0)
        saver.wait()
        for step, state in enumerate(want, 1):
            reader = checkpoint.Reader(catalog.folder(tmp_path, step))
            for key, tensor in state.items():
                np.testing.assert_array_equal(reader.tensor(key).numpy().reshape(tensor.shape), tensor, key)
        newest = catalog.folder(tmp_path, 2)
        assert checkpoint.load(newest, engine.zero, world, catalog.read(newest)) == checkpoint.Position(2, 16)
        for name, one in engine.zero.sharded.items():
            np.testing.assert_array_equal(one.exp_avg.cpu().numpy(), want[1][f"exp_avg/{name}"])
