"""Compiled kernels that ranks inherit from the server that forks them, loaded and tested once, if they are built.

That server imports it, and nobody else: a server can be told of nothing else to do beforehand.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from trimtab.kernels.compiled import CompiledKernels, are_made, compiled_kernels
from trimtab.kernels.selftest import compiled_fault


def _kept() -> list[CompiledKernels]:
    """The kernels, if they are compiled and pass; else nothing, and each rank compiles them or says what is wrong."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP's threads are lost in a fork, and waited for
    try:
        with suppress(Exception):
            if are_made():
                kernels = compiled_kernels()
                for dtype in (torch.float32, torch.bfloat16, torch.float64):
                    compiled_fault(kernels, dtype)
                return [kernels]
        return []
    finally:
        torch.set_num_threads(threads)


KEPT = _kept()
