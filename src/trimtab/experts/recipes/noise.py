"""Random numbers that a state holds as a key and a counter: the same on every device, saved with the state.

Element i of call c of key k is a hash of (i, c, k): nothing is drawn from a global generator, nothing is read on the
host, and a graph that is replayed goes on counting. The hash is the two-round 32-bit finaliser of C. Wellons
("hash-prospector", lowbias32, public domain), used on 32 bits held in int64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_MASK = 0xFFFFFFFF


def mix(h: Tensor) -> Tensor:
    """A bijection on 32-bit integers that looks random; int64 in and out."""
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _MASK
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _MASK
    return h ^ (h >> 16)


class Noise(nn.Module):
    """Uniform numbers in [0, 1), new ones at each call.

    Args:
        seed: the key; None takes one from torch's default generator, as parameters take their values.
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
        stream = mix((key + mix(calls & _MASK)) & _MASK)
        bits = mix(mix(index & _MASK) ^ stream)
        if not like.is_meta:
            self.calls.add_(1)
        return ((bits >> 8).float() * 2.0**-24).view(like.shape)

    def _first_key(self) -> Tensor:
        return torch.randint(_MASK, ()) if self.seed is None else torch.tensor(self.seed & _MASK)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Noise:
        """What was on the meta device begins anew."""
        unset = self.key.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if unset and not self.key.is_meta:
            self.key.copy_(self._first_key())
            self.calls.zero_()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """From a checkpoint without the recipe nothing is taken."""
        if any(f"{prefix}{name}" in state_dict for name in ("key", "calls")):
            super()._load_from_state_dict(state_dict, prefix, *args)
