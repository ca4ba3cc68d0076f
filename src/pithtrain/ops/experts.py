"""The routed experts of one layer on one rank, forward and backward by hand.

    X = rows[row_R];  gu = X Wgu_e^T;  a = w * silu(g) u;  y = a Wd_e^T;  out[row] = sum over its slots of y      (fp32)
    dY = dout[row_R];  da = dY Wd_e;  (dgu, dw) = swiglu'(da);  drows[row] = sum over its slots of dgu Wgu_e      (fp32)
    closures:  Wd_e += dY^T a,   Wgu_e += dgu^T X

The routing weight enters before the down projection, in fp32 and before the one rounding, so the combine is a plain
sum and its transpose needs indices only. Saved from forward to backward: X (or the rows), gu. Recomputed: a, in W.

Legend: U rows received, q slots per row, R slots, H hidden, I expert width.
"""

from dataclasses import dataclass

from torch import Tensor

from pithtrain.ops.grouped import add_grouped_weight_grad, grouped_linear, grouped_linear_dx
from pithtrain.ops.linear import Weight, WeightGrad, accumulate_dtype
from pithtrain.ops.permute import order_slots, ordered_sum
from pithtrain.ops.swiglu import weighted_swiglu, weighted_swiglu_backward


@dataclass(frozen=True)
class Experts:
    """This rank's routed experts of a layer: gate_up [e, 2I, H] with the gate first, down [e, H, I]."""

    gate_up: Weight
    down: Weight


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
        rows = received.rows_UH
        self._records = received.weights_Uq.shape
        self._slots = slots = order_slots(received.local_Uq, self._experts.gate_up.data.shape[0], received.num_slots)
        self._w_R = received.weights_Uq.reshape(-1)[slots.record_R]
        self._x_RH = rows[slots.row_R]
        self._gate_up = grouped_linear(self._x_RH, self._experts.gate_up.data, slots.ends_E)
        act = weighted_swiglu(self._gate_up, self._w_R)
        y_RH = grouped_linear(act, self._experts.down.data, slots.ends_E)
        return ordered_sum(y_RH, slots.slot_Uq, accumulate_dtype(rows.dtype)).to(rows.dtype)

    def backward(self, dout_UH: Tensor, ready: list[WeightGrad]) -> tuple[Tensor, Tensor]:
        """-> (drows [U, H] in compute dtype, dweights [U, q] fp32); appends two weight-gradient closures."""
        gate_up, down, slots = self._experts.gate_up, self._experts.down, self._slots
        x_RH, gu, w_R, ends = self._x_RH, self._gate_up, self._w_R, slots.ends_E
        dy_RH = dout_UH[slots.row_R]
        dgu, dw_R = weighted_swiglu_backward(grouped_linear_dx(dy_RH, down.data, ends), gu, w_R)
        dx_RH = grouped_linear_dx(dgu, gate_up.data, ends)
        drows = ordered_sum(dx_RH, slots.slot_Uq, accumulate_dtype(dx_RH.dtype)).to(dx_RH.dtype)
        dweights = w_R.new_zeros(self._records)
        dweights.view(-1)[slots.record_R] = dw_R
        ready.append(lambda: down.add(lambda m: add_grouped_weight_grad(m, dy_RH, weighted_swiglu(gu, w_R), ends)))
        ready.append(lambda: gate_up.add(lambda m: add_grouped_weight_grad(m, dgu, x_RH, ends)))
        del self._x_RH, self._gate_up, self._w_R, self._slots
        return drows, dweights
