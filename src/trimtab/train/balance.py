"""The balance loss of softmax routers, over a batch of all ranks.

Per layer it is E * sum_e f_e p_e summed over the K choices: f_e the fraction of tokens that chose expert e, p_e its
mean probability; K when the load is even. f carries no gradient, so f of the whole batch with each rank's own p
has, averaged over the ranks, exactly the gradient of a single process: the layout of the ranks changes nothing.
With gradient accumulation it is the mean over a step's batches, each with an f of its own. transformers' own loss takes
f and p over all layers together, which lets one layer's load make up for another's; with one layer it is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from trimtab.routing.scores import count_ids


def balance_loss(
    router_logits: Sequence[torch.Tensor], top_k: int, all_sum: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The mean over the layers of the balance loss, a float32 scalar.

    Args:
        router_logits: per layer, [tokens, experts] of this rank.
        top_k: experts per token.
        all_sum: sums a tensor over the ranks; called once.
    """
    probs = [F.softmax(logits.float(), dim=-1) for logits in router_logits]
    sizes = [p.shape[-1] for p in probs]
    counts = [count_ids(p.detach().topk(top_k, dim=-1).indices, p.shape[-1]) for p in probs]
    summed = torch.split(all_sum(torch.cat(counts)), sizes)
    losses = [
        size * top_k * (count / count.sum() * p.mean(dim=0)).sum()
        for size, count, p in zip(sizes, summed, probs, strict=True)
    ]
    return torch.stack(losses).mean()
