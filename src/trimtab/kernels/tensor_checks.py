"""Checks on raw tensors (dense, contiguous, fake or meta), and a function run in a clean thread, or on a stream."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from trimtab.validation import holds_values

T = TypeVar("T")


def modes() -> list[type]:
    """The types of the dispatch modes that see this thread's operators."""
    return [type(mode) for mode in _get_current_dispatch_mode_stack()]


def no_values(device: torch.device) -> bool:
    """True if tensors on `device` have shapes but no values: on the meta device and under `FakeTensorMode`. False where
    a graph is traced from fake tensors, for what is computed must be in it."""
    if device.type == "meta" or not _get_current_dispatch_mode_stack():  # as nearly always
        return device.type == "meta"
    return any(kind.__name__ == "FakeTensorMode" for mode in modes() for kind in mode.__mro__) and not recorded()


def recorded() -> bool:
    """True while `make_fx` records operators: a kernel that is none of them would not be in its graph."""
    return any(kind.__name__ == "ProxyTorchDispatchMode" for mode in modes() for kind in mode.__mro__)


def static_by_default(t: Tensor) -> bool:
    """True if sizes must not depend on what `t` holds."""
    return t.device.type != "cpu" or torch.compiler.is_compiling() or no_values(t.device)


def dense(t: Tensor) -> bool:
    """True for a dense tensor of this rank's own, with values or without: not sparse, not nested, no DTensor."""
    if type(t) not in (Tensor, nn.Parameter):
        from torch.distributed.tensor import DTensor

        if isinstance(t, DTensor):
            return False
    return t.layout is torch.strided and not t.is_nested


def described(t: Tensor) -> str:
    """Dtype and shape for a message, or what it is that may have no shape."""
    if dense(t):
        return f"{t.dtype} {tuple(t.shape)}"
    way_out = ", whose to_local() is dense" if hasattr(t, "to_local") else ""
    return f"a {'nested ' * t.is_nested}{type(t).__name__} of {t.dtype} in {t.layout}{way_out}"


def unsupported_dtype(t: Tensor) -> str | None:
    """The dtype or type of a parameter that cannot be computed with; None for plain values. Unsupported are a
    dtype that is no value's, and a tensor that wraps others: its own products may ignore `out=`."""
    if not holds_values(t.dtype):
        return str(t.dtype)
    if type(t) in (Tensor, nn.Parameter):
        return None  # as nearly always
    # Of the type, which is asked for in a graph of `torch.compile` as well: of a tensor there it is always False.
    # The result of a collective that is still under way wraps one too, and says how to wait for it.
    wraps = hasattr(type(t), "__tensor_flatten__") and not hasattr(type(t), "trigger_wait")
    return f"a {type(t).__name__} of {t.dtype}" if wraps else None


def plain(t: Tensor, dtype: torch.dtype) -> bool:
    """True if the values of `t` lie at its address as they are, in `dtype` and one after the other."""
    known = type(t) in (Tensor, nn.Parameter)
    return known and t.dtype == dtype and t.is_contiguous() and not t.is_neg() and bool(t.data_ptr() or not t.nbytes)


def row_major(t: Tensor) -> Tensor:
    """`t.contiguous()` whose strides are those of its shape.

    A tensor without elements, and a dim of one, are contiguous with any strides: the gradient of a sum over no rows
    has strides of 0. Views in other dtypes and `torch.nn.functional.grouped_mm` refuse those.
    """
    t, strides, step = t.contiguous(), [0] * t.dim(), 1
    for dim in reversed(range(t.dim())):
        strides[dim], step = step, step * max(t.shape[dim], 1)
    return t if t.stride() == tuple(strides) else t.as_strided(t.shape, strides)


def in_clean_thread(device: torch.device, run: Callable[[], T]) -> T:
    """Call run() in a thread of its own, with `device` as its current GPU: no autograd, mode, autocast or tracing of
    this thread's is at work there."""

    def there() -> T:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return run()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(there).result()


class ReadOn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`Tensor.record_stream(stream)` for each argument of the operators within, which run on `stream`: memory of
    another stream is not reused before they have read it."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for given in (*args, *(kwargs or {}).values()):
            for t in given if isinstance(given, (list, tuple)) else (given,):
                if isinstance(t, Tensor) and t.device.type == self._stream.device.type:
                    t.record_stream(self._stream)
        return func(*args, **(kwargs or {}))


def count(rows: int, contracted: int, width: int) -> None:
    """Count the FLOPs of a product [rows, contracted] x [contracted, width] that is in no operator of ours, as an `mm`
    without values. Does nothing where no FLOPs are counted."""
    if any(mode.__module__ == "torch.utils.flop_counter" for mode in modes()):
        torch.mm(torch.empty(rows, contracted, device="meta"), torch.empty(contracted, width, device="meta"))
