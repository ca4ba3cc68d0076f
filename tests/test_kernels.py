"""Each Triton kernel against its plain twin: in Triton's interpreter on a CPU, compiled on a GPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from harness import make_spec, single, variants
from pithtrain.build import build
from pithtrain.ops.attention import merge, sinks_grad
from pithtrain.ops.cross_entropy import IGNORE, plain_loss_and_grad
from pithtrain.ops.grouped import plain_grouped_sum, plain_grouped_weight_grad
from pithtrain.ops.permute import SlotBias, plain_order_slots, plain_ordered_sum, plain_plan_rows, unpack
from pithtrain.ops.rounding import rounding_keys, store_moments
from pithtrain.ops.swiglu import SILU, Glu, biased, weighted_swiglu, weighted_swiglu_backward

# the interpreter makes Python numbers of arrays with one element
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
kernels = pytest.importorskip("pithtrain.ops.kernels", reason="needs triton")
permute_kernels = pytest.importorskip("pithtrain.ops.permute_kernels", reason="needs triton")
fp8_kernels = pytest.importorskip("pithtrain.ops.fp8_kernels", reason="needs triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GLUS = {"silu": SILU, "clamped": Glu(1.702, 0.5, 1.0)}
SIZES = [(8, 24, 16), (5, 40, 24), (3, 1, 8), (4, 0, 8)]  # experts, rows, width; some experts get none


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype).to(DEVICE)


def slots_of(experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """(expert of each row in ascending order, end offsets), skewed: the last expert never gets any."""
    ids = (torch.rand(rows) ** 2 * (experts - 1)).long().sort().values
    return ids.to(DEVICE), torch.bincount(ids, minlength=experts).cumsum(0).int().to(DEVICE)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_and_blackwell() -> None:
    """In a process of its own, where the kernels are not the interpreter's."""
    script = Path(__file__).with_name("compile_kernels.py")
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    compiled = {line.split()[0] for line in ran.stdout.splitlines()}
    texts = [Path(module.__file__).read_text() for module in (kernels, permute_kernels, fp8_kernels)]
    assert compiled == set(re.findall(r"^ +(_\w+)\[", "\n".join(texts), re.MULTILINE))


