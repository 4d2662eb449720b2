"""`sequence_ids`: where each sequence of a pack lies, from any of the ways in which frameworks say it.

Legend: B rows, L positions, T = B * L tokens, n sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.errors import InputError
from trimtab.validation import holds_ids


def sequence_ids(
    *, cu_seqlens: Tensor | None = None, position_ids: Tensor | None = None, shape: Sequence[int] | None = None
) -> Tensor:
    """Sequence ids of packs, int64, 0, 1, … in each row: the `sequence_ids` of `MoE.forward`. Give one of the two.

    To be made of whole packs, then cut over ranks as the tokens are: with `num_sequences=int(ids.max()) + 1`, the same
    number on every rank. Reads values, which on a GPU waits for them: once for a batch, outside of the layers.

    Args:
        cu_seqlens: int [n + 1], 0 and the end of each sequence among all T tokens, as flash-attention and Megatron-LM
            take them; sequences may be empty. One that goes on in the next row is another one there.
        position_ids: int [..., L], which begin anew at 0 with each sequence, as transformers takes them. The first of a
            row may be any.
        shape: of the result, that of the tokens. By default [1, T], and that of position_ids.

    Raises:
        InputError: numbers of another kind or for another number of tokens, ends that do not ascend, positions that
            neither go on by 1 nor begin at 0.
    """
    given = position_ids if cu_seqlens is None else cu_seqlens
    if given is None or (cu_seqlens is not None and position_ids is not None):
        raise InputError("sequence_ids takes cu_seqlens or position_ids, one of them")
    if not holds_ids(given):
        raise InputError(f"cu_seqlens and position_ids are integers, got {given.dtype}")
    if cu_seqlens is not None:
        return _of_ends(cu_seqlens.long(), shape)
    if not given.dim() or tuple(given.shape) != tuple(given.shape if shape is None else shape):
        raise InputError(f"position_ids must be [..., L] of the tokens' shape {shape}, got {tuple(given.shape)}")
    wrong = (given[..., 1:] != given[..., :-1] + 1) & (given[..., 1:] != 0)
    if bool(wrong.any()):
        *row, place = wrong.nonzero()[0].tolist()
        before, after = given[(*row, slice(place, place + 2))].tolist()
        said = f"position_ids go from {before} to {after} at position {place + 1} of row {row}"
        raise InputError(f"{said}: a sequence goes on by 1, and another one begins at 0")
    begins = given == 0
    begins[..., :1] = False
    return begins.cumsum(-1)


def _of_ends(ends: Tensor, shape: Sequence[int] | None) -> Tensor:
    if ends.dim() != 1 or not ends.numel():
        raise InputError(f"cu_seqlens must be [n + 1], 0 and the end of each sequence, got {tuple(ends.shape)}")
    first, last = ends[[0, -1]].tolist()
    tokens = last if shape is None else math.prod(shape)
    if first != 0 or last != tokens:
        raise InputError(f"cu_seqlens go from {first} to {last}: expected 0 to {tokens}, the number of tokens")
    if bool((ends.diff() < 0).any()):
        raise InputError(f"cu_seqlens must ascend, got {ends.tolist()[:8]} …")
    ids_T = torch.searchsorted(ends[1:], torch.arange(tokens, device=ends.device), right=True)
    return ids_T.view(1, tokens) if shape is None else ids_T.view(*shape)
