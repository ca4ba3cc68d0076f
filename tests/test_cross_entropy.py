"""The fused head and loss against one float64 autograd graph, row by row and at the target column."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pithtrain.ops import cross_entropy
from pithtrain.ops.cross_entropy import IGNORE, linear_cross_entropy
from pithtrain.ops.linear import Weight
from reference import assert_near, make_weight, poisoned_memory, random

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def by_autograd(
    h: Tensor, weight: Tensor, labels: Tensor, scale: float, z_coef: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """loss, dh, dW; with `z_coef` the gradients are those of the loss and its z-loss."""
    h, weight = h.double().clone().requires_grad_(), weight.double().clone().requires_grad_()
    loss = scale * F.cross_entropy(h @ weight.t(), labels, reduction="sum", ignore_index=IGNORE)
    total = loss + z_coef * scale * ((h @ weight.t()).logsumexp(1)[labels != IGNORE] ** 2).sum()
    return loss.detach(), *torch.autograd.grad(total, (h, weight))


def run(h: Tensor, weight: Weight, labels: Tensor, scale: float, z_coef: float = 0.0) -> tuple[Tensor, Tensor]:
    """loss, dh."""
    with poisoned_memory():
        factor = torch.tensor(scale, dtype=weight.main_grad.dtype)
        loss, z, dh = linear_cross_entropy(h, weight, labels, factor, z_coef)
    lse = (h.double() @ weight.data.double().t()).logsumexp(1)
    if h.isfinite().all():
        torch.testing.assert_close(z.double(), (z_coef > 0) * scale * (lse[labels != IGNORE] ** 2).sum())
    return loss, dh


def check(h: Tensor, data: Tensor, labels: Tensor, scale: float = 0.125, z_coef: float = 0.0) -> None:
    """Loss, dh row by row, and dW row by row (a row of W is a column of the logits)."""
    weight = make_weight("head", data)
    loss, dh = run(h, weight, labels, scale, z_coef)
    expected_loss, expected_dh, expected_dw = by_autograd(h, data, labels, scale, z_coef)
    # dh sums over the vocabulary, in an order that BLAS chooses
    tolerance = TOLERANCE[h.dtype] * max(1, len(data) ** 0.5 / 100)
    assert dh.dtype == h.dtype and loss.dtype == weight.main_grad.dtype and loss.shape == ()
    assert_near(loss, expected_loss, tolerance)
    size = expected_dh.norm(dim=1).max().item()
    for t in range(len(labels)):
        if labels[t] == IGNORE:
            assert not dh[t].any()
        else:
            difference = (dh[t].double() - expected_dh[t]).norm().item()
            assert difference <= tolerance * max(expected_dh[t].norm().item(), 0.05 * size)
    assert_near(weight.main_grad, expected_dw, tolerance)
    for y in {y for y in labels.tolist() if y != IGNORE}:
        assert_near(weight.main_grad[y], expected_dw[y], 3 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize(("vocabulary", "tokens"), [(1, 5), (7, 40), (1000, 21), (50257, 3)])
def test_equal_to_autograd(vocabulary: int, tokens: int, dtype: torch.dtype) -> None:
    h, data = random(0, tokens, 8, dtype=dtype), random(1, vocabulary, 8, dtype=dtype)
    labels = torch.arange(tokens) * 7919 % vocabulary
    labels[::4] = IGNORE
    if vocabulary == 1:  # one word: no loss, no gradient, not even rounding
        weight = make_weight("head", data)
        loss, dh = run(h, weight, labels, 0.125)
        assert loss == 0 and not dh.any() and not weight.main_grad.any()
        return
    check(h, data, labels)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize(("vocabulary", "tokens"), [(1, 5), (7, 40), (1000, 21)])
def test_z_loss_equals_autograd(
    vocabulary: int, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gradient is beside the loss's, and the loss itself is that without it; also over several chunks."""
    monkeypatch.setattr(cross_entropy, "CHUNK", 16)
    h, data = random(0, tokens, 8, dtype=dtype), random(1, vocabulary, 8, dtype=dtype)
    labels = torch.arange(tokens) * 7919 % vocabulary
    labels[::4] = IGNORE
    check(h, data, labels, z_coef=0.1)


