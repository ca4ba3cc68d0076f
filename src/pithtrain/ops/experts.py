"""The routed experts of one layer on one rank, forward and backward by hand.

    X = rows[row_R];  gu = X Wgu_e^T (+ b_gu);  a = w * act(gu);  y = a Wd_e^T (+ w b_d)
    out[row] = sum over its slots of y                                                                            (fp32)
    dY = dout[row_R];  da = dY Wd_e;  (dgu, dw) = act'(da);  dw += <dY, b_d>
    drows[row] = sum over its slots of dgu Wgu_e                                                                  (fp32)
    closures:  Wd_e += dY^T a,   Wgu_e += dgu^T X,   b_d += sum w dY,   b_gu += sum dgu                           (fp32)

The routing weight enters before the down projection, in fp32 and before the one rounding, so the combine is a plain
sum and its transpose needs indices only. Kept from forward to backward, beside w and indices:

    none, selective   rows, gu    2 D H + 4 k I bytes per token in bf16, k experts per token, D the mean number of ranks
                                  that a token visits
    full              rows        2 D H; gu is computed again, before the backward: one of the forward's two products

Where ep is 1 the rows are the attention segment's n, which is there already. X and dY live as operands of a product
alone: weight gradients read rows[row_R] and dout[row_R] where they lie, so one that is put aside keeps no slots of
width H. `a` is not kept: the backward of the activation reads all that it takes, and gives it to W.

In 8 bits (`ops/fp8`) the operands of the four products of forward and inputs' gradients are X, a, dY and dgu quantised,
each in the pass that makes it, and the weights' forms; closures take rows, a, dout and dgu as they were.

Rounded to compute dtype are the operands and results of the products (X Wgu^T, a, a Wd^T, dY, da, dgu), out and drows,
each once. Biases are fp32 and are added in fp32: to the rounded product, and to nothing rounded afterwards except out.

Legend: U rows received, q slots per row, R slots, H hidden, I expert width.
"""

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from pithtrain.ops import fp8
from pithtrain.ops.fp8 import Fp8, Recipe
from pithtrain.ops.grouped import add_grouped_sum, add_grouped_weight_grad, grouped_linear, grouped_linear_dx
from pithtrain.ops.linear import Weight, WeightGrad
from pithtrain.ops.permute import SlotBias, gather_rows, order_slots, ordered_sum
from pithtrain.ops.swiglu import SILU, Glu, expert_activation, expert_activation_backward

Recompute = Literal["none", "selective", "full"]  # what a backward computes again


@dataclass(frozen=True)
class Experts:
    """This rank's routed experts of a layer: gate_up [e, 2I, H] with the gate first, down [e, H, I]; fp32 biases
    gate_up_bias [e, 2I] and down_bias [e, H], both or neither."""

    gate_up: Weight
    down: Weight
    gate_up_bias: Weight | None = None
    down_bias: Weight | None = None
    glu: Glu = SILU


@dataclass(frozen=True)
class Received:
    """What a rank's experts work on: rows_UH, local expert ids local_Uq (-1: padding), weights_Uq fp32, and the number
    of slots that are not padding. Ids and weights are read at once, and may lie where the next exchange lands."""

    rows_UH: Tensor
    local_Uq: Tensor
    weights_Uq: Tensor
    num_slots: int


class ExpertSegment:
    """One call of a layer's experts, and what its backward needs."""

    def __init__(self, experts: Experts, recompute: Recompute = "none"):
        self._experts, self._recompute = experts, recompute

    def forward(self, received: Received) -> Tensor:
        """The weighted sum over its slots of every received row, [U, H] in compute dtype."""
        experts, self._rows, self._records = self._experts, received.rows_UH, received.weights_Uq.shape
        num_experts = experts.gate_up.data.shape[0]
        self._slots = slots = order_slots(received.local_Uq, received.weights_Uq, num_experts, received.num_slots)
        gate_up = self._project()
        self._gate_up = None if self._recompute == "full" else gate_up
        up_bias, recipe = _data(experts.gate_up_bias), experts.down.recipe
        act = expert_activation(gate_up, slots.weight_R, experts.glu, up_bias, slots.expert_R, recipe)
        y_RH = grouped_linear(act, experts.down.operand(), slots.ends_E)
        down_bias = experts.down_bias
        bias = None if down_bias is None else SlotBias(down_bias.data, slots.expert_R, slots.weight_R)
        return ordered_sum(y_RH, slots.slot_U1q, bias)

    def rerun(self) -> None:
        """Compute gate and up again, if they were not kept. The backward does; earlier, it may hide a transfer."""
        if self._gate_up is None:
            self._gate_up = self._project()

    def _project(self) -> Tensor:
        weight, slots = self._experts.gate_up, self._slots
        return grouped_linear(_gathered(self._rows, slots.row_R, weight.recipe), weight.operand(), slots.ends_E)

    def backward(self, dout_UH: Tensor, ready: list[WeightGrad]) -> tuple[Tensor, Tensor]:
        """-> (drows [U, H] in compute dtype, dweights [U, q] fp32); appends a closure for each weight and bias."""
        self.rerun()
        experts, slots, rows_UH, gu = self._experts, self._slots, self._rows, self._gate_up
        assert gu is not None
        w_R, expert_R, row_R, ends = slots.weight_R, slots.expert_R, slots.row_R, slots.ends_E
        da = grouped_linear_dx(_gathered(dout_UH, row_R, experts.down.recipe), experts.down.operand(), ends)
        up_bias, recipe = _data(experts.gate_up_bias), experts.gate_up.recipe
        dgu, dw_R, act, operand = expert_activation_backward(da, gu, w_R, experts.glu, up_bias, expert_R, recipe)
        if experts.down_bias is not None:
            bias_EH = experts.down_bias.data  # <dout, b_e> of each row and expert: less than one of each slot
            dw_R += F.linear(dout_UH.to(bias_EH.dtype), bias_EH)[row_R, expert_R]
        dx_RH = grouped_linear_dx(operand, experts.gate_up.operand(), ends)
        drows = ordered_sum(dx_RH, slots.slot_U1q)
        dweights = w_R.new_zeros(self._records)
        dweights.view(-1)[slots.record_R] = dw_R

        def add_down(main: Tensor, beta: int) -> None:
            add_grouped_weight_grad(main, beta, dout_UH, act, ends, dy_row=row_R)

        def add_gate_up(main: Tensor, beta: int) -> None:
            add_grouped_weight_grad(main, beta, dgu, rows_UH, ends, x_row=row_R)

        def add_down_bias(main: Tensor, beta: int) -> None:
            add_grouped_sum(main, beta, dout_UH, w_R, ends, row_R)

        def add_gate_up_bias(main: Tensor, beta: int) -> None:
            add_grouped_sum(main, beta, dgu, None, ends)

        ready.append(lambda: experts.down.add(add_down))
        ready.append(lambda: experts.gate_up.add(add_gate_up))
        if (down_bias := experts.down_bias) is not None:
            ready.append(lambda: down_bias.add(add_down_bias))
        if (up_bias := experts.gate_up_bias) is not None:
            ready.append(lambda: up_bias.add(add_gate_up_bias))
        del self._rows, self._gate_up, self._slots
        return drows, dweights


def _gathered(rows_UH: Tensor, row_R: Tensor, recipe: Recipe | None) -> Tensor | Fp8:
    """rows[row] as a product takes it."""
    return gather_rows(rows_UH, row_R) if recipe is None else fp8.gather(rows_UH, row_R, recipe)


def _data(weight: Weight | None) -> Tensor | None:
    return None if weight is None else weight.data
