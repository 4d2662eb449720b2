"""Quantile balancing: the selection bias that would have evened out the step's loads, solved for instead of stepped to.

From the Kimi K3 technical report, section 2.3.3, equations 13 and 14, and appendix D; after Jianlin Su,
https://kexue.fm/archives/11619. torchtitan (#4577) and Megatron-Core (#5349, #6637) have it so. A token takes expert e
where score + bias is above its cutoff, the (K + 1)-th largest of them, that is where the bias is above

    required[t, e] = cutoff[t] - score[t, e]

An expert has K / E of the tokens where its bias is the K / E quantile of what they require. Histograms of H bins hold
what is required over micro-batches and ranks: whole numbers, summed exactly, whoever counted them. Scores lie in
0..1 and the bias moves only between steps, so all of them lie in min(bias) - 1 .. max(bias) + 1. Within a bin the
quantile is interpolated, and the mean bias is taken off.

Legend: T tokens, E experts, H bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.routing.select import top

BINS = 1000


def _ends(bias_E: Tensor) -> tuple[Tensor, Tensor]:
    return bias_E.min() - 1, bias_E.max() + 1


@torch.no_grad()
def add_required(histogram_EH: Tensor, scores_TE: Tensor, bias_E: Tensor, top_k: int, real_T: Tensor | None) -> None:
    """Count into `histogram_EH`, int64, what each token requires of each expert's bias to be picked.

    scores_TE: in 0..1, without the bias. top_k: K < E. real_T: tokens to count, bool; all if None.
    """
    scores_TE, bias_E = scores_TE.detach().float(), bias_E.float()
    biased_TE = scores_TE + bias_E
    cutoff_T1 = biased_TE.gather(1, top(biased_TE, top_k + 1)[:, -1:])
    low, high = _ends(bias_E)
    bins = histogram_EH.shape[1]
    place_TE = ((cutoff_T1 - scores_TE - low) * (bins / (high - low))).long().clamp(0, bins - 1)
    place_TE += torch.arange(bias_E.numel(), device=place_TE.device) * bins
    counted_T = torch.ones_like(place_TE[:, 0]) if real_T is None else real_T.to(place_TE)
    histogram_EH.view(-1).scatter_add_(0, place_TE.flatten(), counted_T[:, None].expand_as(place_TE).flatten())


@torch.no_grad()
def quantile_bias(histogram_EH: Tensor, bias_E: Tensor, top_k: int) -> Tensor:
    """The balancing bias in float32, mean 0, from what `add_required` counted with `bias_E`, on all ranks together; the
    bias as it was where nothing was counted."""
    low, high = (end.double() for end in _ends(bias_E.float()))
    experts, bins = histogram_EH.shape
    up_to_EH = histogram_EH.cumsum(1)
    wanted_E = up_to_EH[:, -1].double() * top_k / experts
    bin_E1 = torch.searchsorted(up_to_EH.double(), wanted_E[:, None]).clamp(max=bins - 1)
    inside_E = histogram_EH.gather(1, bin_E1)[:, 0]
    below_E = up_to_EH.gather(1, bin_E1)[:, 0] - inside_E
    part_E = (wanted_E - below_E) / inside_E.clamp(min=1)
    solved_E = low + (bin_E1[:, 0] + part_E) * ((high - low) / bins)
    solved_E = (solved_E - solved_E.mean()).to(torch.float32)
    return torch.where(up_to_EH[:, -1].sum() > 0, solved_E, bias_E.float())
