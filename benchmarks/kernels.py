"""Every Triton kernel of ops/ beside its plain twin and its ceiling, at the shapes of three models.

    .venv/bin/python benchmarks/kernels.py [--only TEXT] [--json FILE]
    .venv/bin/python benchmarks/kernels.py --tune --only weight        # tile settings of the weight gradient
    .venv/bin/python benchmarks/kernels.py --tune --only fp8           # and of 8 bits; or "fp8 glu", weight, grouped
    .venv/bin/python benchmarks/kernels.py --check                     # tiny shapes, results compared, also on a CPU

8,192 tokens (two sequences of 4,096) in bf16 on one GPU, random numbers, random routing. Ceilings are measured in the
same run: a copy of 1 GiB, a matmul of 8,192^3; a kernel's is the larger of the two times that its bytes and its FLOPs
take there. Twins are what plain torch offers: the functions beside the kernels in ops/, for weight gradients
`F.grouped_mm` and an addition, for AdamW torch's fused one and a copy to bf16. torch's own kernels that a step calls
(grouped GEMMs, cuDNN's attention, and flash's with a window) have rows too; the twin of an attention row is flash's
without a window for cuDNN, and cuDNN's without a window for flash's with one.

`--only long`: attention over 32,768 tokens as the engine plays it. Whole; one rank of a ring of four, with blocks from
memory, whose TFLOP/s are to be 85 % of those of the whole; eight documents of 4,096, to be 4 times as fast as their
twin, which for all three is the whole.

The ceiling of 8-bit products is a row-wise `F.scaled_mm` of 8,192^3. Their rows quantise the activations, by our kernel
(for experts with the gather, if it is the layer's input), and find the weights quantised; their twin is the same
product in bf16, of what is gathered already. The twin of a quantiser is plain torch, that of a gated activation our
two passes.

A time is the median over single calls, each behind a pass that empties the cache and lets the host run ahead. Ends with
a line for each kernel of ours that does not beat its twin. Exit code 2 without a GPU, unless --check is given.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from throughput import align, answer, ask_clocks, machine, machine_text

if not torch.cuda.is_available():  # before triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton
from torch.optim.adamw import adamw

from pithtrain.models.contract import causal_keys
from pithtrain.ops import fp8, fp8_kernels, kernels, permute_kernels
from pithtrain.ops.attention import CUDNN, FLASH, Sight, merge
from pithtrain.ops.cross_entropy import CHUNK, plain_loss_and_grad
from pithtrain.ops.fp8 import GROUP, Fp8, Recipe
from pithtrain.ops.grouped import (
    grouped_linear,
    grouped_linear_dx,
    plain_grouped_sum,
    plain_grouped_weight_grad,
)
from pithtrain.ops.kernels import Tiles
from pithtrain.ops.linear import Linears
from pithtrain.ops.parts import Part
from pithtrain.ops.permute import Rows, SlotBias, Slots, plain_order_slots, plain_ordered_sum, plain_plan_rows
from pithtrain.ops.ring import Attention, Core
from pithtrain.ops.rounding import rounding_keys, store_moments
from pithtrain.ops.swiglu import SILU, Glu, biased, weighted_swiglu, weighted_swiglu_backward

REPEATS = 15
CANDIDATES = (  # n, k, rows, warps, stages, group; below 114 KB of shared memory a SM holds two programs
    *(Tiles(128, 128, 64, 4, 3, group) for group in (8, 2, 4, 16)),
    *(Tiles(128, 128, 64, warps, stages) for warps, stages in ((4, 2), (4, 4), (8, 3))),
    *(Tiles(128, 128, 32, warps, stages) for warps, stages in ((4, 3), (4, 5), (8, 5))),
    *(Tiles(n, k, 64, 4, stages) for n, k in ((128, 64), (64, 128)) for stages in (3, 4)),
    *(Tiles(n, k, 64, 8, 3) for n, k in ((128, 256), (256, 128))),
)
PRODUCTS = {
    128: tuple(fp8_kernels.Tiles(rows, 128, *each) for rows in (64, 128) for each in ((4, 3), (4, 4), (8, 3), (8, 4))),
    0: tuple(
        fp8_kernels.Tiles(*each)
        for each in (*((128, 256, 8, stages) for stages in (3, 4)), (256, 128, 8, 4), (128, 128, 8, 3), (64, 256, 4, 3))
    ),
}
COLUMNS = tuple(
    fp8_kernels.Columns(*each) for each in ((512, 4), (256, 2), (512, 2), (1024, 4), (1024, 8), (2048, 8), (4096, 16))
)
WEIGHTS = tuple(
    fp8_kernels.WeightTiles(*each)
    for each in (
        *((rows, at_once, 128, 128, 8) for rows in (64, 32, 16) for at_once in (4, 2)),
        *((64, 4, *tile) for tile in ((128, 64, 4), (64, 128, 4), (128, 64, 8), (256, 64, 8), (64, 64, 4))),
    )
)


class Shape(NamedTuple):
    """Of a model's layer. `heads`: of q and of k, widths of k and of v."""

    name: str
    tokens: int
    sequence: int
    experts: int
    slots: int
    hidden: int
    width: int
    vocab: int
    chunk: int  # tokens of the cross entropy
    parameters: int  # of AdamW
    heads: tuple[int, int, int, int]
    glu: Glu
    bias: bool
    window: int | None


