"""On a GPU: the engine against itself on the CPU, bf16 against fp32, two GPUs against one. Skipped without CUDA."""

import functools
import gc
import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness import Pool, Ran, batches_of, distance, gather_ran, make_spec, run_mesh, single, steps_job
from pithtrain import catalog, checkpoint
from pithtrain.build import build
from pithtrain.errors import SpecError
from pithtrain.models.contract import architectures
from pithtrain.ops import attention as ops_attention
from pithtrain.ops import fp8
from pithtrain.ops.dispatch import Lane
from pithtrain.ops.grouped import grouped_linear
from pithtrain.ops.linear import Linears, Weight, add_weight_grad
from pithtrain.ops.permute import order_slots, ordered_sum
from pithtrain.ops.ring import Core, Ring
from pithtrain.ops.symmetric import Blocks, open_peers
from pithtrain.spec import from_dict
from pithtrain.train import train_step
from pithtrain.world import Place, connect
from reference import attention, plain_attention
from test_ring import Case, by_softmax, ran
from test_validation import evaluate_job

pytestmark = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_four = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
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
@pytest.mark.parametrize("family", architectures())
def test_fp32_on_the_gpu_equals_the_cpu(family: str) -> None:
    """The same engine; only the order inside matmuls and reductions differs."""

    def there(device: str) -> dict[str, Any]:
        training = {"sequence_length": 128, "global_batch_size": 8, "device": device, "compute_dtype": "float32"}
        return {"architecture": family, "model": {"max_position_embeddings": 256}, "training": training}

    want, got = alone(there("cpu")), alone(there("cuda"))
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
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch 2.11 while it compiles
@pytest.mark.parametrize("compile_it", [False, True])
def test_a_router_is_fp32_on_tensor_cores(compile_it: bool) -> None:
    """Its product is as near to float64 as that of the fp32 GEMM, its weight gradient nearly; dx is bf16 anyhow."""
    torch.manual_seed(0)
    x, w = torch.randn(1000, 2048, device="cuda").bfloat16(), 0.02 * torch.randn(128, 2048, device="cuda")
    x.requires_grad_()
    taps: dict[str, torch.Tensor] = {"gate": torch.zeros(1000, 128, device="cuda", requires_grad=True)}

    def gate(x: torch.Tensor, tap: torch.Tensor) -> torch.Tensor:
        return Linears({"gate": w}, {"gate": tap})("gate", x)

    y = (torch.compile(gate, fullgraph=True) if compile_it else gate)(x, taps["gate"])
    exact = x.double() @ w.double().t()
    assert (y - exact).abs().max() < 2e-5 < (x @ w.bfloat16().t() - exact).abs().max()
    dy = torch.randn_like(y)
    dx, dtap = torch.autograd.grad(y, (x, taps["gate"]), dy)
    assert torch.equal(dtap, dy)
    assert distance(dx.double().cpu().numpy(), (dy.double() @ w.double()).cpu().numpy()) < 4e-3
    main = torch.full((128, 2048), float("nan"), device="cuda")
    add_weight_grad(main, 0, dy, x.detach())
    add_weight_grad(main, 1, dy, x.detach())
    assert distance(main.double().cpu().numpy(), 2 * (dy.double().t() @ x.double()).detach().cpu().numpy()) < 1e-5


@needs_gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch 2.11 while it compiles
@pytest.mark.parametrize("family", architectures())
def test_compiled_regions_and_recomputation_follow_eager_in_bf16(family: str) -> None:
    """One step of each from the same weights: losses within bf16's rounding, gradients too but where a near tie chose
    another expert."""

    def ran(mode: str, compiled: bool) -> Ran:
        training = {**TRAINING, "device": "cuda", "compute_dtype": "bfloat16"}
        sections = {"activation_checkpoint": {"mode": mode}, "compile": {"enabled": compiled}}
        sections["model"] = {"max_position_embeddings": 256}
        return alone({"architecture": family, "training": training, **sections}, steps=1)

    want = ran("none", compiled=False)
    for mode, compiled in (("none", True), ("selective", False), ("full", False), ("full", True)):
        got = ran(mode, compiled)
        np.testing.assert_allclose(got.losses, want.losses, rtol=2e-3, err_msg=f"{mode} {compiled}")
        np.testing.assert_allclose(got.norms, want.norms, rtol=5e-2, err_msg=f"{mode} {compiled}")


