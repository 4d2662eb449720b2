"""What every backward of ours is wrapped in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import InputError

_TWICE = b"trimtab's backward is once_differentiable and cannot be differentiated: leave create_graph=True out"


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A static `backward` of an autograd function, run without autocast, in the dtypes of the forward.

    Under create_graph=True its results raise where they are differentiated, but for a function within a graph of
    `torch.compile`. torch's own decorator leaves them without a graph if the gradient that comes in has none, as that
    of a sum has not: a penalty on them would have no gradient, and nobody would be told.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling():
            kind = next((grad.device.type for grad in grads if isinstance(grad, Tensor)), "cpu")
            with torch.no_grad(), torch.autocast(kind, enabled=False):
                return backward(ctx, *grads)
        if any(torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads if isinstance(grad, Tensor)):
            raise InputError("trimtab's backward takes one gradient at a time: leave is_grads_batched, vectorize out")
        with torch.no_grad(), without_autocast():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        results = found if isinstance(found, tuple) else (found,)
        fail = torch._C._functions.DelayedError(_TWICE, len(results))
        return fail(*(t.detach().requires_grad_() if isinstance(t, Tensor) else t for t in results))

    return run


def without_autocast() -> AbstractContextManager[Any]:
    """Within, autocast is off for the CPU and for CUDA."""
    if not torch._C._is_any_autocast_enabled():
        return nullcontext()
    stack = ExitStack()
    for kind in ("cpu", "cuda"):
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
