"""The head's linear and the cross entropy in one pass over chunks of tokens: the logits never exist as a whole.

    s = h W^T (fp32);  lse = logsumexp(s);  loss += scale * sum over valid tokens of (lse - s[y]);  z += scale * lse^2
    g[v] = valid * scale * (softmax(s)[v] * (1 + 2 c lse) - [v == y]);  dh = g W;  W.main_grad += g^T h (fp32)

Trained on is loss + c z, c = `z_coef`, which keeps lse near 0 (PaLM, Chowdhery et al. 2022, section 5). Its gradient by
itself is 1, so forward does all of it: the last stage's backward starts from dh. `scale` is one over the valid tokens
of the *global* batch, the only scaling of a gradient anywhere. Peak memory is one chunk of fp32 logits and its copy in
compute dtype: 2,048 x 151,936 x (4 + 2) B = 1.9 GB for Qwen3.
"""

import torch
from torch import Tensor

from pithtrain.ops.linear import Weight, accumulate_dtype, add_weight_grad

CHUNK = 2048  # 4,096 are 1 % faster and hold 1.9 GB more; at ~600 adding into main_grad costs as much as the GEMM
IGNORE = -100


def linear_cross_entropy(
    h_TH: Tensor, weight: Weight, labels_T: Tensor, scale: Tensor, z_coef: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """-> (scale * summed loss; scale * summed lse^2, 0 without `z_coef`: fp32 scalars; the gradient of loss + z_coef z
    for h, [T, H] in h's dtype). Adds to weight.main_grad once.

    labels_T int64; IGNORE marks a token without loss. All other labels are in the vocabulary: `data` has checked.
    """
    dh_TH = torch.empty_like(h_TH)
    loss, z = torch.zeros(2, dtype=accumulate_dtype(h_TH.dtype), device=h_TH.device)

    def chunks(main_grad: Tensor, beta: int) -> None:
        for start in range(0, h_TH.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            logits_TV = _logits(h_TH[part], weight.data)
            chunk_loss, chunk_z, grad_TV = _loss_and_grad(logits_TV, labels_T[part], scale, h_TH.dtype, z_coef)
            loss.add_(chunk_loss)
            if z_coef:
                z.add_(chunk_z)
            torch.mm(grad_TV, weight.data, out=dh_TH[part])
            add_weight_grad(main_grad, 1 if start else beta, grad_TV, h_TH[part])

    weight.add(chunks)
    return loss, z, dh_TH


def linear_cross_entropy_loss(h_TH: Tensor, w_VH: Tensor, labels_T: Tensor, scale: Tensor) -> Tensor:
    """The same loss bitwise, of text that is not learnt from. Its gradient by the logits is made and dropped: the pass
    that finds the loss writes it."""
    loss = torch.zeros((), dtype=accumulate_dtype(h_TH.dtype), device=h_TH.device)
    for h, labels in zip(h_TH.split(CHUNK), labels_T.split(CHUNK), strict=True):
        loss += _loss_and_grad(_logits(h, w_VH), labels, scale, h_TH.dtype, 0.0)[0]
    return loss


def _logits(h_TH: Tensor, w_VH: Tensor) -> Tensor:
    dtype = accumulate_dtype(h_TH.dtype)
    if h_TH.is_cuda and h_TH.dtype != dtype:
        return torch.mm(h_TH, w_VH.t(), out_dtype=dtype)
    return h_TH.to(dtype) @ w_VH.to(dtype).t()


def _loss_and_grad(
    logits_TV: Tensor, labels_T: Tensor, scale: Tensor, dtype: torch.dtype, z_coef: float
) -> tuple[Tensor, Tensor, Tensor]:
    if logits_TV.is_cuda and dtype == torch.bfloat16:
        from pithtrain.ops import kernels

        return kernels.cross_entropy(logits_TV, labels_T, scale, dtype, z_coef)
    loss, z, grad = plain_loss_and_grad(logits_TV, labels_T, scale, z_coef)
    return loss, z, grad.to(dtype)


def plain_loss_and_grad(
    logits_TV: Tensor, labels_T: Tensor, scale: Tensor, z_coef: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """The twin, in place: logits_TV becomes the gradient, and no second [T, V] is made. -> loss, z, gradient."""
    valid = labels_T != IGNORE
    target = labels_T.where(valid, 0)[:, None]
    top = logits_TV.amax(-1, keepdim=True)
    at_target = logits_TV.gather(1, target) - top
    total = logits_TV.sub_(top).exp_().sum(-1, keepdim=True)
    loss = (total.log() - at_target).squeeze(1).where(valid, 0).sum() * scale
    lse = top + total.log()
    z = (lse.square().squeeze(1).where(valid, 0).sum() * scale) if z_coef else torch.zeros_like(loss)
    grad = logits_TV.mul_((1 + 2 * z_coef * lse) / total) if z_coef else logits_TV.div_(total)
    grad.scatter_add_(1, target, grad.new_full(target.shape, -1.0))
    return loss, z, grad.mul_((valid * scale)[:, None])
