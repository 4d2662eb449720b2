"""`torch.autocast` and ours: what it says of a product's dtype is heeded, its own casts are kept out."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor, nn

_KINDS = ("cpu", "cuda")


def computed_in(param: Tensor) -> torch.dtype:
    """The dtype that products with a parameter are made in: autocast's where it is at work on its device, the CPU or
    CUDA, else the parameter's. As `nn.Linear`: float64 keeps its own."""
    kind = param.device.type
    return torch.get_autocast_dtype(kind) if _at_work(kind) and param.dtype is not torch.float64 else param.dtype


def narrowed(x: Tensor, experts: nn.Module) -> Tensor:
    """Rows on their way to experts that will multiply them in autocast's dtype: in it already, where it is narrower, so
    that an exchange moves no more than that."""
    param = next(experts.parameters(), None) if _at_work(x.device.type) else None
    if param is None or computed_in(param).itemsize >= x.dtype.itemsize:
        return x
    return x.to(computed_in(param))


def autocast_at_work() -> bool:
    """Whether autocast is on for the CPU or for CUDA."""
    return any(torch.is_autocast_enabled(kind) for kind in _KINDS)


def without_autocast() -> AbstractContextManager[object]:
    """Within, autocast is off for the CPU and for CUDA."""
    if not autocast_at_work():
        return nullcontext()
    stack = ExitStack()
    for kind in _KINDS:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _at_work(kind: str) -> bool:
    return kind in _KINDS and torch.is_autocast_enabled(kind)