@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize(
    ("tokens", "num_ranks", "each", "k"),
    [(300, 2, 8, 8), (5, 4, 2, 3), (129, 3, 1, 1), (1, 2, 16, 5), (70, 40, 1, 6), (0, 2, 2, 2)],
)
def test_rows_and_slots_are_exactly_the_twins(
    tokens: int, num_ranks: int, each: int, k: int, dedup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that go to every rank, then the slots of one rank's rows, from its records where they lie. Skewed: rank
    0 gets more than others, and with many ranks some get nothing. More blocks than one scan takes."""
    monkeypatch.setattr(permute_kernels, "SCANNED", 2)
    score = torch.rand(tokens, num_ranks * each) * torch.linspace(1, 0.3, num_ranks * each)
    ids, weights = score.topk(k).indices.to(DEVICE), torch.rand(tokens, k, device=DEVICE)
    want = plain_plan_rows(ids, weights, num_ranks, each, dedup)
    got = permute_kernels.plan_rows(ids.t().contiguous().t(), weights, num_ranks, each, dedup)
    total = int(want.counts_G2[:, 0].sum())
    for name in ("row_TK", "col_TK", "row_TGC", "counts_G2"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert torch.equal(got.token_U[:total], want.token_U[:total])
    assert torch.equal(got.records_Ur[:total], want.records_Ur[:total])
    for rank in {0, num_ranks // 2, num_ranks - 1}:
        first = int(want.counts_G2[:rank, 0].sum())
        count, num_slots = want.counts_G2[rank].tolist()
        local, bits = unpack(got.records_Ur[first : first + count], torch.float32)
        mine = permute_kernels.order_slots(local, bits, each, num_slots)
        for name, value in vars(plain_order_slots(local, bits, each, num_slots)).items():
            assert getattr(mine, name).dtype == value.dtype and torch.equal(getattr(mine, name), value), name


def test_slots_where_no_rank_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router's ids as they come: int64, no padding, more experts than rows."""
    ids, weights = torch.rand(200, 60).topk(6).indices.to(DEVICE), torch.rand(200, 6, device=DEVICE)
    monkeypatch.setattr(permute_kernels, "SCANNED", 2)  # and more blocks than one scan takes
    for rows in (200, 3, 0):
        mine = permute_kernels.order_slots(ids[:rows], weights[:rows].t().contiguous().t(), 60, 6 * rows)
        for name, value in vars(plain_order_slots(ids[:rows], weights[:rows], 60, 6 * rows)).items():
            assert torch.equal(getattr(mine, name), value), name


@pytest.mark.parametrize("width", [16, 100, 2050])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("more", [0, 1, 2])
def test_sum_over_slots_is_bitwise_the_twins(width: int, with_bias: bool, groups: int, more: int) -> None:
    """Some rows get nothing, some slots are padding; values of padding are never read, NaN or not."""
    local = torch.randint(-1, 5, (13, 6), device=DEVICE)
    local[4] = -1
    slots = plain_order_slots(local, torch.ones(local.shape, device=DEVICE), 5, int((local >= 0).sum()))
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter cuts to bf16, the device rounds
    values = rand(len(slots.row_R), width, dtype=dtype)
    bias = SlotBias(rand(5, width, dtype=torch.float32), slots.expert_R, torch.rand(len(values), device=DEVICE))
    index = slots.slot_U1q.view(13, groups, -1) if groups > 1 else slots.slot_U1q
    plus = [rand(13, width, dtype=dtype) for _ in range(more)]
    want = plain_ordered_sum(values, index, bias if with_bias else None, plus)
    got = kernels.ordered_sum(values, index, bias if with_bias else None, plus)
    if with_bias:
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize("glu", GLUS.values(), ids=GLUS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("experts", "rows", "width"), [*SIZES, (3, 9, 1100)])
def test_gated_activation_and_its_gradient(experts: int, rows: int, width: int, with_bias: bool, glu: Glu) -> None:
    expert, _ = slots_of(experts, rows)
    gate_up, da, w = rand(rows, 2 * width), rand(rows, width), torch.rand(rows, device=DEVICE)
    bias = rand(experts, 2 * width, dtype=torch.float32) if with_bias else None
    options = (glu.alpha, glu.limit, glu.offset, bias, expert)
    want = weighted_swiglu(biased(gate_up, bias, expert), w, glu, gate_up.dtype)
    torch.testing.assert_close(kernels.glu(gate_up, w, *options), want)
    got = kernels.glu_backward(da, gate_up, w, *options)
    want = weighted_swiglu_backward(da, biased(gate_up, bias, expert), w, glu)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got[2], kernels.glu(gate_up, w, *options))