@needs_gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch 2.11 while it compiles
@pytest.mark.parametrize("family", architectures())
def test_nothing_is_compiled_again_whatever_the_documents_on_the_gpu(family: str) -> None:
    """Packed calls go to flash, sequences of one document to cuDNN, whose tensors may lie otherwise: eight steps of
    either after the first, which has both."""
    training = {**TRAINING, "device": "cuda", "compute_dtype": "bfloat16", "global_batch_size": 5}
    sections = {"data": {"document_mask": True}, "compile": {"enabled": True}, "training": training}
    spec = make_spec(architecture=family, model={"max_position_embeddings": 256}, **sections)
    torch._dynamo.reset()
    with single(spec, "cuda") as world:
        engine = build(spec, world)
        train_step(engine, spec, batches_of(spec, engine, 0), 1e-3)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for step in range(1, 9):
                train_step(engine, spec, batches_of(spec, engine, step), 1e-3)


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


# ---- several GPUs of one host ----------------------------------------------------------------------------------------

BATCH_FOR_ALL = {"sequence_length": 128, "global_batch_size": 16}  # of meshes up to pp 4, and up to 8 data ranks
# every mesh that fills the GPUs there are, or two of them
SIZES = {size for size in (2, torch.cuda.device_count()) if size in (2, 4, 8)}
MESHES = [
    (pp, dp, ep) for pp, dp, ep in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8)) if pp * dp * ep in SIZES
]
TABLE = [
    (mesh, transport, dispatch, numbers)
    for mesh in MESHES
    for transport in (("nccl", "symmetric") if mesh[2] > 1 else ("auto",))
    for numbers in ("float32", "bfloat16", "rowwise")
    for dispatch in (("dedup", "plain") if mesh[2] > 1 and numbers == "float32" else ("dedup",))
]


def for_all(numbers: str, **sections: Any) -> dict[str, Any]:
    """`numbers`: a compute dtype, or a recipe of 8 bits."""
    eight = {} if numbers.startswith(("float", "bfloat")) else {"fp8": {"enabled": True, "recipe": numbers}}
    changes = on("cuda", "bfloat16" if eight else numbers, **eight, **sections)
    changes["training"] |= BATCH_FOR_ALL
    return changes


@functools.cache
def one_gpu(numbers: str) -> Ran:
    return alone(for_all(numbers))


@needs_two
@pytest.mark.parametrize(
    ("mesh", "transport", "dispatch", "numbers"),
    TABLE,
    ids=["pp{}dp{}ep{}-{}-{}-{}".format(*mesh, *rest) for mesh, *rest in TABLE],
)
def test_several_gpus_equal_one(
    pool: Pool, mesh: tuple[int, int, int], transport: str, dispatch: str, numbers: str
) -> None:
    """In fp32 with the bounds of the CPU tests; in bf16 and in 8 bits as near as bf16 is to fp32 on one GPU."""
    want = one_gpu(numbers)
    changes = for_all(numbers, moe={"dispatch": dispatch, "transport": transport})
    got = run_mesh(pool, make_spec(*mesh, **changes), 3)
    exact = numbers == "float32"
    if exact:
        np.testing.assert_array_equal(got.counts, want.counts)
    np.testing.assert_allclose(got.losses, want.losses, rtol=1e-5 if exact else 2e-3)
    np.testing.assert_allclose(got.norms, want.norms, rtol=1e-5 if exact else 5e-2)
    far = {name: distance(got.first_grads[name], grad) for name, grad in want.first_grads.items()}
    assert max(far.values()) < (1e-5 if exact else 0.4), far


@needs_gpu
def test_case_073_more_than_2_to_the_31_elements() -> None:
    """310,000 rows of width 7168 (4.4 GB): marker rows at the end come back, through one expert too."""
    rows, width = 310_000, 7168
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    marks = torch.randn(4, width, device="cuda").bfloat16()
    x[-4:] = marks
    local = torch.zeros(rows, 1, dtype=torch.int64, device="cuda")
    local[-2:] = 1
    slots = order_slots(local, torch.ones(rows, 1, device="cuda"), 2, rows)
    assert torch.equal(x[slots.row_R][-4:], marks)
    assert torch.equal(ordered_sum(x, slots.slot_U1q)[-4:], marks)
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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the check calls itself a prototype
            torch.cuda.set_sync_debug_mode("error")
            try:
                result = train_step(engine, spec, batches, 1e-3)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return result.norm.item()


@needs_gpu
@pytest.mark.parametrize("options", [False, True])
def test_a_step_never_waits_for_the_device(options: bool) -> None:
    """Also with bf16 moments and the head's z-loss."""
    fields = make_spec(**on("cuda", "bfloat16")).model_dump(mode="json")
    if options:
        fields["optimizer"]["moments_dtype"], fields["training"]["z_loss_coef"] = "bfloat16", 1e-4
    assert quiet_job(Place(0, 1, 0, "", 1), fields) > 0