def test_z_loss_by_finite_differences() -> None:
    """Without autograd: the rise of loss + z_coef z along the gradient of h, and along that of W."""
    h, data, scale = random(0, 9, 6), random(1, 11, 6), torch.tensor(0.2, dtype=torch.float64)
    labels = torch.arange(9)
    labels[4] = IGNORE

    def total(h: Tensor, data: Tensor) -> tuple[float, Tensor, Tensor]:
        weight = make_weight("head", data)
        loss, z, dh = linear_cross_entropy(h, weight, labels, scale, 0.3)
        return (loss + 0.3 * z).item(), dh, weight.main_grad

    _, dh, dw = total(h, data)
    step = 1e-5
    along_h = (total(h + step * dh, data)[0] - total(h - step * dh, data)[0]) / (2 * step)
    along_w = (total(h, data + step * dw)[0] - total(h, data - step * dw)[0]) / (2 * step)
    assert along_h == pytest.approx(dh.square().sum().item(), rel=1e-7)
    assert along_w == pytest.approx(dw.square().sum().item(), rel=1e-7)


@pytest.mark.parametrize("chunk", [1, 3, 4, 12, 13, 100])
def test_ragged_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK", chunk)
    labels = torch.arange(13) % 7
    labels[5] = IGNORE
    check(random(0, 13, 6), random(1, 7, 6), labels)