SHAPES = (
    Shape("qwen3", 8192, 4096, 128, 8, 2048, 768, 151936, CHUNK, 400_000_000, (32, 4, 128, 128), SILU, False, None),
    Shape("deepseek", 8192, 4096, 64, 6, 2048, 1408, 102400, CHUNK, 0, (16, 16, 192, 128), SILU, False, None),
    Shape(
        *("gpt-oss", 8192, 4096, 32, 4, 2880, 2880, 201088, CHUNK, 0, (64, 8, 64, 64)),
        *(Glu(1.702, 7.0, 1.0), True, 128),
    ),
)
TINY = (
    Shape("tiny", 16, 8, 4, 2, 24, 16, 100, 8, 1500, (2, 1, 8, 8), SILU, False, None),
    Shape("tiny-bias", 16, 8, 4, 2, 24, 20, 100, 8, 0, (2, 1, 8, 8), Glu(1.7, 0.5, 1.0), True, 3),
)


LONG = 32768


class Case(NamedTuple):
    """A row of the table. Both functions answer with what they computed; sums into a tensor go to one each."""

    kernel: str
    shape: str
    run: Callable[[], Any]
    twin: Callable[[], Any] | None
    num_bytes: float
    flops: float = 0.0
    ours: bool = True
    eight: bool = False  # against the ceiling of 8-bit products


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose kernel has TEXT in its name")
    parser.add_argument("--tune", action="store_true", help="time other tiles: of weight gradients, or of fp8 (--only)")
    parser.add_argument("--check", action="store_true", help="tiny shapes: compare the results, measure nothing")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    if not gpu and not arguments.check:
        print("error: this measures a GPU, and torch sees none; --check compares results on a CPU", file=sys.stderr)
        sys.exit(2)
    if arguments.check:
        wrong = check(arguments.only, gpu)
        sys.exit(wrong > 0)
    told: dict[str, Any] = {"machine": machine(), "ceilings": measure_ceilings()}
    ceilings = told["ceilings"]
    print(machine_text(told["machine"]))
    print(f"ceilings: {', '.join(f'{name} {figure}' for name, figure in ceilings.items())}\n")
    told["rows"] = [
        measure(case, ceilings) for shape in SHAPES for case in cases(shape, gpu) if arguments.only in case.kernel
    ]
    print(table(told["rows"]))
    if arguments.tune:
        told["tune"] = tune_eight_bits(arguments.only) if "fp8" in arguments.only else tune()
    slower = [row for row in told["rows"] if row["ours"] and row["ms"] >= row["twin_ms"]]
    for row in slower:
        print(f"DOES NOT BEAT ITS TWIN: {row['kernel']} at {row['shape']}: {row['ms']:.3f} >= {row['twin_ms']:.3f} ms")
    if not slower:
        print("every kernel of ours beats its twin")
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1) + "\n")


# ---- what is measured ------------------------------------------------------------------------------------------------


def cases(shape: Shape, gpu: bool) -> Iterator[Case]:
    """The rows of one shape, each with inputs that live as long as it. Without a GPU all is fp32: the interpreter
    multiplies bf16 as integers."""
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    torch.manual_seed(0)

    def rand(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*sizes, dtype=dtype, device=device)

    ids = torch.rand(shape.tokens, shape.experts, device=device).topk(shape.slots).indices
    weights = torch.rand(ids.shape, device=device)
    yield from index_cases(shape, ids, weights)
    slots = plain_order_slots(ids, weights, shape.experts, shape.tokens * shape.slots)
    yield from slot_cases(shape, slots, rand)
    if gpu:
        yield router_case(shape, rand)
    yield from product_cases(shape, "gate_up", 2 * shape.width, shape.hidden, slots.ends_E, rand)
    yield from product_cases(shape, "down", shape.hidden, shape.width, slots.ends_E, rand)
    yield cross_entropy_case(shape, rand)
    yield merge_case(shape, rand)
    if shape.bias:
        yield from sinks_cases(shape, rand)
    if shape.parameters:
        for moments in (torch.float32, torch.bfloat16):
            yield adamw_case(shape.parameters, shape.name, dtype, moments, device)
            yield look_ahead_case(shape.parameters, shape.name, dtype, moments, device)
        yield move_case(shape.parameters, shape.name, dtype, device)
    if gpu:
        yield from attention_cases(shape, rand)
        yield from long_cases(shape, rand, LONG)
        yield from quantiser_cases(shape, slots, rand)
        for recipe in ("blockwise", "rowwise"):
            yield from eight_bit_products(shape, recipe, slots, rand)


Rand = Callable[..., Tensor]


def router_case(shape: Shape, rand: Rand) -> Case:
    """The router's product: fp32 from a bf16 input on tensor cores, beside the fp32 GEMM."""
    x, w = rand(shape.tokens, shape.hidden), rand(shape.experts, shape.hidden, dtype=torch.float32)
    return Case(
        "router",
        shape.name,
        lambda: Linears({"gate": w}, None)("gate", x),
        lambda: F.linear(x.float(), w),
        x.nbytes + w.nbytes + 4.0 * shape.tokens * shape.experts,
        6.0 * shape.tokens * shape.experts * shape.hidden,
    )