@needs_two
@pytest.mark.parametrize("transport", ["nccl", "symmetric"])
def test_a_step_waits_for_counts_alone(pool: Pool, transport: str) -> None:
    """With expert parallelism the host waits on one event per MoE layer, which the check does not count."""
    spec = make_spec(1, 1, 2, **on("cuda", "bfloat16", moe={"transport": transport}))
    pool.run(2, quiet_job, spec.model_dump(mode="json"))


@needs_two
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_step_of_cut_sequences_never_waits_for_the_device(pool: Pool, family: str) -> None:
    """A ring, and edges of windows: what arrives is waited for on the device."""
    training = {**TRAINING, "device": "cuda", "compute_dtype": "bfloat16"}
    sections = {"training": training, "data": {"document_mask": True}, "model": {"max_position_embeddings": 256}}
    pool.run(2, quiet_job, make_spec(cp=2, architecture=family, **sections).model_dump(mode="json"))


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

    start = Ring._start

    def drained_start(*args: Any) -> Any:
        torch.cuda.synchronize()
        for work in start(*args):
            work.wait()
        torch.cuda.synchronize()
        return []

    with pytest.MonkeyPatch.context() as patch:
        if synchronised:
            patch.setattr(Lane, "exchange", drained)
            patch.setattr(Ring, "_start", drained_start)
        try:
            return steps_job(place, fields, 8)
        finally:
            torch.use_deterministic_algorithms(False)


@needs_two
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_overlap_changes_nothing_bitwise(pool: Pool, mode: str) -> None:
    """Streams, freed memory, reused buffers, signals: eight steps with pairs in flight, over NCCL and over copy
    engines, equal eight steps without overlap. What is recomputed is what was."""

    def ran(transport: str, drained: bool = False, mode: str = mode) -> Ran:
        sections = {"moe": {"transport": transport}, "activation_checkpoint": {"mode": mode}}
        spec = make_spec(1, 1, 2, **on("cuda", "bfloat16", **sections)).model_dump(mode="json")
        return gather_ran(pool.run(2, deterministic_job, spec, drained))

    want = ran("nccl", drained=mode == "none")
    runs = {"symmetric": ran("symmetric")}
    if mode == "none":
        runs |= {"nccl": ran("nccl"), "nccl again": ran("nccl"), "drained": ran("symmetric", drained=True)}
    else:
        runs |= {"nothing recomputed": ran("symmetric", mode="none")}
    for name, other in runs.items():
        assert other.losses == want.losses, name
        assert other.norms == want.norms, name
        for key, master in want.masters.items():
            np.testing.assert_array_equal(other.masters[key], master, f"{key}, {name}")


FORWARDS = [
    pytest.param((1, 1, 1), "auto", marks=needs_gpu),
    *(pytest.param((1, 1, 2), transport, marks=needs_two) for transport in ("nccl", "symmetric")),
    pytest.param((2, 1, 1), "auto", marks=needs_two),
]


@pytest.mark.parametrize(("mesh", "transport"), FORWARDS)
def test_an_evaluation_is_the_forward_of_a_step_and_leaves_nothing(
    pool: Pool, mesh: tuple[int, int, int], transport: str
) -> None:
    """One direction's lane alone, message after message, and nothing of the other."""
    spec = make_spec(*mesh, **on("cuda", "bfloat16", moe={"transport": transport}))
    assert pool.run(spec.world_size, evaluate_job, spec.model_dump(mode="json")) == [(True, True)] * spec.world_size


CUTS = [  # pp, dp, ep, cp; chunks of 32 tokens, or 16, beside windows of 3
    pytest.param((1, 1, 1, 2), marks=needs_two),
    *(pytest.param(mesh, marks=needs_four) for mesh in ((1, 1, 1, 4), (1, 1, 2, 2), (2, 1, 1, 2))),
]


