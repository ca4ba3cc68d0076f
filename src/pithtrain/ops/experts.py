"""The routed experts of one layer on one rank, forward and backward by hand.

    X = rows[row_R];  gu = X Wgu_e^T (+ b_gu);  a = w * act(gu);  y = a Wd_e^T (+ w b_d)
    out[row] = sum over its slots of y                                                                            (fp32)
    dY = dout[row_R];  da = dY Wd_e;  (dgu, dw) = act'(da);  dw += <dY, b_d>
    drows[row] = sum over its slots of dgu Wgu_e                                                                  (fp32)
    closures:  Wd_e += dY^T a,   Wgu_e += dgu^T X,   b_d += sum w dY,   b_gu += sum dgu                           (fp32)

The routing weight enters before the down projection, in fp32 and before the one rounding, so the combine is a plain
sum and its transpose needs indices only. Kept from forward to backward, beside w and indices:

    none        X, gu          2 k H + 4 k I bytes per token in bf16, k experts per token
    selective   rows, gu       2 D H + 4 k I, D the mean number of ranks that a token visits; X is gathered again in W,
                               and dY, so that a weight gradient put aside keeps no slots of width H
    full        rows           2 D H; gu is computed again too, before the backward: one of the forward's two products

In 8 bits `none` is `selective`: no product takes X in compute dtype, so that to keep it would be to make it. Where ep
is 1 the rows are the attention segment's n, which is there already. `a` is not kept: the backward of the activation
reads all that it takes, and gives it to W.

In 8 bits (`ops/fp8`) the operands of the four products of forward and inputs' gradients are a and dgu, quantised in the
pass that makes them, the quantised rows and dout, whose slots the products find, and the weights' forms; closures take
X, a, dY and dgu as they were.

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
        recipes = experts.gate_up.recipe, experts.down.recipe
        self.keeps_slots = recompute == "none" and recipes == (None, None)  # else rows are read again in W

    def forward(self, received: Received) -> Tensor:
        """The weighted sum over its slots of every received row, [U, H] in compute dtype."""
        rows, experts = received.rows_UH, self._experts
        self._records = received.weights_Uq.shape
        num_experts = experts.gate_up.data.shape[0]
        self._slots = slots = order_slots(received.local_Uq, received.weights_Uq, num_experts, received.num_slots)
        operand = _gathered(rows, slots.row_R, experts.gate_up.recipe)
        gate_up = grouped_linear(operand, experts.gate_up.operand(), slots.ends_E)
        self._x = self._for_w(operand, rows)
        up_bias, recipe = _data(experts.gate_up_bias), experts.down.recipe
        self._gate_up = None if self._recompute == "full" else gate_up
        act = expert_activation(gate_up, slots.weight_R, experts.glu, up_bias, slots.expert_R, recipe)
        y_RH = grouped_linear(act, experts.down.operand(), slots.ends_E)
        down_bias = experts.down_bias
        bias = None if down_bias is None else SlotBias(down_bias.data, slots.expert_R, slots.weight_R)
        return ordered_sum(y_RH, slots.slot_U1q, bias)

    def rerun(self) -> None:
        """Compute gate and up again, if they were not kept. The backward does; earlier, it may hide a transfer."""
        if self._gate_up is None:
            weight = self._experts.gate_up
            operand = _gathered(self._x, self._slots.row_R, weight.recipe)
            self._gate_up = grouped_linear(operand, weight.operand(), self._slots.ends_E)

    def _for_w(self, operand: Tensor | Fp8, rows_UH: Tensor) -> Tensor:
        """What a weight gradient keeps of rows[row]: the slots, or the rows that it gathers again."""
        return operand if self.keeps_slots and isinstance(operand, Tensor) else rows_UH

    def backward(self, dout_UH: Tensor, ready: list[WeightGrad]) -> tuple[Tensor, Tensor]:
        """-> (drows [U, H] in compute dtype, dweights [U, q] fp32); appends a closure for each weight and bias."""
        self.rerun()
        experts, slots, x, gu = self._experts, self._slots, self._x, self._gate_up
        assert gu is not None
        w_R, expert_R, ends = slots.weight_R, slots.expert_R, slots.ends_E
        row_R = None if self.keeps_slots else slots.row_R
        operand = _gathered(dout_UH, slots.row_R, experts.down.recipe)
        dy = self._for_w(operand, dout_UH)
        da = grouped_linear_dx(operand, experts.down.operand(), ends)
        up_bias, recipe = _data(experts.gate_up_bias), experts.gate_up.recipe
        dgu, dw_R, act, operand = expert_activation_backward(da, gu, w_R, experts.glu, up_bias, expert_R, recipe)
        if experts.down_bias is not None:
            bias_EH = experts.down_bias.data  # <dout, b_e> of each row and expert: less than one of each slot
            dw_R += F.linear(dout_UH.to(bias_EH.dtype), bias_EH)[slots.row_R, expert_R]
        dx_RH = grouped_linear_dx(operand, experts.gate_up.operand(), ends)
        drows = ordered_sum(dx_RH, slots.slot_U1q)
        dweights = w_R.new_zeros(self._records)
        dweights.view(-1)[slots.record_R] = dw_R

        def add_down(main: Tensor, beta: int) -> None:
            add_grouped_weight_grad(main, beta, _slots_of(dy, row_R), act, ends)

        def add_gate_up(main: Tensor, beta: int) -> None:
            add_grouped_weight_grad(main, beta, dgu, _slots_of(x, row_R), ends)

        def add_down_bias(main: Tensor, beta: int) -> None:
            add_grouped_sum(main, beta, dy, w_R, ends, row_R)

        def add_gate_up_bias(main: Tensor, beta: int) -> None:
            add_grouped_sum(main, beta, dgu, None, ends)

        ready.append(lambda: experts.down.add(add_down))
        ready.append(lambda: experts.gate_up.add(add_gate_up))
        if (down_bias := experts.down_bias) is not None:
            ready.append(lambda: down_bias.add(add_down_bias))
        if (up_bias := experts.gate_up_bias) is not None:
            ready.append(lambda: up_bias.add(add_gate_up_bias))
        del self._x, self._gate_up, self._slots
        return drows, dweights


def _gathered(rows: Tensor, row_R: Tensor, recipe: Recipe | None) -> Tensor | Fp8:
    """rows[row] as a product takes it: in 8 bits each row is quantised once, and the product finds it."""
    return gather_rows(rows, row_R) if recipe is None else fp8.quantize(rows, recipe)._replace(row_R=row_R)


def _slots_of(kept: Tensor, row_R: Tensor | None) -> Tensor:
    """[R, H] from rows, or as it was kept."""
    return kept if row_R is None else gather_rows(kept, row_R)


def _data(weight: Weight | None) -> Tensor | None:
    return None if weight is None else weight.data