@pytest.mark.parametrize("z_coef", [0.0, 0.1])
@pytest.mark.parametrize("vocab", [1, 7, 1000, 4097, 50257])
def test_cross_entropy_at_every_row_and_at_the_target(vocab: int, z_coef: float) -> None:
    """Ignored tokens, equal logits, huge logits, targets at block edges; the gradient of each row has the direction of
    float64's, and at the target column the same value: a race there passed unnoticed in the field."""
    tokens = 64
    logits = (3 * torch.randn(tokens, vocab)).to(DEVICE)
    labels = torch.randint(vocab, (tokens,), device=DEVICE)
    labels[:4] = torch.tensor([0, vocab - 1, min(4095, vocab - 1), min(4096, vocab - 1)], device=DEVICE)
    logits[4], logits[5] = 0.5, 1e4 * torch.randn(vocab, device=DEVICE)
    labels[6:9] = IGNORE
    scale = torch.tensor(0.25, device=DEVICE)
    loss, z, grad = kernels.cross_entropy(logits, labels, scale, torch.float32, z_coef)
    wide = logits.double().requires_grad_()
    want = torch.nn.functional.cross_entropy(wide, labels, ignore_index=IGNORE, reduction="sum") * 0.25
    want_z = 0.25 * (z_coef > 0) * wide.logsumexp(1)[labels != IGNORE].square().sum()
    (want_grad,) = torch.autograd.grad(want + z_coef * want_z, wide)
    torch.testing.assert_close(z.double(), want_z.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-5, atol=1e-5)
    assert torch.equal(grad[6:9], torch.zeros_like(grad[6:9]))
    valid = labels != IGNORE
    if vocab > 1:
        cosine = torch.nn.functional.cosine_similarity(grad[valid].double(), want_grad[valid])
        assert (cosine[want_grad[valid].norm(dim=1) > 1e-6] > 0.99999).all()
    at = labels[valid, None]
    torch.testing.assert_close(grad[valid].gather(1, at).double(), want_grad[valid].gather(1, at), rtol=1e-4, atol=1e-6)
    plain_loss, plain_z, plain = plain_loss_and_grad(logits.clone(), labels, scale, z_coef)
    torch.testing.assert_close(z, plain_z)
    torch.testing.assert_close(loss, plain_loss)
    torch.testing.assert_close(grad, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("glu", GLUS.values(), ids=GLUS)
def test_a_nan_gate_shows(glu: Glu) -> None:
    gate_up, w, da = rand(4, 16), torch.rand(4, device=DEVICE), rand(4, 8)
    gate_up[1, 3] = gate_up[2, 11] = float("nan")
    options = (glu.alpha, glu.limit, glu.offset, None, torch.zeros(4, dtype=torch.int64, device=DEVICE))
    want = (weighted_swiglu(gate_up, w, glu), *weighted_swiglu_backward(da, gate_up, w, glu))
    got = (kernels.glu(gate_up, w, *options), *kernels.glu_backward(da, gate_up, w, *options))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-2, atol=1e-2)


def test_a_selection_bias_is_published_where_a_kernel_updates() -> None:
    training = {"compute_dtype": "bfloat16"}
    spec = make_spec(architecture="deepseek_v2", model=variants("deepseek_v2")["V3"], training=training)
    with single(spec, DEVICE) as world:
        engine = build(spec, world)
        engine.zero._kernels = True  # pyright: ignore[reportPrivateUsage]
        counts_LE = torch.arange(engine.counts_LE.numel(), device=DEVICE).view_as(engine.counts_LE)
        engine.zero.update(engine.optimizer, 1e-2, torch.tensor(1.0, device=DEVICE), 1.0, counts_LE, 0.01)
        engine.zero.wait_for_weights()
        biases = [one for one in engine.zero.sharded.values() if not one.info.trained]
        assert biases and all(one.master.any() and torch.equal(one.weight.data, one.master) for one in biases)


def test_a_label_beyond_the_vocabulary_shows() -> None:
    """The twin raises; a kernel cannot, so the loss is NaN and the run stops. What lies behind the row is not read."""
    labels, scale = torch.tensor([3, 7], device=DEVICE), torch.tensor(1.0, device=DEVICE)
    loss, _, grad = kernels.cross_entropy(torch.zeros(2, 7, device=DEVICE), labels, scale, torch.float32)
    assert loss.isnan() and grad[0].isfinite().all()


