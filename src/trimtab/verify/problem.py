"""What one case hands to an implementation: sizes, weights, and every data-parallel rank's tokens.

All values are exact in the dtype that the case runs in, so the truth in float64 starts from the same numbers.

Legend: B sequences, L positions, D model dim, K experts per token, E experts, I = 2F, F expert hidden dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DIM, HIDDEN = 24, 8
"""D (the first E columns carry the router's logits) and F."""
BALANCE = 0.5
"""Coefficient of the loss per sequence, where there is one."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a model is built from. Two cases with equal sizes can share one."""

    num_experts: int
    top_k: int
    layers: int
    dtype: torch.dtype
    dim: int
    hidden: int


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer's parameters in float64, gate rows first in `up`."""

    router_ED: Tensor
    up_EID: Tensor
    down_EDF: Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tokens of one data-parallel rank.

    x_BLD: float64. dy_BLD: the gradient of the loss at the output; the loss is sum(y * dy).
    ids_BLK: the experts that the router must choose, in its order; -1 where a slot is dropped.
    replayed: whether `ids_BLK` is handed to the layer, its scores alone being live.
    mask_BL: True for a real token, or None. cuts: [tp + 1] positions of each rank of the tp group.
    """

    x_BLD: Tensor
    dy_BLD: Tensor
    ids_BLK: Tensor
    mask_BL: Tensor | None
    replayed: bool
    cuts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One case's data on all ranks. `raises`: the layer must raise InputError, and no data may move.

    cp: batches of d // cp hold positions of the same sequences; above 1 each layer adds `BALANCE` times its
    `sequence_aux` loss over all of them.
    """

    sizes: Sizes
    batches: tuple[Batch, ...]
    raises: bool
    cp: int = 1


def make_weights(sizes: Sizes, seed: int) -> list[LayerWeights]:
    """Weights of every layer, the same on every rank.

    Layer i's router reads expert j's logit from column (j + 2i) % E and nothing else, so that a problem can dictate
    every choice, to the bit; two experts further means another rank. Experts leave the first E columns alone.
    """
    g = torch.Generator().manual_seed(seed)
    e, d, f = sizes.num_experts, sizes.dim, sizes.hidden

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    made = []
    for layer in range(sizes.layers):
        router = torch.zeros(e, d, dtype=torch.float64)
        router[torch.arange(e), (torch.arange(e) + 2 * layer) % e] = 1
        up, down = draw(e, 2 * f, d) / d**0.5, draw(e, d, f) / f**0.5
        if layer < sizes.layers - 1:
            down[:, :e] = 0
        up, down = (t.to(sizes.dtype).double() for t in (up, down))
        made.append(LayerWeights(router_ED=router, up_EID=up, down_EDF=down))
    return made
