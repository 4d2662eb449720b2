"""Packs of Megatron's (`packed_seq_params`), which its layers hand to attention alone: our MoE layers are told of them,
so that our router's loss per sequence is that of each document.

Legend: T tokens of this rank, n documents.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import InputError


class TellsPacks:
    """Before a transformer layer: within its forward `mlp.packs` are those that it was given."""

    mlp: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the layer's."""
        self.mlp.packs = kwargs.get("packed_seq_params")
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.mlp.packs = None


@cache
def telling(layer: type) -> type:
    """A transformer layer's class, of the same name, that tells."""
    if issubclass(layer, TellsPacks):
        return layer
    return type(layer.__name__, (TellsPacks, layer), {"__module__": layer.__module__, "__doc__": layer.__doc__})


def documents(packs: Any, tokens: Tensor, tp: tuple[int, int], cp_size: int) -> tuple[Tensor, int] | None:
    """(the document of each token, int64 [T]; one more than n, for what lies behind the last). None for no pack. The
    same n on all ranks of tp and cp, of which each has its part of every document (cp), then its positions (tp).

    tokens: [S, B, H] of this rank. tp: rank and size of those that share positions.

    Raises:
        InputError: packs over other context-parallel ranks than the model's.
    """
    if packs is None or packs.qkv_format != "thd" or packs.cu_seqlens_q is None:
        return None
    ends = packs.cu_seqlens_q if packs.cu_seqlens_q_padded is None else packs.cu_seqlens_q_padded
    over = getattr(packs, "local_cp_size", None) or cp_size
    if over != cp_size:
        raise InputError(f"packs over {over} context-parallel ranks: seq_aux_loss is over the model's {cp_size}")
    count = tokens.shape[0] * tokens.shape[1]
    at_T = torch.arange(count, device=tokens.device) + tp[0] * count
    ids_T = torch.searchsorted(ends[1:].long() // cp_size, at_T, right=True)
    return ids_T, ends.shape[0]
