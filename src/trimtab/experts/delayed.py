"""Weight gradients that wait: each backward leaves its work, `run` does the oldest and lets autograd deliver it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.autocast import without_autocast
from trimtab.errors import InputError

WgradJob = Callable[[], tuple[list[Tensor], list[Tensor]]]
"""Gives the parameters that want a gradient, and what autograd gets for each."""

Defer = Callable[[WgradJob, Sequence[Tensor]], None]
"""Takes such a job, and the tensors of others that it will read."""


class DelayedGradients:
    """The work of one module, oldest first. A copy of the module begins without any: it is the module that ran whose
    parameters wait."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[WgradJob, list[tuple[Tensor, int]]]] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return DelayedGradients, ()

    def add(self, job: WgradJob, reads: Sequence[Tensor]) -> None:
        """Called by a backward. reads: the tensors of others that the job will read."""
        self._jobs.append((job, [(t, t._version) for t in reads if not t.is_inference()]))

    def run(self) -> None:
        """The gradients of the oldest backward that has not had them yet; hooks fire now.

        Raises:
            InputError: no backward is waiting; or what it is to read was changed in place since.
        """
        if not self._jobs:
            raise InputError("backward_dw() without a backward before it", phase="experts")
        job, reads = self._jobs.popleft()
        changed = [tuple(t.shape) for t, version in reads if t._version != version]
        if changed:
            raise InputError(
                f"a tensor {changed[0]} that backward_dw() needs was changed in place since the backward: hand the "
                "layer a copy, or call backward_dw() before the buffer is used again",
                phase="experts",
            )
        with torch.no_grad(), without_autocast():
            found = [(p, gradient) for p, gradient in zip(*job(), strict=True) if p.requires_grad]
        torch.autograd.backward([p for p, _ in found], [gradient for _, gradient in found])


def anchor(like: Tensor, wanted: bool) -> Tensor:
    """Stands in for parameters that autograd must not meet: it would fire their hooks now, without a gradient.

    An empty tensor that wants a gradient, so that there is a backward even where no other input needs one.
    """
    return like.new_empty(0).requires_grad_(wanted)
