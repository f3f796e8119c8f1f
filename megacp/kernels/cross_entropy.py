"""Cross-entropy of a tile of logits whose gradient takes the place of the logits.

    loss_t = logsumexp(logits_tV) - logits_tV[label],   dlogits = softmax(logits) - onehot(label)

Worked example: one token, V = 2, logits_tV = [[0, 0]], labels_t = [1], grad_scale = 0.5. The loss is [ln 2] = [0.6931] and
logits_tV now holds [[0.25, -0.25]]. With labels_t = [IGNORE_INDEX] the loss is [0] and the row [[0, 0]].

Nothing of the size of the logits is allocated. On a GPU one Triton kernel does it all. In the plain-torch reference fp32 and
float64 logits are worked on in place, bf16 logits go through an fp32 buffer of at most `BUFFER_ELEMENTS` elements (256 MiB).
"""

import torch
from torch import Tensor

from megacp.kernels.precision import compute_dtype
from megacp.kernels.triton_support import are_rows, is_predicted, serves

IGNORE_INDEX = -100
BUFFER_ELEMENTS = 2**26


@torch.no_grad()
def cross_entropy_forward_backward_(logits_tV: Tensor, labels_t: Tensor, grad_scale: float) -> Tensor:
    """Loss per token, fp32 (float64 for float64 logits), 0 where the label is IGNORE_INDEX; overwrites the logits.

    logits_tV becomes grad_scale * d(sum of losses)/d(logits), rows of ignored labels become 0 whatever they held.
    Labels are int64 in [0, V) or IGNORE_INDEX. Another value reads nothing out of bounds: it is an index error of torch's, or from
    the Triton kernel a loss and a gradient row of nan.
    """
    if logits_tV.dim() != 2 or labels_t.shape != logits_tV.shape[:1]:
        raise ValueError(f"cross-entropy takes logits [t, V] and labels [t], not {list(logits_tV.shape)} and"
                         f" {list(labels_t.shape)}")
    if is_predicted(logits_tV):
        return torch.empty(len(logits_tV), dtype=torch.float32, device=logits_tV.device)
    if serves(logits_tV) and are_rows(logits_tV):
        from megacp.kernels.cross_entropy_triton import cross_entropy_forward_backward_triton_

        return cross_entropy_forward_backward_triton_(logits_tV, labels_t, grad_scale)
    return cross_entropy_forward_backward_reference_(logits_tV, labels_t, grad_scale)


@torch.no_grad()
def cross_entropy_forward_backward_reference_(logits_tV: Tensor, labels_t: Tensor, grad_scale: float) -> Tensor:
    """`cross_entropy_forward_backward_` in plain torch."""
    tokens, vocab = logits_tV.shape
    dtype = compute_dtype(logits_tV.dtype)
    in_place = logits_tV.dtype == dtype
    rows = max(1, BUFFER_ELEMENTS // vocab)
    loss_t = torch.empty(tokens, dtype=dtype, device=logits_tV.device)
    for start in range(0, tokens, rows):
        logits, labels = logits_tV[start:start + rows], labels_t[start:start + rows]
        gradient = logits if in_place else logits.to(dtype)
        loss_t[start:start + rows] = _loss_and_gradient_(gradient, labels, grad_scale)
        if not in_place:
            logits.copy_(gradient)
    return loss_t


def _loss_and_gradient_(x_tV: Tensor, labels_t: Tensor, grad_scale: float) -> Tensor:
    """The same for one run of rows already in the compute dtype."""
    ignored_t1 = (labels_t == IGNORE_INDEX).unsqueeze(1)
    label_t1 = labels_t.unsqueeze(1).masked_fill(ignored_t1, 0)
    x_tV.sub_(x_tV.amax(1, keepdim=True))
    label_logit_t1 = x_tV.gather(1, label_t1)
    total_t1 = x_tV.exp_().sum(1, keepdim=True)
    loss_t = (total_t1.log() - label_logit_t1).masked_fill_(ignored_t1, 0).squeeze(1)
    x_tV.mul_(grad_scale / total_t1)
    x_tV.scatter_add_(1, label_t1, torch.full_like(label_logit_t1, -grad_scale))
    x_tV.masked_fill_(ignored_t1, 0)
    return loss_t
