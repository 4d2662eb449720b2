"""What a router decides, and what its forward gives.

Legend: T tokens of this rank, E experts, K experts per token (E with expert choice).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from trimtab.operators import exportable


class Decision(NamedTuple):
    """The experts of each token, int64.

    chosen_TK: those picked, -1 for none. kept_TK: -1 also where the expert had no room; the same tensor without a
        capacity.
    most_slots: how many of the kept are not -1 at most, where a capacity says so.
    complete: whether every pick is known to name an expert.
    """

    chosen_TK: Tensor
    kept_TK: Tensor
    most_slots: int | None = None
    complete: bool = False

    @property
    def coded(self) -> Tensor:
        """Both in one tensor: an expert, -1 for none, -2 - e for an expert e that was picked but had no room."""
        if self.kept_TK is self.chosen_TK:
            return self.chosen_TK
        return torch.where(self.kept_TK == self.chosen_TK, self.kept_TK, -2 - self.chosen_TK)


def decoded(ids_TK: Tensor) -> Decision:
    """The decision that `Decision.coded` gave, int64."""
    return Decision(torch.where(ids_TK < -1, -2 - ids_TK, ids_TK), ids_TK.clamp(min=-1))


@exportable
class Basis(NamedTuple):
    """What `Router.losses` takes the losses from. real_T: the token mask. batch: sequences among the tokens."""

    ids_TK: Tensor
    chosen_TK: Tensor
    chosen_E: Tensor
    scores_TE: Tensor
    real_T: Tensor | None
    batch: int
    most_slots: int | None


@exportable
class Routing(NamedTuple):
    """One routing decision.

    ids_TK: int64 expert ids; -1 where a slot is dropped or the token is not real.
    weights_TK: float32 (float64 for float64 tokens); 0 where the id is -1, NaN for a token whose logits are not
        finite, so that dispatch raises on every rank.
    loads_E: int64, kept slots of real tokens of this rank; padding is not counted.
    logits_TE: float32 (float64 for float64 tokens).
    basis: for `Router.losses`.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    loads_E: Tensor
    logits_TE: Tensor
    basis: Basis | None = None

    @property
    def most_slots(self) -> int | None:
        """How many ids are not -1 at most, where a capacity says so and they are still those that were decided."""
        return None if self.basis is None or self.ids_TK is not self.basis.ids_TK else self.basis.most_slots