@pytest.mark.parametrize("mesh", CUTS, ids=str)
@pytest.mark.parametrize("family", architectures())
def test_overlap_of_cut_sequences_changes_nothing_bitwise(pool: Pool, family: str, mesh: tuple[int, ...]) -> None:
    """Buffers that the next hop overwrites, gradients behind them, edges: eight steps with pairs in flight, documents
    and streams, equal eight steps in which the device is drained around every exchange, and eight more."""

    def ran(drained: bool, mask: bool, mode: str = "none") -> Ran:
        training = {**TRAINING, "device": "cuda", "compute_dtype": "bfloat16"}
        sections = {"data": {"document_mask": mask}, "activation_checkpoint": {"mode": mode}}
        model = {"max_position_embeddings": 256}
        spec = make_spec(*mesh, architecture=family, model=model, training=training, **sections)
        fields = spec.model_dump(mode="json")
        return gather_ran(pool.run(spec.world_size, deterministic_job, fields, drained, timeout_s=300))

    for mask in (True, False):
        want = ran(drained=True, mask=mask)
        for other in (ran(drained=False, mask=mask), ran(drained=False, mask=mask, mode="full")):
            assert (other.losses, other.norms) == (want.losses, want.norms), mask
            for key, master in want.masters.items():
                np.testing.assert_array_equal(other.masters[key], master, f"{key}, {mask}")


@needs_two
def test_signals_and_copies_of_many_sizes_arrive(pool: Pool) -> None:
    """The exchange without the engine: 300 of 0 to 2,000 rows on each direction's lane, both in flight, beside a matrix
    product that fills the device; each row is checked on arrival."""
    assert pool.run(2, copies_job, 300) == [0, 0]


def copies_job(place: Place, rounds: int) -> int:
    """The number of wrong rows."""
    spec = make_spec(1, 1, 2, **on("cuda", "bfloat16"))
    with connect(place, spec.mesh, "cuda", spec.distributed) as world:
        assert world.ep_fwd_group is not None
        peers = open_peers(world.ep_fwd_group, world.device, 4000, (4096,))
        lanes = [Lane(world.ep_fwd_group, world.device, each) for each in peers]
        heavy = torch.ones(4096, 4096, dtype=torch.bfloat16, device=world.device)
        wrong = torch.zeros((), dtype=torch.int64, device=world.device)
        for n in range(rounds):
            flights = []
            for way, lane in enumerate(lanes):
                # rows from rank s to rank d: known to both here, as after META
                count = [[(n * 37 + 611 * s + 997 * d + 389 * way) % 2001 for d in range(2)] for s in range(2)]
                count[n % 2][way] *= n % 7 > 0  # now and then nothing at all
                sent, received = count[place.rank], [count[s][place.rank] for s in range(2)]
                begin = [sum(count[s][d] for s in range(place.rank)) for d in range(2)]
                with lane.after(lane.mark()):
                    # every number is exact in bf16
                    marks = torch.tensor([64 * place.rank + 16 * d + n % 16 for d in range(2)], device=world.device)
                    repeats = torch.tensor(sent, device=world.device)
                    rows = marks.repeat_interleave(repeats, output_size=sum(sent)).bfloat16()[:, None]
                    flights.append(
                        (lane.exchange([rows.expand(-1, 2048).contiguous()], Blocks(sent, received, begin)), received)
                    )
            torch.mm(heavy, heavy)
            for flight, received in flights:
                [rows] = flight.finish()
                marks = torch.tensor([64 * s + 16 * place.rank + n % 16 for s in range(2)], device=world.device)
                want = marks.repeat_interleave(torch.tensor(received, device=world.device), output_size=sum(received))
                wrong += (rows != want[:, None]).any(1).sum()
        return int(wrong.item())


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


# ---- attention -------------------------------------------------------------------------------------------------------

GPT_OSS, MLA, QWEN3 = (
    (64, 8, 64, 64),
    (16, 16, 192, 128),
    (32, 4, 128, 128),
)  # heads of q and of k, widths of k and of v
PATHS = [  # heads, window, sinks, deterministic, whose kernels
    (QWEN3, None, False, False, "cudnn"),
    (QWEN3, None, False, True, "flash"),
    (MLA, None, False, False, "cudnn"),
    (MLA, None, False, True, "flash"),
    (GPT_OSS, None, True, False, "cudnn"),
    (GPT_OSS, None, True, True, "flash"),
    (GPT_OSS, 128, True, False, "flash"),
    (GPT_OSS, 128, False, False, "flash"),
    (GPT_OSS, 128, True, True, "flash"),
    ((4, 2, 20, 12), 7, True, False, "flash"),  # widths that no kernel takes unpadded
]


def far(found: torch.Tensor, want: torch.Tensor) -> float:
    """1 - cos of the angle between the two."""
    return 1 - torch.nn.functional.cosine_similarity(found.double().flatten(), want.flatten(), dim=0).item()


