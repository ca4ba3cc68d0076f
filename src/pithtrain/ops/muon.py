"""Muon's direction: a matrix with the singular vectors of the momentum and singular values near 1.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). AdamW scales each number by itself;
a matrix is better moved by as much along its rare directions as along its common ones. With M = U S V^T that is U V^T,
which five Newton-Schulz steps come near to without a decomposition, by products alone:

    X <- M / |M|;   five times  A = X X^T,  X <- a X + (b A + c A A) X

(a, b, c) take every singular value from 0.003 on to between 0.7 and 1.2, not to 1: the exact value does not matter, and
half as many steps do. A matrix with more rows than columns is multiplied by X^T X from the right instead.

U V^T of a matrix [out, in] has a root mean square of 1 / sqrt(max(out, in)), and an AdamW update of some 0.2: with
`SCALE` sqrt(max(out, in)) both move as far, and one learning rate and weight decay serve both (Liu et al., "Muon is
scalable for LLM training", 2025, arXiv 2502.16982, section 2.2).
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
SCALE = 0.2
SMALLEST_NORM = 1e-7  # below it a matrix stays small: all its numbers may be 0


def flops(out: int, width: int) -> int:
    """Of one matrix."""
    m, n = min(out, width), max(out, width)
    return STEPS * 2 * (2 * m * m * n + m**3)


def orthogonalize(matrices: Tensor) -> Tensor:
    """[M, out, in] to the same shape and dtype; each matrix by itself. bf16 is enough; memory: its own size twice more,
    and M x min(out, in)^2 twice."""
    tall = matrices.shape[1] > matrices.shape[2]
    a, b, c = COEFFICIENTS
    x = matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(STEPS):
        gram = x.mT @ x if tall else x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, *((x, polynomial) if tall else (polynomial, x)), beta=a)
    return x