def index_cases(shape: Shape, ids: Tensor, weights: Tensor) -> Iterator[Case]:
    """What goes where: as if half of the experts were on another rank, and the order of all slots on one."""

    def rows(plan: Callable[..., Rows]) -> tuple[Tensor, ...]:
        planned = plan(ids, weights, 2, shape.experts // 2, True)
        return planned.row_TK, planned.col_TK, planned.row_TGC, planned.counts_G2

    def slots(order: Callable[..., Slots]) -> tuple[Tensor, ...]:
        return tuple(vars(order(ids, weights, shape.experts, ids.numel())).values())

    made = sum(
        part.nbytes for part in (*vars(plain_plan_rows(ids, weights, 2, shape.experts // 2, True)).values(), ids)
    )
    kernel, twin = permute_kernels.plan_rows, plain_plan_rows
    yield Case("plan_rows", shape.name, lambda: rows(kernel), lambda: rows(twin), made + weights.nbytes)
    order, plain = permute_kernels.order_slots, plain_order_slots
    moved = 5 * ids.nbytes + 2 * weights.nbytes
    yield Case("order_slots", shape.name, lambda: slots(order), lambda: slots(plain), moved)


def slot_cases(shape: Shape, slots: Slots, rand: Rand) -> Iterator[Case]:
    """Pointwise over the slots of the experts."""
    rows, hidden, width, glu, expert = len(slots.row_R), shape.hidden, shape.width, shape.glu, slots.expert_R
    y, gate_up, da = rand(rows, hidden), rand(rows, 2 * width), rand(rows, width)
    weight, index, dtype = rand(rows, dtype=torch.float32).sigmoid(), slots.slot_U1q, y.dtype
    down_bias = SlotBias(rand(shape.experts, hidden, dtype=torch.float32), expert, weight) if shape.bias else None
    yield Case(
        "ordered_sum",
        shape.name,
        lambda: kernels.ordered_sum(y, index, down_bias),
        lambda: plain_ordered_sum(y, index, down_bias),
        y.element_size() * (rows + shape.tokens) * hidden,
    )
    sent, back = rand(shape.tokens, hidden), rand(shape.tokens, hidden)
    yield Case(
        "ordered_sum gather",
        shape.name,
        lambda: kernels.ordered_sum(sent, slots.row_R[:, None, None]),
        lambda: sent[slots.row_R],
        y.element_size() * (rows + shape.tokens) * hidden,
    )
    per_rank = index.view(shape.tokens, 2, -1)  # as if half of the experts were on another rank
    yield Case(
        "ordered_sum over ranks, plus two",
        shape.name,
        lambda: kernels.ordered_sum(y, per_rank, None, [sent, back]),
        lambda: plain_ordered_sum(y, per_rank, None, [sent, back]),
        y.element_size() * (rows + 3 * shape.tokens) * hidden,
    )
    bias = rand(shape.experts, 2 * width, dtype=torch.float32) if shape.bias else None
    options = (glu.alpha, glu.limit, glu.offset, bias, expert)
    yield Case(
        "glu",
        shape.name,
        lambda: kernels.glu(gate_up, weight, *options),
        lambda: weighted_swiglu(biased(gate_up, bias, expert), weight, glu, dtype),
        3 * da.nbytes,
    )
    yield Case(
        "glu_backward",
        shape.name,
        lambda: kernels.glu_backward(da, gate_up, weight, *options),
        lambda: weighted_swiglu_backward(da, biased(gate_up, bias, expert), weight, glu),
        6 * da.nbytes,
    )


def product_cases(shape: Shape, part: str, n: int, k: int, ends: Tensor, rand: Rand) -> Iterator[Case]:
    """Of the matrices [E, n, k]: forward and input gradient by torch, weight and bias gradient by us."""
    rows, experts = shape.tokens * shape.slots, shape.experts
    dy, x, matrices = rand(rows, n), rand(rows, k), rand(experts, n, k)
    about = (None, dy.nbytes + x.nbytes + matrices.nbytes, 2.0 * rows * n * k, False)
    if dy.is_cuda:
        yield Case(f"grouped_mm {part}", shape.name, lambda: grouped_linear(x, matrices, ends), *about)
        yield Case(f"grouped_mm {part} dgrad", shape.name, lambda: grouped_linear_dx(dy, matrices, ends), *about)
    mine, theirs = (torch.zeros(experts, n, k, device=dy.device) for _ in range(2))
    yield weight_grad(f"grouped_weight_grad {part}", shape.name, dy, x, mine, theirs, ends)
    if shape.bias:
        my_sum, their_sum = (torch.zeros(experts, n, device=dy.device) for _ in range(2))
        yield Case(
            f"grouped_sum {part}",
            shape.name,
            lambda: (kernels.add_grouped_sum(my_sum, 1, dy, None, ends), my_sum)[1],
            lambda: (plain_grouped_sum(their_sum, 1, dy, None, ends), their_sum)[1],
            dy.nbytes + 2 * my_sum.nbytes,
        )


def quantiser_cases(shape: Shape, slots: Slots, rand: Rand) -> Iterator[Case]:
    """Only on a GPU: the interpreter's conversion to e4m3 drops carries."""
    rows, width, glu = len(slots.row_R), shape.width, shape.glu
    gate_up, da = rand(rows, 2 * width), rand(rows, width)
    matrices, weight = rand(shape.experts, 2 * width, shape.hidden), rand(rows, dtype=torch.float32).sigmoid()
    bias = rand(shape.experts, 2 * width, dtype=torch.float32) if shape.bias else None
    options = (glu.alpha, glu.limit, glu.offset, bias, slots.expert_R)
    recipes: tuple[Recipe, ...] = "blockwise", "rowwise"
    for recipe in recipes:
        group = GROUP[recipe]
        if group and (width % group or shape.hidden % group):
            continue
        yield Case(
            f"fp8 rows {recipe}",
            shape.name,
            lambda group=group: fp8_kernels.quantize_rows(gate_up, group),
            lambda group=group: fp8.quantize_rows(gate_up, group),
            1.5 * gate_up.nbytes,
        )

        def plain(recipe: Recipe = recipe) -> tuple[Any, ...]:
            return fp8.plain_quantize_weight(matrices, recipe)[1:]

        yield Case(
            f"fp8 weight {recipe}",
            shape.name,
            lambda group=group: fp8_kernels.quantize_weight(matrices, group),
            plain,
            2 * matrices.nbytes,
        )
        yield Case(
            f"fp8 glu {recipe}",
            shape.name,
            lambda group=group: fp8_kernels.glu(gate_up, weight, *options, group),
            lambda group=group: fp8_kernels.quantize_rows(kernels.glu(gate_up, weight, *options), group),
            2.5 * da.nbytes,
        )

        def both(group: int = group) -> tuple[Any, ...]:
            found = kernels.glu_backward(da, gate_up, weight, *options)
            return *found, fp8_kernels.quantize_rows(found[0], group)

        yield Case(
            f"fp8 glu_backward {recipe}",
            shape.name,
            lambda group=group: fp8_kernels.glu_backward(da, gate_up, weight, *options, group),
            both,
            7 * da.nbytes,
        )


def eight_bit_products(shape: Shape, recipe: Recipe, slots: Slots, rand: Rand) -> Iterator[Case]:
    """Forward and input gradient of the experts and of the query projection; activations quantised in the time. Rows
    of tokens are found by the product (gate_up forward, down's gradient); others are bf16 and in order here."""
    ends, tokens, row_R = slots.ends_E, rand(shape.tokens, shape.hidden), slots.row_R
    heads = shape.heads[0] * shape.heads[2]

    def multiply(x: Tensor, w: Fp8, gathers: bool) -> Tensor:
        q = fp8.quantize(tokens, recipe)._replace(row_R=row_R) if gathers else fp8.quantize(x, recipe)
        return fp8.product(q, w, recipe) if w.data.dim() == 2 else fp8.grouped_product(q, w, ends, recipe)

    for part, n, k, experts in (
        *((*each, shape.experts) for each in products_of(shape)),
        ("q", heads, shape.hidden, 0),
    ):
        if recipe == "blockwise" and (n % 128 or k % 128):
            continue
        matrices = rand(*([experts] if experts else []), n, k)
        eight, rows = fp8.quantize_weight(matrices, recipe), len(row_R) if experts else shape.tokens
        x, dy = (
            tokens[row_R] if part == found else rand(rows, width) for found, width in (("gate_up", k), ("down", n))
        )
        moved, flops = x.nbytes + dy.nbytes + matrices.numel(), 2.0 * rows * n * k

        def forward(x: Tensor = x, w: Fp8 = eight.forward, gathers: bool = part == "gate_up") -> Tensor:
            return multiply(x, w, gathers)

        def dgrad(dy: Tensor = dy, w: Fp8 = eight.dgrad, gathers: bool = part == "down") -> Tensor:
            return multiply(dy, w, gathers)

        twins = (
            (
                lambda x=x, w=matrices: grouped_linear(x, w, ends),
                lambda d=dy, w=matrices: grouped_linear_dx(d, w, ends),
            )
            if experts
            else (lambda x=x, w=matrices: x @ w.t(), lambda d=dy, w=matrices: d @ w)
        )
        name = f"fp8 {'grouped' if experts else 'dense'} {part} {recipe}"
        yield Case(name, shape.name, forward, twins[0], moved, flops, False, True)
        yield Case(f"{name} dgrad", shape.name, dgrad, twins[1], moved, flops, False, True)


def cross_entropy_case(shape: Shape, rand: Rand) -> Case:
    """fp32 logits read twice, their gradient written; the twin works in place: numbers change, the time does not."""
    logits, dtype = rand(shape.chunk, shape.vocab, dtype=torch.float32), rand(0).dtype
    labels = torch.randint(shape.vocab, (shape.chunk,), device=logits.device)
    scale = torch.ones((), device=logits.device)

    def twin() -> tuple[Tensor, ...]:
        *sums, grad = plain_loss_and_grad(logits, labels, scale)
        return *sums, grad.to(dtype)

    num_bytes = logits.numel() * (8 + dtype.itemsize)
    return Case(
        "cross_entropy", shape.name, lambda: kernels.cross_entropy(logits, labels, scale, dtype), twin, num_bytes
    )


def merge_case(shape: Shape, rand: Rand) -> Case:
    """A block of a ring's step into what has been added up: all tokens."""
    heads, _, _, width = shape.heads
    out, part = rand(1, shape.tokens, heads, width), rand(1, heads, shape.tokens, dtype=torch.float32)
    mine, theirs = ((out.float(), part.clone()) for _ in range(2))
    num_bytes = (8 + out.element_size()) * out.numel() + 12 * part.numel()
    return Case(
        *("merge", shape.name, lambda: (kernels.merge(*mine, out, part), [*mine])[1]),
        *(lambda: (merge(*theirs, out, part), [*theirs])[1], num_bytes),
    )


def sinks_cases(shape: Shape, rand: Rand) -> Iterator[Case]:
    """Into the output, in place, and their gradient."""
    heads, _, _, width = shape.heads
    out, dout, sinks = rand(1, shape.tokens, heads, width), rand(1, shape.tokens, heads, width), rand(heads).float()
    lse = rand(1, heads, shape.tokens, dtype=torch.float32)
    mine, theirs = ((out.clone(), lse.clone()) for _ in range(2))
    part = sinks[:, None].expand_as(lse)
    yield Case(
        *("sinks", shape.name, lambda: (kernels.merge(*mine, None, part), [*mine])[1]),
        *(lambda: (merge(*theirs, None, part), [*theirs])[1], 2.0 * out.nbytes),
    )

    def twin() -> Tensor:
        delta = (dout.float() * out).sum(-1).transpose(1, 2)
        return -((part - lse).exp_() * delta).sum((0, 2))

    yield Case(
        *("sinks_grad", shape.name, lambda: kernels.sinks_grad(dout, out, lse, sinks), twin),
        2.0 * out.nbytes + lse.nbytes,
    )


def weight_grad(
    kernel: str, shape: str, dy: Tensor, x: Tensor, ours: Tensor, theirs: Tensor, ends: Tensor, *tiles: Tiles
) -> Case:
    """`theirs` is the twin's sum."""

    def plain() -> Tensor:
        if dy.is_cuda:
            return theirs.add_(F.grouped_mm(dy.t(), x, offs=ends))
        plain_grouped_weight_grad(theirs, 1, dy, x, ends)
        return theirs

    rows, n, k = len(dy), dy.shape[1], x.shape[1]
    return Case(
        kernel,
        shape,
        lambda: (kernels.add_grouped_weight_grad(ours, 1, dy, x, ends, *tiles), ours)[1],
        plain,
        dy.element_size() * rows * (n + k) + 8 * ours.numel(),
        2.0 * rows * n * k,
    )


def adamw_case(size: int, shape: str, dtype: torch.dtype, moments: torch.dtype, device: str) -> Case:
    """bf16 moments are rounded at random; the twin, which makes them fp32 and back, is not one that was tuned."""
    given = [torch.randn(size, device=device) for _ in range(4)]
    given[2].abs_()  # a second moment
    grad = given.pop()
    given[1:] = [x.to(moments) for x in given[1:]]
    keys = rounding_keys(0, "bench")
    mine, theirs = ([x.clone() for x in given] for _ in range(2))
    weights = [torch.empty(size, dtype=dtype, device=device) for _ in range(2)]
    step, one, zero = (torch.full((), value, device=device) for value in (1.0, 1.0, 0.0))
    torch_step = zero.clone()  # torch counts before it updates

    def run() -> list[Tensor]:
        p, m, v = mine
        kernels.adamw(p, m, v, grad, weights[0], step, one, zero, 1e-3, (0.9, 0.95), 1e-8, 0.1, keys)
        return [*mine, weights[0]]

    def twin() -> list[Tensor]:
        wide = theirs[1].float(), theirs[2].float()  # themselves where they are fp32
        options: dict[str, Any] = {"fused": True, "grad_scale": one, "found_inf": zero, "amsgrad": False}
        options |= {"beta1": 0.9, "beta2": 0.95, "lr": 1e-3, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
        adamw([theirs[0]], [grad], [wide[0]], [wide[1]], [], [torch_step], **options)
        if moments != torch.float32:
            store_moments((theirs[1], theirs[2]), wide, keys, torch_step, 0)
        weights[1].copy_(theirs[0])
        return [*theirs, weights[1]]

    label = "adamw" if moments == torch.float32 else "adamw bf16 moments"
    return Case(label, shape, run, twin, (12 + 4 * moments.itemsize + weights[0].element_size()) * size)


def look_ahead_case(size: int, shape: str, dtype: torch.dtype, moments: torch.dtype, device: str) -> Case:
    """Muon's momentum. Both begin anew with each call, so that one rounding of bf16 is not carried on."""
    kept, grad = torch.randn(size, device=device).to(moments), torch.randn(size, device=device)
    keys = rounding_keys(0, "bench")
    mine, ahead = torch.empty_like(kept), torch.empty(size, dtype=dtype, device=device)
    step, one, zero = (torch.full((), value, device=device) for value in (1.0, 1.0, 0.0))

    def run() -> list[Tensor]:
        mine.copy_(kept)
        kernels.look_ahead(mine, grad, ahead, step, one, zero, 0.95, keys)
        return [mine, ahead]

    def twin() -> list[Tensor]:
        wide = kept.float().lerp_(grad, 1 - 0.95)
        stored = torch.empty_like(kept)
        if moments == torch.float32:
            stored.copy_(wide)
        else:
            store_moments([stored], [wide], keys, step, 0)
        return [stored, grad.lerp(wide, 0.95).to(dtype)]

    label = "look_ahead" if moments == torch.float32 else "look_ahead bf16 moments"
    return Case(label, shape, run, twin, (4 + 4 * moments.itemsize + ahead.element_size()) * size)


def move_case(size: int, shape: str, dtype: torch.dtype, device: str) -> Case:
    """Muon's step along a direction."""
    given, direction = torch.randn(size, device=device), torch.randn(size, device=device).to(dtype)
    mine, theirs = given.clone(), given.clone()
    weights = [torch.empty(size, dtype=dtype, device=device) for _ in range(2)]
    zero = torch.zeros((), device=device)

    def run() -> list[Tensor]:
        kernels.move(mine, direction, weights[0], zero, 1e-3, 4.0, 0.1)
        return [mine, weights[0]]

    def twin() -> list[Tensor]:
        theirs.mul_(1 - 1e-3 * 0.1).sub_(direction.float(), alpha=1e-3 * 4.0)
        weights[1].copy_(theirs)
        return [theirs, weights[1]]

    return Case("move", shape, run, twin, (8 + direction.element_size() + weights[0].element_size()) * size)


def attention_cases(shape: Shape, rand: Rand) -> Iterator[Case]:
    """By the pairs that ops/attention.py chooses from; FLOPs backward are 2.5 times those forward."""
    hq, hk, dk, dv = shape.heads
    batch, s = shape.tokens // shape.sequence, shape.sequence
    q, k, v = rand(batch, s, hq, dk), rand(batch, s, hk, dk), rand(batch, s, hk, dv)
    dout, scale = rand(batch, s, hq, dv), dk**-0.5
    plans = [("cudnn", CUDNN, None, FLASH)]
    plans += [(f"flash window {shape.window}", FLASH, shape.window, CUDNN)] if shape.window else []
    for label, pair, window, other in plans:
        flops = 2.0 * hq * (dk + dv) * causal_keys(s, window) * shape.tokens
        moved = 2 * (q.numel() + k.numel() + v.numel() + dout.numel())
        sight, full = Sight(window=window), Sight()
        saved, saved_other = pair.forward(q, k, v, scale, sight), other.forward(q, k, v, scale, full)
        yield Case(
            f"attention {label}",
            shape.name,
            lambda: pair.forward(q, k, v, scale, sight),  # noqa: B023
            lambda: other.forward(q, k, v, scale, full),  # noqa: B023
            *(moved, flops, False),
        )
        yield Case(
            f"attention {label} backward",
            shape.name,
            lambda: pair.backward(dout, q, k, v, *saved, scale, sight),  # noqa: B023
            lambda: other.backward(dout, q, k, v, *saved_other, scale, full),  # noqa: B023
            *(2 * moved, 2.5 * flops, False),
        )


class MemoryRing:
    """A ring whose blocks come from this device's memory."""

    def __init__(self, size: int):
        self.size = size

    def hop(self, sent: Tensor, received: Tensor) -> list[Any]:
        received.copy_(sent)
        return []


def long_cases(shape: Shape, rand: Rand, length: int) -> Iterator[Case]:
    """One sequence whole, cut over a ring of four, and as eight documents, forward and backward."""
    hq, hk, dk, dv = shape.heads
    core, device = Core(dk**-0.5, hq * dv), rand(0).device
    whole, cut = Part(1, length, device), Part(1, length, device, 4, 1)
    eight = Part(1, length, device, documents=[list(range(0, length, length // 8))])
    sizes = ((hq, dk), (hk, dk), (hk, dv), (hq, dv))
    *long, dout = (rand(1, length, *size) for size in sizes)
    *short, cut_dout = (rand(1, length // 4, *size) for size in sizes)
    ring: Any = MemoryRing(4)
    flops = 2.0 * hq * (dk + dv) * length
    once = Attention(core, whole, None, *long)
    plans = [
        ("whole", whole, None, long, dout, causal_keys(length)),
        ("ring of 4", cut, ring, short, cut_dout, causal_keys(length) / 4),
        ("8 documents", eight, None, long, dout, causal_keys(length // 8)),
    ]
    for label, part, hops, given, grad, keys in plans:
        made = Attention(core, part, hops, *given)
        moved = 2 * (sum(x.numel() for x in given) + grad.numel())
        yield Case(
            f"long attention {label}",
            shape.name,
            lambda: Attention(core, part, hops, *given).out,  # noqa: B023
            lambda: Attention(core, whole, None, *long).out,
            *(moved, flops * keys, False),
        )
        yield Case(
            f"long attention {label} backward",
            shape.name,
            lambda: made.backward(grad.flatten(2), []),  # noqa: B023
            lambda: once.backward(dout.flatten(2), []),
            *(2 * moved, 2.5 * flops * keys, False),
        )


# ---- measuring -------------------------------------------------------------------------------------------------------


def milliseconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median over calls, after two that warm up."""
    if not torch.cuda.is_available():
        begin = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - begin)
    cache = torch.empty(2**31, dtype=torch.uint8, device="cuda")  # half a millisecond, in which the host gets ahead
    for _ in range(2):
        work()
    spans: list[float] = []
    for _ in range(repeats):
        cache.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end))
    return statistics.median(spans)


def measure_ceilings() -> dict[str, Any]:
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    copied = milliseconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    asked = ask_clocks()
    multiplied = milliseconds(lambda: a @ b, 100)
    found = {"copy_tb_s": 2 * source.nbytes / copied / 1e9, "matmul_tflops": 2 * 8192**3 / multiplied / 1e9}
    if torch.cuda.get_device_capability()[0] >= 9:
        a8, b8 = fp8.quantize(a, "rowwise"), fp8.quantize(b, "rowwise")
        multiplied = milliseconds(lambda: fp8.product(a8, b8, "rowwise"), 100)
    return {**found, "fp8_tflops": 2 * 8192**3 / multiplied / 1e9, "clocks": answer(asked)}


def measure(case: Case, ceilings: dict[str, Any]) -> dict[str, Any]:
    """`ceilings`: in TFLOP/s and TB/s."""
    flops, copy = ceilings["fp8_tflops" if case.eight else "matmul_tflops"], ceilings["copy_tb_s"]
    ms = milliseconds(case.run)
    twin_ms = milliseconds(case.twin) if case.twin else None
    ceiling_ms = max(case.num_bytes / copy, case.flops / flops) / 1e9
    row: dict[str, Any] = {"kernel": case.kernel, "shape": case.shape, "ours": case.ours, "ms": ms, "twin_ms": twin_ms}
    row |= {"ceiling_percent": 100 * ceiling_ms / ms, "tb_s": case.num_bytes / ms / 1e9}
    row |= {"tflops": case.flops / ms / 1e9 if case.flops else None}
    print(*row.values(), file=sys.stderr, flush=True)  # for whoever stops it before the table
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [["kernel", "shape", "ours", "ms", "twin ms", "faster", "of ceiling", "TB/s", "TFLOP/s"]]
    for row in rows:
        twin = row["twin_ms"]
        line = [row["kernel"], row["shape"], "yes" if row["ours"] else "", f"{row['ms']:.3f}"]
        line += ["-", "-"] if twin is None else [f"{twin:.3f}", f"{twin / row['ms']:.2f} x"]
        line += [f"{row['ceiling_percent']:.0f} %", f"{row['tb_s']:.2f}"]
        lines.append([*line, f"{row['tflops']:.0f}" if row["tflops"] else "-"])
    return align(lines)


def check(only: str, gpu: bool) -> int:
    """How many kernels of ours differ from their twins at tiny shapes; says each."""
    wrong, within = 0, dict[str, Any]({"rtol": 2e-2, "atol": 2e-2} if gpu else {})
    for case in itertools.chain.from_iterable(cases(shape, gpu) for shape in TINY):
        if only not in case.kernel or not case.ours or case.twin is None:
            continue
        got, want = comparable(case.run()), comparable(case.twin())
        try:
            torch.testing.assert_close(got, want, **within)
        except AssertionError as error:
            wrong += 1
            print(f"DIFFERS: {case.kernel} at {case.shape}: {error}")
        else:
            print(f"equal: {case.kernel} at {case.shape}")
    return wrong


def comparable(found: Any) -> Any:
    """8 bits as numbers."""
    if isinstance(found, Fp8):
        return found.data.float(), found.scale
    return [comparable(each) for each in found] if isinstance(found, tuple | list) else found


# ---- tiles of the weight gradient ------------------------------------------------------------------------------------


def tune(shapes: tuple[Shape, ...] = SHAPES) -> list[dict[str, Any]]:
    """Every candidate at every product, the best three and the present setting told; compiled beforehand by several
    processes, through Triton's cache on the disk."""
    products = [(s, part, n, k) for s in shapes for part, n, k in products_of(s)]
    if torch.cuda.is_available():
        wanted = [(n, k, tiles) for *_, n, k in products for tiles in CANDIDATES]
        workers = min(12, os.cpu_count() or 1)
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            list(pool.map(compile_weight_grad, *zip(*wanted, strict=True), chunksize=2))
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    found: list[dict[str, Any]] = []
    total = dict.fromkeys(CANDIDATES, 0.0)
    for shape, part, n, k in products:
        rows = shape.tokens * shape.slots
        ids = torch.rand(shape.tokens, shape.experts, device=device).topk(shape.slots).indices
        ends = plain_order_slots(ids, ids, shape.experts, rows).ends_E
        dy, x = (torch.randn(rows, width, dtype=dtype, device=device) for width in (n, k))
        main = torch.zeros(shape.experts, n, k, device=device)

        def run(tiles: Tiles) -> Any:
            return weight_grad("", "", dy, x, main, main, ends, tiles).run()  # noqa: B023

        tried = best_of(f"{shape.name} {part}", CANDIDATES, kernels.WEIGHT_GRAD_TILES, run, 2.0 * rows * n * k)
        for ms, tiles in tried:
            found.append({"shape": shape.name, "part": part, "tiles": tiles._asdict(), "ms": ms})
            total[tiles] += ms
    for ms, tiles in sorted((ms, tiles) for tiles, ms in total.items())[:3]:
        print(f"tiles over all products: {tuple(tiles)} {ms:.3f} ms; now {total[kernels.WEIGHT_GRAD_TILES]:.3f} ms")
    return found


def best_of(
    label: str, candidates: Sequence[Any], now: Any, run: Callable[[Any], object], flops: float = 0.0
) -> list[tuple[float, Any]]:
    """Milliseconds with each candidate, best first; the best three and the present one are told."""
    tried: list[tuple[float, Any]] = []
    for tiles in candidates:
        try:
            ms = milliseconds(lambda: run(tiles), 7)  # noqa: B023
        except Exception as error:  # too much shared memory, say
            print(f"{label} {tuple(tiles)}: {str(error).splitlines()[0][:100]}")
            ms = float("inf")
        tried.append((ms, tiles))
    tried.sort()
    best = "; ".join(f"{tuple(tiles)} {ms:.3f} ms" for ms, tiles in tried[:3])
    present = next(ms for ms, tiles in tried if tiles == now)
    print(f"tiles {label}: {best}; now {present:.3f} ms" + (f" ({flops / present / 1e9:.0f} TFLOP/s)" if flops else ""))
    return tried


def tune_eight_bits(only: str, shapes: tuple[Shape, ...] = SHAPES) -> list[dict[str, Any]]:
    """As `only` says, or all: gated activations and weights, with a scale a row, and the experts' products."""
    device, found = "cuda" if torch.cuda.is_available() else "cpu", list[dict[str, Any]]()

    def rand(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device).bfloat16()

    def tell(shape: Shape, part: str, *about: Any) -> None:
        tried = best_of(f"fp8 {shape.name} {part}", *about)
        found.extend({"shape": shape.name, "part": part, "tiles": tiles._asdict(), "ms": ms} for ms, tiles in tried)

    for shape in shapes:
        ids = torch.rand(shape.tokens, shape.experts, device=device).topk(shape.slots).indices
        slots = plain_order_slots(ids, ids, shape.experts, shape.tokens * shape.slots)
        ends, rows, glu, width = slots.ends_E, len(slots.row_R), shape.glu, shape.width
        if "glu" in only or only == "fp8":
            gate_up, da, weight = rand(rows, 2 * width), rand(rows, width), torch.rand(rows, device=device)
            bias = torch.randn(shape.experts, 2 * width, device=device) if shape.bias else None
            options, now = (glu.alpha, glu.limit, glu.offset, bias, slots.expert_R, 0), fp8_kernels.GLU_COLUMNS
            tell(shape, "glu", COLUMNS, now, lambda x: fp8_kernels.glu(gate_up, weight, *options, x))  # noqa: B023
            back = fp8_kernels.glu_backward
            tell(shape, "glu_backward", COLUMNS, now, lambda x: back(da, gate_up, weight, *options, x))  # noqa: B023
        for part, n, k in products_of(shape):
            matrices = rand(shape.experts, n, k)
            if "weight" in only or only == "fp8":
                now = fp8_kernels.WEIGHT_TILES
                tell(shape, part, WEIGHTS, now, lambda x: fp8_kernels.quantize_weight(matrices, 0, x))  # noqa: B023
            if not ("grouped" in only or only == "fp8"):
                continue
            recipes: tuple[Recipe, ...] = ("rowwise",) if n % 128 or k % 128 else ("rowwise", "blockwise")
            for recipe in recipes:
                both, group = fp8.quantize_weight(matrices, recipe), GROUP[recipe]
                for word, w, inner in (("", both.forward, k), (" dgrad", both.dgrad, n)):
                    x, multiply = fp8.quantize(rand(rows, inner), recipe), fp8_kernels.grouped_product
                    run = lambda tiles: multiply(x, w, ends, group, tiles)  # noqa: B023, E731
                    about = PRODUCTS[group], fp8_kernels.PRODUCT_TILES[group], run, 2.0 * rows * n * k
                    tell(shape, f"{part}{word} {recipe}", *about)
    return found


def products_of(shape: Shape) -> tuple[tuple[str, int, int], ...]:
    return ("gate_up", 2 * shape.width, shape.hidden), ("down", shape.hidden, shape.width)


def compile_weight_grad(n: int, k: int, tiles: Tiles) -> None:
    """As `kernels.add_grouped_weight_grad` will ask for it; what fails here fails there again and is told there."""
    types = (torch.bfloat16, torch.bfloat16, torch.float32, torch.int32)
    blocks = (n, k, kernels._block(n, tiles.n), kernels._block(k, tiles.k), tiles.rows, tiles.group, 1)
    with contextlib.suppress(triton.OutOfResources):
        kernels._grouped_weight_grad.warmup(*types, *blocks, grid=(1,), num_warps=tiles.warps, num_stages=tiles.stages)


if __name__ == "__main__":
    main()