@needs_gpu
@pytest.mark.parametrize(("heads", "window", "sinks", "deterministic", "whose"), PATHS)
def test_attention_kernels_against_float64(
    heads: tuple[int, int, int, int], window: int | None, sinks: bool, deterministic: bool, whose: str
) -> None:
    """bf16 over 760 positions: output and gradients near those of the plain pair in float64, by the kernels that the
    table of ops/attention.py promises; with gradients that arrive in either memory layout; bitwise the same twice where
    torch is asked to be deterministic."""
    hq, hk, dk, dv = heads
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, 760, hq, dk), (2, 760, hk, dk), (2, 760, hk, dv), (2, 760, hq, dv)]
    *given, dout = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes)
    if sinks:
        given.append(2 * torch.randn(hq, generator=generator, device="cuda"))

    def run(dout: torch.Tensor, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
        own = [x.detach().to(dtype or x.dtype).requires_grad_() for x in given]
        out = attention(own[0], own[1], own[2], dk**-0.5, window, *own[3:])
        return (out.detach(), *torch.autograd.grad(out, own, dout.to(out.dtype)))

    wants = run(dout, torch.float64)
    torch.use_deterministic_algorithms(deterministic)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            found = run(dout)
            torch.cuda.synchronize()
        # the same values, heads before positions in memory: no plan of the first call may be taken for them
        other = run(dout.transpose(1, 2).contiguous().transpose(1, 2)) if sinks else found
        again = run(dout)
    finally:
        torch.use_deterministic_algorithms(False)
    kernels = {event.key for event in profile.key_averages()}
    print(sorted(kernel[:60] for kernel in kernels if "cudnn" in kernel or "flash" in kernel))
    marks = {"cudnn": "cudnn", "flash": "flash_fwd"}
    assert [name for name, mark in marks.items() if any(mark in kernel for kernel in kernels)] == [whose], kernels
    for results in (found, other):
        figures = [far(x, want) for x, want in zip(results, wants, strict=True)]
        print(figures)
        assert figures[0] < 1e-5 and max(figures[1:]) < 1e-4, figures
    assert [x.dtype for x in found] == [torch.bfloat16] * 4 + [torch.float32] * sinks
    if deterministic:
        assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))


@needs_gpu
@pytest.mark.parametrize(("window", "sinks"), [(None, True), (4, False), (4, True)])
def test_attention_in_fp32_is_the_plain_pair_on_both(window: int | None, sinks: bool) -> None:
    given = [torch.randn(shape) for shape in [(2, 50, 4, 16), (2, 50, 2, 16), (2, 50, 2, 16), (4,)][: 3 + sinks]]
    found = []
    for device in ("cpu", "cuda"):
        own = [x.to(device).requires_grad_() for x in given]
        out = attention(own[0], own[1], own[2], 0.3, window, *own[3:])
        found.append([x.cpu() for x in (out.detach(), *torch.autograd.grad(out.sum(), own))])
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@needs_gpu
@pytest.mark.parametrize("window", [128, None])
def test_case_136_a_query_sees_exactly_its_window_on_the_gpu(window: int | None) -> None:
    """Value j reaches the queries j .. j + window - 1 and no other."""
    q, k, v = (torch.randn(1, 300, 2, 64, device="cuda").bfloat16() for _ in range(3))
    q.zero_()  # all keys weigh the same
    before = attention(q, k, v, 1.0, window, torch.zeros(2, device="cuda"))
    v[:, 40] += 1000
    moved = (attention(q, k, v, 1.0, window, torch.zeros(2, device="cuda")) != before).all(-1).all(-1)[0]
    assert moved.nonzero().flatten().tolist() == list(range(40, 40 + window if window else 300))


@needs_gpu
@pytest.mark.parametrize(("window", "deterministic"), [(None, False), (None, True), (20, False)])
def test_case_142_query_head_h_reads_key_head_h_over_group_on_the_gpu(window: int | None, deterministic: bool) -> None:
    """Key head g holds the value g alone; with sinks that take no weight the output is g, to rounding."""
    q, k = torch.randn(1, 64, 8, 64, device="cuda").bfloat16(), torch.randn(1, 64, 2, 64, device="cuda").bfloat16()
    v = torch.arange(1, 3, device="cuda").view(1, 1, 2, 1).expand(1, 64, 2, 64).bfloat16().contiguous()
    torch.use_deterministic_algorithms(deterministic)
    try:
        for sinks in (None, torch.full((8,), -50.0, device="cuda")):
            out = attention(q, k, v, 0.1, window, sinks).float()
            want = torch.tensor([1.0] * 4 + [2.0] * 4, device="cuda").view(1, 1, 8, 1)
            assert (out - want).abs().max() < 2e-2
    finally:
        torch.use_deterministic_algorithms(False)


