"""A thread of its own for what must not be touched by what surrounds it.

Autograd's and dispatch modes, autocast and the tracing of `torch.compile` belong to a thread. A self-test of kernels is
to be real where tensors are fake, may need a backward where nothing is recorded, and is no part of what a mode counts.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

import torch

from trimtab.kernels.memory import modes

T = TypeVar("T")


def apart(device: torch.device, run: Callable[[], T]) -> T:
    """run() in a thread of its own, with `device` as its current one if it is a GPU: a thread begins with GPU 0."""

    def there() -> T:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return run()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(there).result()


def apart_from_modes(device: torch.device, run: Callable[[], T]) -> T:
    """The same, but in this thread where it has no dispatch modes."""
    return apart(device, run) if modes() else run()
