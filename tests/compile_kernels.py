"""Compiles every Triton kernel for Hopper and Blackwell, without a GPU: `python tests/compile_kernels.py`.

The interpreter runs what the compiler refuses (`if` of a float, for one). The wrappers are called as a step calls them,
with small CPU tensors; a launch is replaced by the compilation of what would have been launched. Prints a line each.
"""

import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from pithtrain.ops import fp8_kernels, kernels, permute_kernels
from pithtrain.ops.fp8 import E4M3, plain_quantize_weight
from pithtrain.ops.permute import SlotBias, unpack
from pithtrain.ops.rounding import rounding_keys

BF16, FP32, INT64 = torch.bfloat16, torch.float32, torch.int64
NAMES = {BF16: "*bf16", FP32: "*fp32", INT64: "*i64", torch.int32: "*i32", torch.float64: "*fp64"}
NAMES[E4M3] = "*fp8e4nv"


def type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return NAMES[value.dtype]
    if isinstance(value, bool) or value is None:
        return "constexpr"
    if isinstance(value, int):
        return "i32" if abs(value) < 2**31 else "i64"
    return "fp32"


class Compiled:
    """Stands where a kernel stood: kernel[grid](arguments) compiles."""

    def __init__(self, name: str, kernel: JITFunction[Any]):
        self.name, self.kernel = name, kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.launch

    def launch(self, *arguments: Any, **options: Any) -> None:
        values = dict(zip(self.kernel.arg_names, arguments, strict=False))
        values |= {name: options.pop(name) for name in [*options] if name in self.kernel.arg_names}
        fixed = {p.name for p in self.kernel.params if p.is_constexpr}
        signature = {name: "constexpr" if name in fixed else type_of(value) for name, value in values.items()}
        constants = {name: value for name, value in values.items() if signature[name] == "constexpr"}
        for arch in (90, 100):
            source = ASTSource(self.kernel, signature, constexprs=constants)
            triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        print(self.name, sorted(constants.items(), key=str), flush=True)


def main() -> None:
    for module in (kernels, permute_kernels, fp8_kernels):
        for name, kernel in [*vars(module).items()]:
            if isinstance(kernel, JITFunction) and any(p.is_constexpr for p in kernel.params) and name not in INNER:
                setattr(module, name, Compiled(name, kernel))
    rows, hidden, width, experts = 64, 256, 128, 4
    slots, gate_up = torch.zeros(rows, hidden, dtype=BF16), torch.zeros(rows, 2 * width, dtype=BF16)
    weight, expert = torch.zeros(rows), torch.zeros(rows, dtype=INT64)
    ends = torch.full((experts,), rows, dtype=torch.int32)
    bias = SlotBias(torch.zeros(experts, hidden), expert, weight)
    index = torch.zeros(16, 2, 2, dtype=INT64)
    ids, routing = torch.zeros(rows, 8, dtype=INT64), torch.zeros(rows, 8)
    for dedup in (True, False):
        records = permute_kernels.plan_rows(ids, routing, 2, 4, dedup).records_Ur
        permute_kernels.order_slots(*unpack(records, FP32), 4, rows)
    permute_kernels.order_slots(ids, routing, 128, rows)
    for more in (None, bias):
        kernels.ordered_sum(slots, index, more, [slots[:16]] * 2)
    for limit, offset, own in ((None, 0.0, None), (7.0, 1.0, torch.zeros(experts, 2 * width))):
        kernels.glu(gate_up, weight, 1.0, limit, offset, own, expert)
        kernels.glu_backward(gate_up[:, :width].contiguous(), gate_up, weight, 1.0, limit, offset, own, expert)
    for z_coef in (0.0, 1e-4):
        kernels.cross_entropy(torch.zeros(rows, 50_000), expert, weight[0], BF16, z_coef)
    for beta in (0, 1):
        kernels.add_grouped_weight_grad(torch.zeros(experts, hidden, width), beta, slots, gate_up[:, :width], ends)
        for own, row in ((None, None), (weight, None), (weight, expert)):
            kernels.add_grouped_sum(torch.zeros(experts, hidden), beta, slots, own, ends, row)
    for moments in (FP32, BF16):
        state = torch.zeros(rows), *(torch.zeros(rows, dtype=moments) for _ in range(2)), torch.zeros(rows)
        scalars = [torch.zeros(())] * 3
        options = (1e-3, (0.9, 0.95), 1e-8, 0.1, rounding_keys(0, "w"), 0)
        kernels.adamw(*state, torch.zeros(rows, dtype=BF16), *scalars, *options)
        ahead = torch.zeros(rows, dtype=BF16)
        kernels.look_ahead(state[1], state[3], ahead, *scalars, 0.95, rounding_keys(0, "w"), 0)
    for dtype in (BF16, FP32):
        kernels.move(state[0], ahead, torch.zeros(rows, dtype=dtype), scalars[0], 1e-3, 1.0, 0.1)
    out, lse, sinks = torch.zeros(2, 16, 8, 64, dtype=BF16), torch.zeros(2, 8, 16), torch.zeros(8)
    for acc, more in ((out.float(), out), (out, out), (out.float(), None), (out, None)):
        kernels.merge(acc, lse, more, sinks[:, None].expand_as(lse) if more is None else lse)
    kernels.sinks_grad(out, out, lse, sinks)
    in_8_bits(rows, hidden, experts, ends)


def in_8_bits(rows: int, hidden: int, experts: int, ends: Tensor) -> None:
    x, weight, expert = torch.zeros(rows, hidden, dtype=BF16), torch.zeros(rows), torch.zeros(rows, dtype=INT64)
    matrices = torch.zeros(experts, 256, hidden, dtype=BF16)
    for group in (0, 128, 32):
        quantized = fp8_kernels.quantize_rows(x, group)
        for limit, offset, bias in ((None, 0.0, None), (7.0, 1.0, torch.zeros(experts, hidden))):
            options = (1.0, limit, offset, bias, expert, group)
            fp8_kernels.glu(x, weight, *options)
            fp8_kernels.glu_backward(x[:, : hidden // 2].contiguous(), x, weight, *options)
        if group != 32:
            fp8_kernels.quantize_weight(matrices, group)
        if group != 32:
            form = plain_quantize_weight(matrices, "blockwise" if group else "rowwise").forward
            for row, few in ((None, 0), (None, rows), (expert, 0), (expert, rows)):
                fp8_kernels.FEW = few
                fp8_kernels.grouped_product(quantized._replace(row_R=row), form, ends, group)
    odd = plain_quantize_weight(torch.zeros(experts, 2880, 2880, dtype=BF16), "rowwise").forward
    fp8_kernels.grouped_product(fp8_kernels.quantize_rows(torch.zeros(rows, 2880, dtype=BF16), 0), odd, ends, 0)
    wide, gate_up = (torch.zeros(4, size, dtype=BF16) for size in (10944, 5760))
    fp8_kernels.quantize_rows(wide, 0)
    fp8_kernels.quantize_weight(wide, 0)
    options = (1.0, 7.0, 1.0, torch.zeros(experts, 5760), expert, 0)
    fp8_kernels.glu(gate_up, weight, *options)
    fp8_kernels.glu_backward(gate_up[:, :2880].contiguous(), gate_up, weight, *options)


INNER = (
    "_gate_and_up",
    "_gate_and_up_backward",
    "_ranks",
    "_amax",
    "_bits",
    "_store",
    "_tile",
)  # called by kernels, never launched

if __name__ == "__main__":
    sys.exit(main())