LONG = (0, 1, 300, 700, 701, 759)  # where documents begin: of 1, of 299, of 400 tokens, and of 1 again


@needs_gpu
@pytest.mark.parametrize(
    ("deterministic", "long"), [(False, 4096), (False, 256), (True, 256)], ids=["", "alone", "deterministic"]
)
@pytest.mark.parametrize(
    ("heads", "window", "sinks"),
    [(QWEN3, None, False), (MLA, None, False), (GPT_OSS, None, True), (GPT_OSS, 128, True)],
)
def test_documents_against_one_softmax_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
    heads: tuple[int, int, int, int],
    window: int | None,
    sinks: bool,
    deterministic: bool,
    long: int,
) -> None:
    """bf16 in the flash ops and, alone, documents of `long` tokens in cuDNN's: two sequences of other documents, output
    and gradients near one softmax in float64; a token of one document leaves the outputs of the others bitwise."""
    monkeypatch.setattr(ops_attention, "LONG", long)
    hq, hk, dk, dv = heads
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, 760, hq, dk), (2, 760, hk, dk), (2, 760, hk, dv), (2, 760, hq, dv)]
    *given, dout = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes)
    if sinks:
        given.append(2 * torch.randn(hq, generator=generator, device="cuda"))
    documents = (LONG, (0, 500))

    def run(how: Any, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
        own = [x.detach().to(dtype or x.dtype).requires_grad_() for x in given]
        out = how(own[0], own[1], own[2], dk**-0.5, window, own[3] if sinks else None, documents)
        return (out.detach(), *torch.autograd.grad(out, own, dout.to(out.dtype)))

    wants = run(plain_attention, torch.float64)
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = run(attention)
        figures = [far(x, want) for x, want in zip(found, wants, strict=True)]
        print(figures)
        assert figures[0] < 1e-5 and max(figures[1:]) < 1e-4, figures
        given[1][0, 350] += 1
        moved = (run(attention)[0] != found[0]).flatten(2).any(-1)
        assert moved[0, 300:700].any() and not moved[0, :300].any() and not moved[0, 700:].any() and not moved[1].any()
    finally:
        torch.use_deterministic_algorithms(False)


@needs_gpu
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("documents", [None, (LONG, (0, 500))], ids=["stream", "documents"])
@pytest.mark.parametrize(
    ("heads", "window", "sinks"),
    [(QWEN3, None, False), (MLA, None, False), (GPT_OSS, None, True), (GPT_OSS, 128, True)],
)
def test_a_ring_of_threads_against_one_softmax_on_the_gpu(
    heads: tuple[int, int, int, int], window: int | None, sinks: bool, documents: Any, cp: int
) -> None:
    """The blocks of all ranks by the kernels of this device, with bf16 inputs; hops are queues."""
    hq, hk, dk, dv = heads
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, 752, hq, dk), (2, 752, hk, dk), (2, 752, hk, dv), (2, 752, hq, dv)]
    q, k, v, dout = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes)
    b = 2 * torch.randn(hq, generator=generator, device="cuda")
    if documents is not None:
        documents = (tuple(start for start in LONG if start < 752), (0, 500))

    def core() -> Core:
        return Core(dk**-0.5, hq * dv, window, Weight("sinks", b, torch.zeros_like(b)) if sinks else None)

    case = Case(q, (k, v), dout, core)
    found, weights = ran(case, cp, documents)
    wants, want_weights = by_softmax(case, documents)
    figures = [far(x, y) for x, y in zip((*found, *weights.values()), (*wants, *want_weights.values()), strict=True)]
    print(figures)
    assert figures[0] < 1e-5 and max(figures[1:]) < 1e-4, figures


