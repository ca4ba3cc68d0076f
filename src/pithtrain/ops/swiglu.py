"""SwiGLU, with the routing weight folded in for routed experts.

act = silu(gate) * up;    a = w * act            (one rounding, after the weight)
dgate = dact * up * (s + gate s (1 - s)),  s = sigmoid(gate);   dup = dact * silu(gate);   dw = <da, act>
"""

import torch.nn.functional as F
from torch import Tensor

from pithtrain.ops.linear import accumulate_dtype


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, pointwise, computed in fp32 and rounded once."""
    dtype = accumulate_dtype(gate.dtype)
    return (F.silu(gate.to(dtype)) * up.to(dtype)).to(gate.dtype)


def weighted_swiglu(gate_up: Tensor, weight: Tensor) -> Tensor:
    """gate_up [R, 2I] (gate first), weight [R] fp32 -> w * silu(gate) * up, [R, I] in gate_up's dtype."""
    gate, up = gate_up.to(weight.dtype).chunk(2, dim=-1)
    return (weight[:, None] * (F.silu(gate) * up)).to(gate_up.dtype)


def weighted_swiglu_backward(da: Tensor, gate_up: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """da [R, I] -> (d gate_up [R, 2I] in gate_up's dtype, d weight [R] fp32)."""
    gate, up = gate_up.to(weight.dtype).chunk(2, dim=-1)
    da = da.to(weight.dtype)
    s = gate.sigmoid()
    silu = gate * s
    dweight = (da * silu * up).sum(-1)
    dact = weight[:, None] * da
    dgate_up = gate_up.new_empty(gate_up.shape)
    dgate, dup = dgate_up.chunk(2, dim=-1)
    dgate.copy_(dact * up * (s + silu * (1 - s)))
    dup.copy_(dact * silu)
    return dgate_up, dweight
