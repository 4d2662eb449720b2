"""NVFP4: E2M1 values in blocks of 16 along the contracted axis, E4M3 block scales, one float32 scale per tensor.

    g = amax(tensor) / (6 * 448)        block scale = E4M3(amax(block) / 6 / g)        x ~ value * block scale * g

after "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), without its random Hadamard transform. A
grouped layer's tensors are its segments and its experts' matrices: g is per expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.experts.recipes.base import Along, Recipe, RecipeState, Role, StateBuffers
from trimtab.experts.recipes.numbers import E2M1, Blocks, ElementFormat, Scale, e4m3_scale, tensor_scale

_MASK = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class NVFP4(Recipe):
    """One E4M3 scale per 16 contracted values, one float32 scale per expert and operand.

    square_weights: one scale per 16 x 16 values of a weight, the same for both products.
    stochastic_gradients: gradients are rounded stochastically, without bias.
    seed: the key of that noise; None takes one from torch's default generator when a state is made.
    """

    square_weights: bool = True
    stochastic_gradients: bool = True
    seed: int | None = None

    name = "nvfp4"
    alignment = 32  # 16 bytes of the contracted axis, two values to a byte; a multiple of 16

    def form(self, role: Role) -> ElementFormat:
        return E2M1

    def block(self, role: Role, along: Along) -> tuple[int, int]:
        if role == "weight" and self.square_weights:
            return 16, 16
        return (16, 1) if along in ("column", "in") else (1, 16)

    def state(self) -> RecipeState:
        return NVFP4State(self)


class NVFP4State(RecipeState):
    """Holds the noise."""

    def __init__(self, recipe: NVFP4) -> None:
        super().__init__(recipe)
        self.noise = Noise(recipe.seed) if recipe.stochastic_gradients else None

    def scale(self, blocks: Blocks, form: ElementFormat, role: Role) -> Scale:
        amax = blocks.amax()
        return e4m3_scale(amax, tensor_scale(blocks.tensor_amax(amax)))

    def dither(self, x: Tensor, role: Role) -> Tensor | None:
        return None if self.noise is None or role != "gradient" else self.noise(x)


class Noise(StateBuffers):
    """Uniform numbers in [0, 1), new ones at each call, the same on every device, saved as a key and a counter.

    Element i of call c of key k is a hash of (i, c, k): no global generator, nothing read on the host, and a graph
    that is replayed goes on counting. The hash is lowbias32 of C. Wellons ("hash-prospector", public domain).
    """

    key: Tensor
    calls: Tensor

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self.seed = seed
        self.register_buffer("key", self._first_key())
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, like: Tensor) -> Tensor:
        """float32 of the shape and on the device of `like`, multiples of 2 ** -24."""
        key, calls = self.key.to(like.device), self.calls.to(like.device)
        index = torch.arange(like.numel(), device=like.device)
        stream = _mix((key + _mix(calls & _MASK)) & _MASK)
        bits = _mix(_mix(index & _MASK) ^ stream)
        if not like.is_meta:
            self.calls.add_(1)
        return ((bits >> 8).float() * 2.0**-24).view(like.shape)

    def _first_key(self) -> Tensor:
        return torch.randint(_MASK, ()) if self.seed is None else torch.tensor(self.seed & _MASK)

    def begin(self) -> None:
        self.key.copy_(self._first_key())
        self.calls.zero_()


def _mix(h: Tensor) -> Tensor:
    """A bijection on 32-bit integers that looks random; int64 in and out."""
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _MASK
    return h ^ (h >> 16)