@needs_two
@pytest.mark.parametrize("family", architectures())
@pytest.mark.parametrize("mask", [True, False], ids=["documents", "stream"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_gpus_share_sequences(pool: Pool, family: str, mask: bool, dtype: str) -> None:
    """Over NCCL: in fp32 with the bounds of the CPU tests, in bf16 near. Bitwise the same twice in fp32."""
    sizes = {"training": {**TRAINING, "device": "cuda", "compute_dtype": dtype}, "data": {"document_mask": mask}}
    sizes |= {"architecture": family, "model": {"max_position_embeddings": 256}}
    want = run_mesh(pool, make_spec(**sizes), 3)
    got, again = (run_mesh(pool, make_spec(cp=2, **sizes), 3) for _ in range(2))
    near = 1e-5 if dtype == "float32" else 2e-3
    np.testing.assert_allclose(got.losses, want.losses, rtol=near)
    np.testing.assert_allclose(got.norms, want.norms, rtol=near if dtype == "float32" else 5e-2)
    if dtype == "float32":
        np.testing.assert_array_equal(got.counts, want.counts)
        assert (again.losses, again.norms) == (got.losses, got.norms)
        for name, grad in want.first_grads.items():
            assert distance(got.first_grads[name], grad) < 1e-5, name


# ---- 8 bits ----------------------------------------------------------------------------------------------------------

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = pytest.mark.skipif(not hopper, reason="needs SM 9.0")
HERE: tuple[fp8.Recipe, ...] = ("blockwise", "rowwise")
GROUPS = (0, 1, 15, 16, 17, 0, 127, 129, 700, 0)


@needs_hopper
@pytest.mark.parametrize("recipe", HERE)
@pytest.mark.parametrize("sizes", [(8192, 4096, 2048), (132, 1408, 2048), (4, 128, 128), (4096, 512, 768)])
def test_dense_products_in_8_bits(recipe: fp8.Recipe, sizes: tuple[int, int, int]) -> None:
    """Near the twin's, which multiplies the same operands in fp32, and within 1e-3 of bf16's; gradients of any size.
    768 is six blocks of 128: their scales are padded to eight."""
    rows, n, k = sizes
    torch.manual_seed(0)
    w = (torch.randn(n, k, device="cuda") * torch.logspace(-3, 0, n, device="cuda")[:, None]).bfloat16()
    eight = fp8.quantize_weight(w, recipe)
    for x, form, whole in (
        (torch.randn(rows, k, device="cuda").bfloat16(), eight.forward, w),
        (1e-6 * torch.randn(rows, n, device="cuda").bfloat16(), eight.dgrad, w.t()),
    ):
        q = fp8.quantize(x, recipe)
        found, narrow = fp8.product(q, form, recipe), q._replace(wide=torch.float32)
        assert found.dtype == torch.bfloat16 and found.any()
        twin, bf16 = far(found, fp8.product(narrow, form, recipe).double()), far(found, (x @ whole.t()).double())
        print(recipe, sizes, twin, bf16)
        assert twin < 2e-5 and 1e-5 < bf16 < 1e-3


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9, reason="needs SM 9.0")
@pytest.mark.parametrize("recipe", HERE)
@pytest.mark.parametrize("counts", [GROUPS, (1, 0), (0, 0, 2, 0), (4096, 1, 4096)])
def test_products_of_experts_in_8_bits(recipe: fp8.Recipe, counts: tuple[int, ...]) -> None:
    """Expert by expert near the twin's; no rows, one row, rows that no tile divides. Rows that the product gathers by
    itself give the bits of rows that lie in order."""
    if problem := fp8.judge_device(recipe, torch.cuda.get_device_capability()[0], "this"):
        pytest.skip(problem.rule)
    torch.manual_seed(0)
    rows, n, k = sum(counts), 1536, 2048
    w = torch.randn(len(counts), n, k, device="cuda").bfloat16()
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    eight = fp8.quantize_weight(w, recipe)
    for width, form, whole in ((k, eight.forward, w.mT), (n, eight.dgrad, w)):
        x = torch.randn(rows, width, device="cuda").bfloat16()
        q = fp8.quantize(x, recipe)
        found = fp8.grouped_product(q, form, ends, recipe)
        twin = fp8.grouped_product(q._replace(wide=torch.float32), form, ends, recipe)
        begin = 0
        for e, end in enumerate(ends.tolist()):
            if end > begin:
                assert far(found[begin:end], twin[begin:end].double()) < 2e-5, (e, end - begin)
                assert far(found[begin:end], (x[begin:end] @ whole[e]).double()) < 1e-3
            begin = end
        row = torch.randperm(rows, device="cuda")
        scattered = fp8.quantize(torch.empty_like(x).index_copy_(0, row, x), recipe)._replace(row_R=row)
        assert torch.equal(fp8.grouped_product(scattered, form, ends, recipe), found)
        assert len(fp8.grouped_product(fp8.quantize(x[:0], recipe), form, torch.zeros_like(ends), recipe)) == 0


@needs_hopper
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("recipe", HERE)
def test_what_a_compiler_makes_of_the_quantiser_is_the_kernel(recipe: fp8.Recipe) -> None:
    """Bit for bit, over all sizes that bf16 has."""
    x = (torch.randn(64, 2048, device="cuda") * torch.logspace(-37, 37, 64, device="cuda")[:, None]).bfloat16()
    x[3], x[5, 7], x[6, 9] = 0, float("inf"), float("nan")
    want = fp8.quantize(x, recipe)
    torch._dynamo.reset()
    found = torch.compile(fp8.quantize, fullgraph=True, dynamic=False)(x, recipe)
    torch.testing.assert_close(found.scale, want.scale, rtol=0, atol=0, equal_nan=True)
    finite = want.scale.isfinite().all(1)
    assert finite.sum() == 62
    assert torch.equal(found.data[finite].view(torch.uint8), want.data[finite].view(torch.uint8))
    assert found.scale.t().is_contiguous() and want.scale.t().is_contiguous()


@needs_hopper
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("recipe", HERE)
@pytest.mark.parametrize("compile_it", [False, True])
def test_a_run_in_8_bits_follows_the_one_in_bf16(recipe: fp8.Recipe, compile_it: bool) -> None:
    torch._dynamo.reset()
    sections = on("cuda", "bfloat16", compile={"enabled": compile_it})
    want, found = alone(sections), alone({**sections, "fp8": {"enabled": True, "recipe": recipe}})
    print(found.losses, want.losses, found.norms, want.norms)
    assert found.losses != want.losses
    np.testing.assert_allclose(found.losses, want.losses, rtol=1e-2)
    np.testing.assert_allclose(found.norms, want.norms, rtol=1e-1)


@needs_hopper
@pytest.mark.parametrize("recipe", HERE)
def test_a_step_in_8_bits_never_waits_for_the_device(recipe: fp8.Recipe) -> None:
    spec = make_spec(**on("cuda", "bfloat16", fp8={"enabled": True, "recipe": recipe}))
    assert quiet_job(Place(0, 1, 0, "", 1), spec.model_dump(mode="json")) > 0


@needs_hopper
@pytest.mark.parametrize("recipe", HERE)
def test_case_088_no_stale_weight_is_used_on_a_gpu(recipe: fp8.Recipe) -> None:
    """Here AdamW's kernel writes the weights, which torch does not count; forms are those of what it wrote."""
    spec = make_spec(**on("cuda", "bfloat16", fp8={"enabled": True, "recipe": recipe}))
    with connect(Place(0, 1, 0, "", 1), spec.mesh, "cuda", spec.distributed) as world:
        engine = build(spec, world)
        for step in range(2):
            train_step(engine, spec, batches_of(spec, engine, step), 0.1)
            engine.zero.wait_for_weights()
            weights = [one.weight for one in engine.zero.sharded.values() if one.info.fp8]
            assert len(weights) > 5
            for weight in weights:
                for mine, now in zip(weight.operand()[1:], fp8.quantize_weight(weight.data, recipe)[1:], strict=True):
                    assert isinstance(mine, fp8.Fp8) and isinstance(now, fp8.Fp8)
                    assert torch.equal(mine.data.view(torch.uint8), now.data.view(torch.uint8)), weight.name
                    assert torch.equal(mine.scale, now.scale), weight.name


@needs_hopper
def test_a_recipe_for_another_device_is_refused_at_the_start() -> None:
    spec = make_spec(**on("cuda", "bfloat16", fp8={"enabled": True, "recipe": "mxfp8"}))
    with connect(Place(0, 1, 0, "", 1), spec.mesh, "cuda", spec.distributed) as world:  # noqa: SIM117
        with pytest.raises(SpecError, match=r"fp8.recipe = 'mxfp8'.*use blockwise or rowwise"):
            build(spec, world)


needs_blackwell = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 10, reason="needs SM 10.0"
)


@needs_blackwell
def test_mxfp8_products_on_blackwell() -> None:
    """Never run so far: dense, and experts whose scales begin a tile each."""
    w, x = torch.randn(3, 512, 256, device="cuda").bfloat16(), torch.randn(400, 256, device="cuda").bfloat16()
    ends = torch.tensor([130, 130, 400], dtype=torch.int32, device="cuda")
    eight, q = fp8.quantize_weight(w, "mxfp8"), fp8.quantize(x, "mxfp8")
    found = fp8.grouped_product(q, eight.forward, ends, "mxfp8")
    twin = fp8.grouped_product(q._replace(wide=torch.float32), eight.forward, ends, "mxfp8")
    assert far(found, twin.double()) < 2e-5
    one = eight.forward._replace(data=eight.forward.data[0], scale=eight.forward.scale[0])
    assert far(fp8.product(q, one, "mxfp8"), fp8.product(q._replace(wide=torch.float32), one, "mxfp8").double()) < 2e-5