@pytest.mark.parametrize(("experts", "rows", "width"), [*SIZES, (3, 200, 150)])
@pytest.mark.parametrize("beta", [0, 1])
@pytest.mark.parametrize("weighted", [False, True])
def test_weight_and_bias_gradients_of_experts(experts: int, rows: int, width: int, beta: int, weighted: bool) -> None:
    """Ragged groups, empty ones, widths that no tile divides; what is there already stays, or is not read."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # the interpreter multiplies bf16 as integers
    _, ends = slots_of(experts, rows)
    dy, x = rand(rows, 48, dtype=dtype), rand(rows, width, dtype=dtype)
    main, bias = rand(experts, 48, width, dtype=torch.float32), rand(experts, 48, dtype=torch.float32)
    want, want_bias = main.clone(), bias.clone()
    weight = torch.rand(rows, device=DEVICE) if weighted else None
    plain_grouped_weight_grad(want, beta, dy, x, ends)
    plain_grouped_sum(want_bias, beta, dy, weight, ends)
    if not beta:
        main.fill_(float("nan")), bias.fill_(float("nan"))
    kernels.add_grouped_weight_grad(main, beta, dy, x, ends)
    kernels.add_grouped_sum(bias, beta, dy, weight, ends)
    torch.testing.assert_close(main, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bias, want_bias, rtol=1e-4, atol=1e-4)


def test_a_sum_of_rows_by_index_is_that_of_a_copy() -> None:
    """Bitwise; a row that no slot takes is not read."""
    _, ends = slots_of(5, 70)
    row, values, weight = torch.randint(1, 9, (70,)).to(DEVICE), rand(9, 48), torch.rand(70, device=DEVICE)
    values[0] = float("nan")
    found, want, twin = (torch.zeros(5, 48, device=DEVICE) for _ in range(3))
    kernels.add_grouped_sum(found, 0, values, weight, ends, row)
    kernels.add_grouped_sum(want, 0, values[row], weight, ends)
    plain_grouped_sum(twin, 0, values, weight, ends, row)
    assert torch.equal(found, want) and found.isfinite().all()
    torch.testing.assert_close(found, twin, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("skipped", [0.0, 1.0])
@pytest.mark.parametrize("size", [1, 1000, 2500])
def test_adamw_is_torchs(size: int, skipped: float) -> None:
    """Three steps with clip and decay; a skipped one leaves every number."""
    p = torch.randn(size, device=DEVICE)
    mine = [p.clone(), torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p, dtype=torch.bfloat16)]
    theirs = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 4):
        grad = torch.randn(size, device=DEVICE)
        theirs.grad = grad / 2
        if not skipped:
            optimizer.step()
        scalars = [torch.tensor(x, device=DEVICE) for x in (float(step), 2.0, skipped)]
        kernels.adamw(*mine[:3], grad, mine[3], *scalars, 0.01, (0.9, 0.95), 1e-8, 0.1)
    torch.testing.assert_close(mine[0], theirs.detach(), rtol=1e-5, atol=1e-6)
    if skipped:
        assert torch.equal(mine[0], p) and not any(x.any() for x in mine[1:])
    else:
        torch.testing.assert_close(mine[3], mine[0].bfloat16(), rtol=2**-7, atol=0)  # the interpreter rounds down
        assert DEVICE == "cpu" or torch.equal(mine[3], mine[0].bfloat16())


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2500])
def test_muons_passes_are_those_of_the_twin(size: int, moments: torch.dtype) -> None:
    """Momentum, what is ahead of it, and the step along a direction; a skipped step changes nothing, whatever the
    gradient."""
    keys, first = rounding_keys(5, "w"), (1 << 32) - 700
    kept = torch.randn(size, device=DEVICE).to(moments)
    twin, ahead = kept.clone(), torch.zeros(size, dtype=torch.bfloat16, device=DEVICE)
    master, weight = torch.randn(size, device=DEVICE), torch.zeros(size, dtype=torch.bfloat16, device=DEVICE)
    on, off, clip = (torch.tensor(x, device=DEVICE) for x in (0.0, 1.0, 2.0))
    for update in (1.0, 2.0):
        grad, step = torch.randn(size, device=DEVICE), torch.tensor(update, device=DEVICE)
        kernels.look_ahead(kept, grad, ahead, step, clip, on, 0.9, keys, first)
        wide = twin.float().lerp(grad / 2, 0.1)
        if moments == torch.bfloat16:
            store_moments([twin], [wide], keys, step, first)
        else:
            twin = wide
        assert (kept - twin).abs().max() <= (1e-6 if moments == torch.float32 else 2**-8 * twin.abs().max())
        assert (kept != twin).float().mean() < 0.01 or moments == torch.float32
        torch.testing.assert_close(ahead.float(), (grad / 2).lerp(wide, 0.9), rtol=2**-7, atol=1e-6)
    want = master * (1 - 1e-2 * 0.3) - 1e-2 * 4.0 * ahead.float()
    kernels.move(master, ahead, weight, on, 1e-2, 4.0, 0.3)
    torch.testing.assert_close(master, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight.float(), want, rtol=2**-7, atol=1e-6)
    before = kept.clone(), master.clone(), weight.clone()
    kernels.look_ahead(kept, torch.full_like(grad, torch.nan), ahead, step, clip, off, 0.9, keys, first)
    kernels.move(master, ahead, weight, off, 1e-2, 4.0, 0.3)
    assert all(map(torch.equal, (kept, master, weight), before)) and ahead.isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # inf / inf, in numpy
@pytest.mark.parametrize("first", [0, (1 << 32) - 700, 5 << 32])
@pytest.mark.parametrize("update", [1, 2, 70000])
def test_moments_are_rounded_to_bf16_as_by_the_twin(first: int, update: int) -> None:
    """Bit for bit: the first update with these betas makes g / 2 and g^2 / 4, in which fp32 rounds only g^2. What
    is not finite goes through; a skipped update writes nothing."""
    grad = torch.randn(2500, device=DEVICE) * torch.logspace(-15, 15, 2500, device=DEVICE)
    grad[::500] = torch.tensor([0.0, float("inf"), -float("inf"), float("nan"), 1.0], device=DEVICE)
    # NaNs that a carry would turn into numbers
    grad[1:4] = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32).to(DEVICE)
    keys = rounding_keys(update, "w")
    step, one, zero = (torch.tensor(float(x), device=DEVICE) for x in (update, 1, 0))

    def blank() -> tuple[Tensor, Tensor]:
        return torch.zeros_like(grad, dtype=torch.bfloat16), torch.zeros_like(grad, dtype=torch.bfloat16)

    want, got = blank(), blank()
    store_moments(want, (grad / 2, grad * grad / 4), keys, step, first)
    for skipped in (one, zero):
        assert not got[0].any() and not got[1].any()
        master, weight = torch.zeros_like(grad), blank()[0]
        kernels.adamw(master, *got, grad, weight, step, one, skipped, 0.01, (0.5, 0.75), 1e-8, 0.1, keys, first)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    assert (want[0] != (grad / 2).bfloat16()).float().mean() > 0.2


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.slow
def test_an_update_by_the_kernel_is_that_of_the_optimizer(kind: str, moments: str) -> None:
    """Three steps of a whole engine, the second one skipped: masters, moments and counters; the weights follow. A last
    bit of fp32 turns one rounding of some ten thousand. Gradients are random, so Muon's matrices are of full rank: a
    last bit of bf16 in the momentum stays small in the direction."""
    training = {"compute_dtype": "bfloat16"}
    optimizer = {"lr": 1e-3, "moments_dtype": moments, "type": kind}
    spec = make_spec(
        architecture="deepseek_v2", model=variants("deepseek_v2")["V3"], training=training, optimizer=optimizer
    )
    engines = []
    for by_kernel in (False, True):
        with single(spec, DEVICE) as world:
            engine = build(spec, world)
            engine.zero._kernels = by_kernel  # pyright: ignore[reportPrivateUsage]
            for step in range(3):
                torch.manual_seed(step)
                for one in engine.zero.sharded.values():
                    one.weight.main_grad.copy_(torch.randn(one.weight.main_grad.shape))
                norm = torch.tensor(float("nan") if step == 1 else 2.0, device=DEVICE)
                engine.zero.update(engine.optimizer, 1e-2, norm, 1.0, engine.counts_LE, 0.0)
            engine.zero.wait_for_weights()
            engines.append(engine)
    want, got = (engine.zero for engine in engines)
    assert got.updates == want.updates == 2
    turned, total = 0, sum(one.exp_avg.numel() for one in want.sharded.values())
    for name, one in want.sharded.items():
        mine = got.sharded[name]
        # a turned rounding of a moment moves the next step's master by lr times its size
        atol = 1e-3 if one.by_muon else 1e-6 if moments == "float32" else 1e-4
        torch.testing.assert_close(mine.master, one.master, rtol=1e-5, atol=atol)
        for key in ("exp_avg", "exp_avg_sq"):
            if moments == "float32":
                torch.testing.assert_close(getattr(mine, key), getattr(one, key), rtol=1e-5, atol=1e-6, msg=name)
            else:
                turned += int((getattr(mine, key) != getattr(one, key)).sum())
                # what the step before has rounded the other way may meet a gradient of the other sign
                spacing = 2**-7 * max(1e-4, getattr(one, key).abs().max().item()) if getattr(one, key).numel() else 0.0
                torch.testing.assert_close(getattr(mine, key), getattr(one, key), rtol=2**-7, atol=spacing, msg=name)
        torch.testing.assert_close(mine.weight.data, one.weight.data, rtol=2**-7, atol=max(atol, 1e-4))
    assert turned <= total // 1000


@pytest.mark.parametrize(("heads", "width"), [(4, 16), (3, 24), (64, 128)])
@pytest.mark.parametrize("packed", [False, True])
def test_merging_blocks_of_attention(heads: int, width: int, packed: bool) -> None:
    """Into some positions of some sequences, from outputs in either memory layout; a block that a row does not see (lse
    -inf) leaves it."""
    acc, lse = rand(3, 10, heads, width, dtype=torch.float32), rand(3, heads, 10, dtype=torch.float32)
    out, part = rand(2, 5, heads, width, dtype=torch.float32), rand(2, heads, 5, dtype=torch.float32)
    part[0, 0, 2] = float("-inf")
    if packed:  # as the flash ops give lse of documents, and cuDNN its output
        part, out = part.transpose(0, 1).contiguous().transpose(0, 1), out.transpose(1, 2).contiguous().transpose(1, 2)
    want_acc, want_lse = acc.double(), lse.double()
    merge(want_acc[1:, 4:9], want_lse[1:, :, 4:9], out.double(), part.double())
    kernels.merge(acc[1:, 4:9], lse[1:, :, 4:9], out, part)
    torch.testing.assert_close(acc.double(), want_acc, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "width"), [(4, 8), (5, 48), (64, 128)])
@pytest.mark.parametrize("packed", [False, True])
def test_sinks_and_their_gradient(heads: int, width: int, packed: bool) -> None:
    """One more key without a value; 17 tokens a sequence, so that programs cross the end of one and the last is not
    full. lse as the flash ops give it too."""
    acc, sinks = rand(3, 17, heads, width, dtype=torch.float32), rand(heads, dtype=torch.float32)
    lse = rand(*((heads, 3) if packed else (3, heads)), 17, dtype=torch.float32)
    lse = lse.transpose(0, 1) if packed else lse
    part, dout = sinks[:, None].expand(3, -1, 17), rand(*acc.shape, dtype=torch.float32)
    want, want_lse = acc.double(), lse.double()
    merge(want, want_lse, None, part.double())
    kernels.merge(acc, lse, None, part)
    torch.testing.assert_close(acc.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    want_grad = sinks_grad(dout.double(), want, want_lse, sinks.double())
    torch.testing.assert_close(kernels.sinks_grad(dout, acc, lse, sinks).double(), want_grad, rtol=1e-4, atol=1e-4)
