"""One tensor per group, held as one stacked parameter or as one parameter per group; the kernels see no difference.

    stacked     weight [e, B, A]
    separate    weight0 .. weight{e-1}, each [B, A]

Legend: e groups, A in features, B out features.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import InputError
from trimtab.experts.main_grad import MainGradMode, WeightGradient
from trimtab.kernels.grouped import put


def joined(weight: Tensor) -> Tensor:
    """A weight [e, 2, F, A] of a gate and up as [e, 2F, A]; others as they are."""
    return weight.flatten(1, 2) if weight.ndim == 4 else weight


class Gradients:
    """The gradients of all groups' parameters for one microbatch, written block by block.

    A frozen one has no `main_grad` to be written; its gradient is the caller's to drop.

    Args:
        params: one stacked parameter, or one per group.
        stacked: which of the two.
        mode: what becomes of the gradients, see `main_grad`.
        name: what error messages call the parameters.
        empty_like: makes the buffers.
        trained: which of them are to have a gradient, if not those that are not frozen.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        stacked: bool,
        mode: MainGradMode,
        name: str,
        empty_like: Callable[[Tensor], Tensor] = torch.empty_like,
        trained: Sequence[bool] | None = None,
    ) -> None:
        names = [name] if stacked else [f"{name}{i}" for i in range(len(params))]
        self.stacked = self._stacked = stacked
        self._each = [
            WeightGradient(p, mode if p.requires_grad and wanted else "off", n, empty_like)
            for p, n, wanted in zip(params, names, trained or [True] * len(params), strict=True)
        ]

    @property
    def whole(self) -> WeightGradient:
        """That of the one stacked parameter."""
        return self._each[0]

    @contextmanager
    def targets(self) -> Iterator[tuple[list[Tensor], list[bool]]]:
        """Where to write, one [e, B, A] or one [B, A] per group, and whether to add to what is there."""
        buffers, adds = [g.buffer for g in self._each], [g.adds for g in self._each]
        if self.stacked and buffers[0].ndim == 4 and not buffers[0].is_contiguous():
            fresh = torch.empty(buffers[0].shape, dtype=buffers[0].dtype, device=buffers[0].device)
            yield [joined(fresh)], [False]
            put(buffers[0], fresh, adds[0])
        else:
            yield [joined(buffer) for buffer in buffers], adds

    def close(self) -> list[Tensor]:
        """What autograd gets for each parameter."""
        return [gradient.close() for gradient in self._each]


def convert_state(state: MutableMapping[str, Any], prefix: str, name: str, num_groups: int, *, stacked: bool) -> None:
    """Bring the entries of one parameter to the form asked for, in place: stacked, or separate.

    Entries that have the form already, or are not there at all, stay as they are.

    Raises:
        InputError: both forms at once, or not exactly `num_groups` groups.
    """
    whole = prefix + name
    part = re.compile(re.escape(whole) + r"(\d+)")
    found = sorted(int(match[1]) for key in state if (match := part.fullmatch(key)))
    if whole in state and found:
        raise InputError(f"state dict has both {whole} and {whole}{found[0]}: which one is meant?")
    if found and found != list(range(num_groups)):
        missing = sorted(set(range(num_groups)) - set(found))
        extra = sorted(set(found) - set(range(num_groups)))
        raise InputError(
            f"state dict has {len(found)} of {whole}*, expected {whole}0 .. {whole}{num_groups - 1}: "
            f"missing {missing}, unexpected {extra}"
        )
    if whole in state and state[whole].shape[:1] != (num_groups,):
        raise InputError(f"state dict has {whole} {tuple(state[whole].shape)}, expected {num_groups} groups")
    if stacked and found:
        state[whole] = torch.stack([state.pop(f"{whole}{i}") for i in found])
    if not stacked and whole in state:
        state.update({f"{whole}{i}": value for i, value in enumerate(state.pop(whole).unbind())})
