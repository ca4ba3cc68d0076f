"""Attention: the pair with its sink identity, against autograd through a softmax with an explicit sink column."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from pithtrain.errors import RunFailed
from pithtrain.ops import attention as ops_attention
from pithtrain.ops.attention import PIECES, PLAIN, Sight, require_cudnn
from pithtrain.ops.parts import Part
from reference import assert_near, attention, gradients, leaves, plain_attention, random


def inputs(
    heads: tuple[int, int], widths: tuple[int, int], length: int, dtype: torch.dtype, batch: int = 2
) -> tuple[Tensor, ...]:
    """q, k, v, sinks."""
    return (
        random(0, batch, length, heads[0], widths[0], dtype=dtype),
        random(1, batch, length, heads[1], widths[0], dtype=dtype),
        random(2, batch, length, heads[1], widths[1], dtype=dtype),
        random(3, heads[0], dtype=torch.promote_types(dtype, torch.float32), scale=2.0),
    )


def assert_equal_to_the_oracle(given: tuple[Tensor, ...], window: int | None, tolerance: float) -> None:
    """Forward and every gradient; `given` is q, k, v and, or not, sinks."""
    q, k, v, *sinks = wide = leaves(*given)
    want = plain_attention(q, k, v, 0.3, window, *sinks)
    dout = random(4, *want.shape, dtype=given[0].dtype)
    wants = gradients((want * dout.double()).sum(), wide)
    q, k, v, *sinks = own = tuple(x.clone().requires_grad_() for x in given)
    out = attention(q, k, v, 0.3, window, *sinks)
    assert out.dtype == q.dtype
    assert_near(out, want, tolerance)
    for x, found, expected in zip(own, torch.autograd.grad(out, own, dout), wants, strict=True):
        assert found.dtype == x.dtype
        if window == 1 and len(given) == 3 and x is not v:  # one key, weight 1: the scores have no gradient
            assert max(found.abs().max(), expected.abs().max()) < 1e-13
        else:
            assert_near(found, expected, tolerance)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 1, 4, 12, 13, 20])
@pytest.mark.parametrize(
    ("heads", "widths"), [((4, 4), (6, 6)), ((4, 2), (6, 6)), ((6, 1), (6, 6)), ((4, 2), (6, 3)), ((3, 3), (4, 7))]
)
def test_equal_to_the_oracle(heads: tuple[int, int], widths: tuple[int, int], window: int | None, sinks: bool) -> None:
    """Over 13 positions: grouped and single key heads, values of another width, windows up to the length and above."""
    assert_equal_to_the_oracle(inputs(heads, widths, 13, torch.float64)[: 3 + sinks], window, 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 4])
def test_lower_precision(window: int | None, sinks: bool, dtype: torch.dtype, tolerance: float) -> None:
    assert_equal_to_the_oracle(inputs((4, 2), (6, 3), 13, dtype)[: 3 + sinks], window, tolerance)


def test_equal_to_loops() -> None:
    """The oracle itself, by scalars."""
    q, k, v, sinks = inputs((4, 2), (6, 3), 5, torch.float64)
    out = plain_attention(q, k, v, 0.3, 3, sinks)
    for b in range(2):
        for h in range(4):
            for i in range(5):
                seen = range(max(0, i - 2), i + 1)
                powers = [math.exp(0.3 * (q[b, i, h] @ k[b, j, h // 2]).item()) for j in seen]
                total = sum(powers) + math.exp(sinks[h].item())
                want = sum((p / total * v[b, j, h // 2] for p, j in zip(powers, seen, strict=True)), torch.zeros(3))
                assert_near(out[b, i, h], want, 1e-13)


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_equal_to_transformers(window: int | None, sunk: bool) -> None:
    """The eager attention of its gpt_oss, which wants [B, heads, S, D] and an additive mask; a sink of -inf is none."""
    q, k, v, sinks = inputs((4, 2), (6, 6), 9, torch.float64)
    back = torch.arange(9)[:, None] - torch.arange(9)
    hidden = (back < 0) | (back >= (window or 9))
    mask = torch.zeros(9, 9, dtype=torch.float64).masked_fill(hidden, float("-inf"))[None, None]
    module = SimpleNamespace(
        num_key_value_groups=2, sinks=sinks if sunk else torch.full_like(sinks, float("-inf")), training=False
    )
    theirs, _ = eager_attention_forward(module, *(x.transpose(1, 2) for x in (q, k, v)), mask, 0.4)  # type: ignore[arg-type]
    assert_near(attention(q, k, v, 0.4, window, sinks if sunk else None), theirs, 1e-13)


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("window", [None, 2])
def test_gradcheck(window: int | None, sunk: bool) -> None:
    given = leaves(*inputs((2, 1), (4, 3), 4, torch.float64, batch=1)[: 4 if sunk else 3])
    assert torch.autograd.gradcheck(lambda q, k, v, *sinks: attention(q, k, v, 0.5, window, *sinks), given)


def moved(change: Callable[[Tensor, Tensor, Tensor], None], window: int | None, sinks: Tensor | None) -> Tensor:
    """Which positions of the output change, bitwise, by `change`: bool [S, heads]."""
    q, k, v, _ = inputs((8, 2), (4, 4), 8, torch.float32, batch=1)
    before = attention(q, k, v, 0.5, window, sinks)
    change(q, k, v)
    return (attention(q, k, v, 0.5, window, sinks) != before).any(-1)[0]


@pytest.mark.parametrize("sinks", [None, torch.zeros(8)], ids=["", "sinks"])
@pytest.mark.parametrize("window", [1, 4, 8, None])
def test_case_136_a_query_sees_exactly_its_window(window: int | None, sinks: Tensor | None) -> None:
    """Key and value j reach the queries j .. j + window - 1 and no other."""
    for j in range(8):

        def change(q: Tensor, k: Tensor, v: Tensor, j: int = j) -> None:
            k[:, j] *= 2
            v[:, j] += 1

        seen = moved(change, window, sinks)
        want = torch.zeros(8, dtype=torch.bool)
        want[j : j + (window or 8)] = True
        assert torch.equal(seen, want[:, None].expand(8, 8)), j


def test_case_142_query_head_h_reads_key_head_h_over_group() -> None:
    """Queries, keys and values apart: the scores and the sum over values have their own idea of groups."""
    for head in range(8):

        def change_q(q: Tensor, *kv: Tensor, head: int = head) -> None:
            q[:, :, head] *= 2

        assert moved(change_q, None, None).any(0).tolist() == [h == head for h in range(8)]
    for kv_head in range(2):
        for which in range(2):

            def change(q: Tensor, *kv: Tensor, kv_head: int = kv_head, which: int = which) -> None:
                kv[which][:, :, kv_head] *= 2

            heads = moved(change, None, None).any(0)
            assert heads.tolist() == [h // 4 == kv_head for h in range(8)]


@pytest.mark.parametrize("window", [None, 3])
def test_case_143_the_sink_takes_weight_and_has_its_gradient(window: int | None) -> None:
    """With values of one the output is the sum of the weights: below 1, by what the sink takes. Its gradient against
    finite differences."""
    q, k, v, sinks = inputs((4, 2), (6, 6), 9, torch.float64)
    ones = torch.ones_like(v)
    assert torch.allclose(attention(q, k, ones, 0.4, window), torch.ones(()).double())
    total = attention(q, k, ones, 0.4, window, sinks)
    assert (total < 1).all() and (total > 0).all()
    assert torch.equal(total.argmin(2)[:, 0], sinks.argmax().expand(2, 6))  # the first query sees itself and the sink
    dout, b = random(4, 2, 9, 4, 6), sinks.clone().requires_grad_()
    (found,) = torch.autograd.grad(attention(q, k, v, 0.4, window, b), b, dout)
    for h in range(4):
        step = torch.zeros_like(sinks)
        step[h] = 1e-5
        high, low = (((attention(q, k, v, 0.4, window, sinks + s) * dout).sum()) for s in (step, -step))
        assert found[h].item() == pytest.approx(((high - low) / 2e-5).item(), rel=1e-8)


@pytest.mark.parametrize("sunk", [False, True])
def test_case_144_a_row_that_sees_nothing_is_zero(sunk: bool) -> None:
    """No model's window is empty; a pair's may be: zeros, lse -inf, no gradient, no NaN."""
    q, k, v, sinks = inputs((4, 2), (6, 3), 5, torch.float32)
    out, lse = PLAIN.forward(q, k, v, 0.5, Sight(window=0))
    assert not out.any() and (lse == float("-inf")).all()
    own = (q, k, v, sinks) if sunk else (q, k, v)
    for x in own:
        x.requires_grad_()
    out = attention(q, k, v, 0.5, 0, sinks if sunk else None)
    assert torch.equal(out, torch.zeros(2, 5, 4, 3))
    for grad in torch.autograd.grad(out, own, torch.ones_like(out)):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_long_documents_one_by_one_are_the_packed_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With plain kernels in the places of cuDNN's and flash's: what is cut, lengthened and put back is what each
    document sees. Two long ones side by side, one at the end of all, short ones before, between and behind."""
    lengths: list[tuple[bool, int]] = []

    def seen(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        lengths.append((rest[-1].packed is None, q.shape[1]))
        return PLAIN.forward(q, *rest)

    monkeypatch.setattr(ops_attention, "LONG", 40)
    for name in ("_cudnn", "_flash"):
        monkeypatch.setattr(ops_attention, f"{name}_forward", seen)
        monkeypatch.setattr(ops_attention, f"{name}_backward", PLAIN.backward)
    q, k, v, _ = inputs((4, 2), (6, 3), 120, torch.float64)
    part = Part(2, 120, torch.device("cpu"), documents=[(0, 3, 4, 45, 100), (0, 10, 75)])
    [[call]] = part.steps(None)
    plain = PLAIN.forward(q, k, v, 0.3, call.sight)
    found = PIECES.forward(q, k, v, 0.3, call.sight)
    assert lengths == [(False, 4), (True, 42), (True, 56), (False, 30), (True, 68), (True, 46)]
    for x, want in zip(found, plain, strict=True):
        assert_near(x, want, 1e-13)
    dout = random(4, *plain[0].shape)
    grads = (pair.backward(dout, q, k, v, *plain, 0.3, call.sight) for pair in (PIECES, PLAIN))
    for x, want in zip(*grads, strict=True):
        assert_near(x, want, 1e-13)


def test_long_documents_take_few_lengths() -> None:
    """cuDNN makes a plan for each: docs/long-sequences.md tells how many."""
    for window, plans in ((8_192, 17), (32_768, 49), (131_072, 81)):
        lengths = range(ops_attention.LONG, window + 1)
        assert len({ops_attention._alone(length) for length in lengths}) == plans
        assert all(length <= ops_attention._alone(length) <= length * 17 / 16 for length in lengths)


def test_a_large_score_does_not_overflow() -> None:
    q, k, v, sinks = inputs((4, 2), (6, 6), 9, torch.float32)
    out = attention(q * 1e3, k * 1e3, v, 1.0, None, sinks)
    assert out.isfinite().all()
    q, k, v, sinks = leaves(q * 1e3, k * 1e3, v, sinks)
    assert_near(out, plain_attention(q, k, v, 1.0, None, sinks), 1e-2)


@pytest.mark.parametrize(("version", "enabled"), [(None, True), (90800, True), (91900, False)])
def test_a_cudnn_that_is_hidden_or_old_is_told_at_start(
    version: int | None, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper alone; elsewhere attention takes what there is."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: enabled)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/old")
    for capability in ((8, 0), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, it=capability: it)
        if capability == (9, 0):
            with pytest.raises(RunFailed, match=f"torch found {version}.*'/opt/old'"):
                require_cudnn(torch.device("cuda"))
        else:
            require_cudnn(torch.device("cuda"))
    require_cudnn(torch.device("cpu"))
