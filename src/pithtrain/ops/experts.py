"""The routed experts of one layer on one rank, forward and backward by hand.

    X = rows[row_R];  gu = X Wgu_e^T (+ b_gu);  a = w * act(gu);  y = a Wd_e^T (+ w b_d)
    out[row] = sum over its slots of y                                                                            (fp32)
    dY = dout[row_R];  da = dY Wd_e;  (dgu, dw) = act'(da);  dw += <dY, b_d>
    drows[row] = sum over its slots of dgu Wgu_e                                                                  (fp32)
    closures:  Wd_e += dY^T a,   Wgu_e += dgu^T X,   b_d += sum w dY,   b_gu += sum dgu                           (fp32)

The routing weight enters before the down projection, in fp32 and before the one rounding, so the combine is a plain
sum and its transpose needs indices only. Saved from forward to backward: X (or the rows), gu. Recomputed: a, in W.

Rounded to compute dtype are the operands and results of the products (X Wgu^T, a, a Wd^T, dY, da, dgu), out and drows,
each once. Biases are fp32 and are added in fp32: to the rounded product, and to nothing rounded afterwards except out.

Legend: U rows received, q slots per row, R slots, H hidden, I expert width.
"""

from dataclasses import dataclass

from torch import Tensor

from pithtrain.ops.grouped import add_grouped_sum, add_grouped_weight_grad, grouped_linear, grouped_linear_dx
from pithtrain.ops.linear import Weight, WeightGrad, accumulate_dtype
from pithtrain.ops.permute import order_slots, ordered_sum
from pithtrain.ops.swiglu import SILU, Glu, weighted_swiglu, weighted_swiglu_backward


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
    of slots that are not padding."""

    rows_UH: Tensor
    local_Uq: Tensor
    weights_Uq: Tensor
    num_slots: int


class ExpertSegment:
    """One call of a layer's experts, and what its backward needs."""

    def __init__(self, experts: Experts):
        self._experts = experts

    def forward(self, received: Received) -> Tensor:
        """The weighted sum over its slots of every received row, [U, H] in compute dtype."""
        rows, experts = received.rows_UH, self._experts
        self._records = received.weights_Uq.shape
        self._slots = slots = order_slots(received.local_Uq, experts.gate_up.data.shape[0], received.num_slots)
        self._w_R = received.weights_Uq.reshape(-1)[slots.record_R]
        self._x_RH = rows[slots.row_R]
        self._gate_up = grouped_linear(self._x_RH, experts.gate_up.data, slots.ends_E)
        act = _activation(experts, self._gate_up, self._w_R, slots.expert_R)
        y_RH = grouped_linear(act, experts.down.data, slots.ends_E)
        y_RH = _biased(y_RH, experts.down_bias, slots.expert_R, self._w_R)
        return ordered_sum(y_RH, slots.slot_Uq, accumulate_dtype(rows.dtype)).to(rows.dtype)

    def backward(self, dout_UH: Tensor, ready: list[WeightGrad]) -> tuple[Tensor, Tensor]:
        """-> (drows [U, H] in compute dtype, dweights [U, q] fp32); appends a closure for each weight and bias."""
        experts, slots = self._experts, self._slots
        x_RH, gu, w_R, expert_R, ends = self._x_RH, self._gate_up, self._w_R, slots.expert_R, slots.ends_E
        dy_RH = dout_UH[slots.row_R]
        da = grouped_linear_dx(dy_RH, experts.down.data, ends)
        dgu, dw_R = weighted_swiglu_backward(da, _biased(gu, experts.gate_up_bias, expert_R), w_R, experts.glu)
        if experts.down_bias is not None:
            dw_R += experts.down_bias.data[expert_R].mul_(dy_RH).sum(-1)
        dx_RH = grouped_linear_dx(dgu, experts.gate_up.data, ends)
        drows = ordered_sum(dx_RH, slots.slot_Uq, accumulate_dtype(dx_RH.dtype)).to(dx_RH.dtype)
        dweights = w_R.new_zeros(self._records)
        dweights.view(-1)[slots.record_R] = dw_R

        def add_down(main: Tensor) -> None:
            add_grouped_weight_grad(main, dy_RH, _activation(experts, gu, w_R, expert_R), ends)

        ready.append(lambda: experts.down.add(add_down))
        ready.append(lambda: experts.gate_up.add(lambda m: add_grouped_weight_grad(m, dgu, x_RH, ends)))
        if (down_bias := experts.down_bias) is not None:
            ready.append(lambda: down_bias.add(lambda m: add_grouped_sum(m, w_R[:, None] * dy_RH, ends)))
        if (gate_up_bias := experts.gate_up_bias) is not None:
            ready.append(lambda: gate_up_bias.add(lambda m: add_grouped_sum(m, dgu, ends)))
        del self._x_RH, self._gate_up, self._w_R, self._slots
        return drows, dweights


def _activation(experts: Experts, gate_up: Tensor, w_R: Tensor, expert_R: Tensor) -> Tensor:
    """w * act(gate_up + bias), [R, I] in gate_up's dtype."""
    biased = _biased(gate_up, experts.gate_up_bias, expert_R)
    return weighted_swiglu(biased, w_R, experts.glu, gate_up.dtype)


def _biased(y_RN: Tensor, bias: Weight | None, expert_R: Tensor, w_R: Tensor | None = None) -> Tensor:
    """y + w b of each row's expert, in the bias's fp32; without a bias y as it is."""
    if bias is None:
        return y_RN
    rows = bias.data[expert_R]  # a copy, in which the sum is made: one temporary
    return (rows if w_R is None else rows.mul_(w_R[:, None])).add_(y_RN)
