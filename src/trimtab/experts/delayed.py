"""Weight gradients that wait: each backward leaves its work, `run` does the oldest and lets autograd deliver it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from trimtab.errors import InputError

WgradJob = Callable[[], tuple[list[Tensor], list[Tensor]]]
"""Gives the parameters that want a gradient, and what autograd gets for each."""


class DelayedGradients:
    """The work of one module, oldest first."""

    def __init__(self) -> None:
        self._jobs: deque[WgradJob] = deque()

    def add(self, job: WgradJob) -> None:
        """Called by a backward."""
        self._jobs.append(job)

    def run(self) -> None:
        """The gradients of the oldest backward that has not had them yet; hooks fire now.

        Raises:
            InputError: no backward is waiting.
        """
        if not self._jobs:
            raise InputError("backward_dw() without a backward before it", phase="experts")
        with torch.no_grad():
            params, gradients = self._jobs.popleft()()
        torch.autograd.backward(params, gradients)


def anchor(like: Tensor, wanted: bool) -> Tensor:
    """Stands in for parameters that autograd must not meet: it would fire their hooks now, without a gradient.

    An empty tensor that wants a gradient, so that there is a backward even where no other input needs one.
    """
    return like.new_empty(0).requires_grad_(wanted)
