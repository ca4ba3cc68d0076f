"""Plain twins of the operators for tests: loops and autograd in float64, sharing no arithmetic with `pithtrain.ops`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pithtrain.ops.linear import Weight, accumulate_dtype
from pithtrain.ops.parts import Part
from pithtrain.ops.ring import Attention, Core


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    """Normal numbers, rounded from float64 to `dtype`: one seed gives the same values in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def distinct_ids(seed: int, tokens: int, experts: int, k: int) -> Tensor:
    """[tokens, k] expert ids, uniform among the sets and orders without repetition."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator, dtype=torch.float64).argsort(dim=1)[:, :k].contiguous()


def make_weight(name: str, data: Tensor) -> Weight:
    return Weight(name, data, torch.zeros(data.shape, dtype=accumulate_dtype(data.dtype)))


Documents = Sequence[Sequence[int]]  # of each sequence, where they begin


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """The oracle: K and V repeated per query head, one softmax over the keys and a column for the sink."""
    (batch, length), repeat = q.shape[:2], q.shape[2] // k.shape[2]
    k, v = (torch.stack([x[:, :, h // repeat] for h in range(q.shape[2])], dim=2) for x in (k, v))
    starts = [[max(s for s in row if s <= i) for i in range(length)] for row in documents or [[0]] * batch]
    first = [[max(s, i - (window or length) + 1) for i, s in enumerate(row)] for row in starts]
    seen = torch.tensor([[[row[i] <= j <= i for j in range(length)] for i in range(length)] for row in first])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores.masked_fill(~seen[:, None].to(q.device), float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(batch, -1, length, 1)), dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :length], v)


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any) -> Tensor:
        scale, window, documents = rest
        weight = None if sinks is None else Weight("sinks", sinks, torch.zeros_like(sinks))
        core = Core(scale, q.shape[2] * v.shape[3], window, weight)
        ctx.sinks, ctx.documents = weight, documents
        ctx.made = Attention(core, Part(*q.shape[:2], q.device, documents=documents), None, q, k, v)
        return ctx.made.out.view(*q.shape[:3], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.sinks is not None:
            ctx.sinks.main_grad = torch.zeros_like(ctx.sinks.data)
        dq, dk, dv = ctx.made.backward(grads[0], [])
        return dq, dk, dv, None if ctx.sinks is None else ctx.sinks.main_grad, None, None, None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
) -> Tensor:
    """The engine's attention on whole sequences, as a function that autograd goes through."""
    return _Attended.apply(q, k, v, sinks, scale, window, documents)  # pyright: ignore[reportReturnType]


def expert(x_H: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """down(silu(gate x) * up x) of one token and one expert; gate_up [2I, H], down [H, I]."""
    width = down.shape[1]
    gate, up = gate_up[:width] @ x_H, gate_up[width:] @ x_H
    return down @ (gate / (1 + torch.exp(-gate)) * up)


def moe(n_TH: Tensor, w_TK: Tensor, ids_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """[T, H]: token by token, slot by slot; a negative id is no slot."""
    rows = [torch.zeros(0, n_TH.shape[1], dtype=n_TH.dtype)]
    for t, ids in enumerate(ids_TK.tolist()):
        total = torch.zeros(n_TH.shape[1], dtype=n_TH.dtype)
        for j, x in enumerate(ids):
            if x >= 0:
                total = total + w_TK[t, j] * expert(n_TH[t], gate_up[x], down[x])
        rows.append(total[None])
    return torch.cat(rows)


def leaves(*tensors: Tensor) -> tuple[Tensor, ...]:
    """float64 copies that require gradients."""
    return tuple(x.detach().double().clone().requires_grad_() for x in tensors)


def gradients(scalar: Tensor, wanted: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """d scalar / d wanted; zeros for what it does not depend on."""
    if not scalar.requires_grad:
        return tuple(torch.zeros_like(x) for x in wanted)
    found = torch.autograd.grad(scalar, wanted, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(found, wanted, strict=True))


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """||found - expected|| <= tolerance ||expected||, shapes equal; a NaN on either side fails."""
    assert found.shape == expected.shape, f"{tuple(found.shape)} is not {tuple(expected.shape)}"
    difference, size = (found.double() - expected.double()).norm().item(), expected.double().norm().item()
    assert difference <= tolerance * size, f"differs by {difference:.3g} of {size:.3g}"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every new uninitialised tensor is full of NaN (integers: of the largest value): whoever reads one is found."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all(), "torch no longer fills uninitialised memory in deterministic mode"
        yield
    finally:
        torch.use_deterministic_algorithms(False)
