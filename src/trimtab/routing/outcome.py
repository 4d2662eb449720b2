"""What a forward of the router gives.

Legend: T tokens of this rank, E experts, K experts per token (E with expert choice, more with padding).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Pending(NamedTuple):
    """A decision whose losses are still to be taken, see `Router.take_losses`.

    ids_TK: those that were given out with it. again: whether it was counted before; None where a compiled graph made
    it, which cannot know.
    """

    ids_TK: Tensor
    logits_TE: Tensor
    scores_TE: Tensor
    chosen_TK: Tensor
    chosen_E: Tensor
    real_T: Tensor | None
    batch: int
    counts_before_E: Tensor
    again: bool | None


class Routing(NamedTuple):
    """One routing decision.

    ids_TK: int64 expert ids; -1 where a slot is dropped or the token is not real. Columns of padding come behind those
        of the decision; theirs may be of any token.
    weights_TK: float32 (float64 for float64 tokens); 0 where the id is -1, NaN for a token whose logits are not
        finite, so that dispatch raises on every rank.
    losses: name -> scalar, coefficient included; their sum is what joins the training loss.
    loads_E: int64, kept slots of real tokens of this rank; padding is not counted.
    logits_TE: float32 (float64 for float64 tokens).
    most_slots: how many ids are not -1 at most, where a capacity says so.
    pending: what `Router.take_losses` takes them from, where they were left for later.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    losses: dict[str, Tensor]
    loads_E: Tensor
    logits_TE: Tensor
    most_slots: int | None = None
    pending: Pending | None = None