def test_the_weight_is_contributed_to_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many chunks; and it adds to what is there."""
    monkeypatch.setattr(cross_entropy, "CHUNK", 2)
    calls: list[str] = []
    data = random(1, 7, 6)
    weight = Weight("head", data, torch.ones_like(data), lambda: calls.append("head"))
    h, labels = random(0, 13, 6), torch.arange(13) % 7
    run(h, weight, labels, 1.0)
    assert calls == ["head"]
    assert_near(weight.main_grad - 1, by_autograd(h, data, labels, 1.0)[2], 1e-13)


def test_no_tensor_of_the_size_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK", 4)
    seen: list[tuple[int, ...]] = []
    plain = cross_entropy._loss_and_grad

    def record(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(tuple(logits.shape))
        return plain(logits, *rest)

    monkeypatch.setattr(cross_entropy, "_loss_and_grad", record)
    run(random(0, 10, 6), make_weight("head", random(1, 7, 6)), torch.zeros(10, dtype=torch.int64), 1.0)
    assert seen == [(4, 7), (4, 7), (2, 7)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
def test_all_ignored(dtype: torch.dtype) -> None:
    weight = make_weight("head", random(1, 7, 6, dtype=dtype))
    loss, dh = run(random(0, 5, 6, dtype=dtype), weight, torch.full((5,), IGNORE), 0.5)
    assert loss == 0 and not dh.any() and not weight.main_grad.any()


def test_one_valid() -> None:
    labels = torch.full((5,), IGNORE)
    labels[3] = 6
    check(random(0, 5, 6), random(1, 7, 6), labels, scale=1.0)
    check(random(0, 5, 6, dtype=torch.float32), random(1, 7, 6, dtype=torch.float32), labels, scale=1.0)


def test_ignored_tokens_do_not_touch_the_others() -> None:
    """Not even when they are not finite."""
    h, labels = random(0, 5, 6), torch.tensor([1, IGNORE, 2, 3, 4])
    clean, dirty = make_weight("head", random(1, 7, 6)), make_weight("head", random(1, 7, 6))
    loss, dh = run(h, clean, labels, 0.25)
    h = h.clone()
    h[1] = 1e6
    other_loss, other_dh = run(h, dirty, labels, 0.25)
    assert torch.equal(loss, other_loss) and torch.equal(dh, other_dh) and torch.equal(clean.main_grad, dirty.main_grad)


@pytest.mark.parametrize("vocabulary", [2, 7, 1000])
def test_equal_logits(vocabulary: int) -> None:
    labels = torch.tensor([0, vocabulary - 1, IGNORE])
    data = random(1, 1, 6).expand(vocabulary, 6).contiguous()
    weight = make_weight("head", data)
    h = random(0, 3, 6)
    loss, _ = run(h, weight, labels, 0.5)
    assert loss.item() == pytest.approx(torch.tensor(vocabulary, dtype=torch.float64).log().item(), rel=1e-14)
    uniform = torch.full((3, vocabulary), 1 / vocabulary, dtype=torch.float64)
    uniform[[0, 1], [0, vocabulary - 1]] -= 1
    uniform[2] = 0
    assert_near(weight.main_grad, 0.5 * uniform.t() @ h, 1e-12)


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float64, 2.0**-39), (torch.float32, 2.0**-10), (torch.bfloat16, 2.0**-8)]
)
def test_logits_of_ten_thousand(dtype: torch.dtype, rounding: float) -> None:
    """The loss is 2e4 for a wrong word, 0 for the right one, log 2 between two; nothing overflows. Probabilities are as
    exact as logits of that size are: `rounding` is the spacing of numbers near 1e4 (bf16: that of the gradient)."""
    size = 9984.0  # bf16 holds it exactly
    data = torch.tensor([[size, 1.0], [-size, 2.0], [size, 3.0], [-size, 4.0]], dtype=dtype)
    h = torch.tensor([[1.0, 0.0]] * 3, dtype=dtype)
    weight = make_weight("head", data)
    loss, dh = run(h, weight, torch.tensor([0, 1, 2]), 1.0)
    assert loss.item() == pytest.approx(2 * size + 3 * 0.6931471805599453, rel=1e-6)
    # softmax is (1/2, 0, 1/2, 0) in every row
    gradient = torch.tensor([[-0.5, 0, 0.5, 0], [0.5, -1, 0.5, 0], [0.5, 0, -0.5, 0]], dtype=torch.float64)
    assert (weight.main_grad - gradient.t() @ h.double()).abs().max() <= rounding
    assert (dh - gradient @ data.double()).abs().max() <= 2 * rounding * size
    far = make_weight("head", torch.tensor([[size], [-size]], dtype=dtype))
    loss, dh = run(torch.ones(1, 1, dtype=dtype), far, torch.tensor([0]), 1.0)
    assert loss == 0 and not dh.any() and not far.main_grad.any()


def test_every_row_points_the_right_way_in_fp32() -> None:
    """Cosine above 0.99999 for every row of dh and of dW: a race at the target column gave 0.01 elsewhere."""
    h, data = random(0, 64, 16, dtype=torch.float32), random(1, 50, 16, dtype=torch.float32)
    labels = torch.arange(64) % 50
    weight = make_weight("head", data)
    _, dh = run(h, weight, labels, 1 / 64)
    _, expected_dh, expected_dw = by_autograd(h, data, labels, 1 / 64)
    for found, expected in ((dh, expected_dh), (weight.main_grad, expected_dw)):
        assert F.cosine_similarity(found.double(), expected).min() > 0.99999


@pytest.mark.parametrize("label", [7, -1, 1 << 40])
def test_a_label_outside_the_vocabulary_is_an_error(label: int) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        run(random(0, 2, 6), make_weight("head", random(1, 7, 6)), torch.tensor([0, label]), 1.0)


def test_no_tokens() -> None:
    weight = make_weight("head", random(1, 7, 6))
    loss, dh = run(random(0, 0, 6), weight, torch.zeros(0, dtype=torch.int64), 1.0)
    assert loss == 0 and dh.shape == (0, 6) and not weight.main_grad.any()


@pytest.mark.parametrize("chunk", [7, 2048])
def test_case_164_large_bf16_logits_do_not_move_the_loss_in_steps(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a few hundred, where bf16 has steps of 1 and 2: the loss of every token is that of float64."""
    monkeypatch.setattr(cross_entropy, "CHUNK", chunk)
    h, data = 40 * random(0, 32, 64, dtype=torch.bfloat16), random(1, 500, 64, dtype=torch.bfloat16)
    logits = h.double() @ data.double().t()
    labels = logits.topk(3).indices[:, 2]  # near the top, where a step of a logit is one of the loss
    want, fault = (F.cross_entropy(x.double(), labels, reduction="none") for x in (logits, logits.bfloat16()))
    assert (fault - want).abs().max() > 0.25
    for t in range(len(labels)):
        loss, _ = run(h[t : t + 1], make_weight("head", data), labels[t : t + 1], 1.0)
        assert abs(loss.item() - want[t].item()) < 1e-3
    check(h, data, labels)
