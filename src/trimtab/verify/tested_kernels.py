"""What ranks inherit from the server that forks them: the compiled kernels, loaded and tested once, if they are built.

That server imports it, and nobody else: a server can be told of nothing else to do beforehand. What the environment of
a rank says later does not change them; that of the server's first caller counts.
"""

from __future__ import annotations

import os
from contextlib import suppress

import torch

from trimtab.kernels.compiled import CompiledKernels, are_made, compiled_kernels
from trimtab.kernels.selftest import compiled_fault


def _tested() -> CompiledKernels:
    kernels = compiled_kernels()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        compiled_fault(kernels, dtype)
    return kernels


def _survived() -> bool:
    """Whether a process does the same and ends well: what ends the server would be no rank's verdict."""
    child = os.fork()
    if not child:
        with suppress(BaseException):
            _tested()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _kept() -> list[CompiledKernels]:
    """None where the ranks have to compile them, or to say what is wrong."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP's threads are lost in a fork, and waited for
    try:
        with suppress(Exception):
            return [_tested()] if are_made() and _survived() else []
        return []
    finally:
        torch.set_num_threads(threads)


KEPT = _kept()
