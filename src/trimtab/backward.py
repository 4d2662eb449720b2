"""What every backward of ours is wrapped in. Ground floor: imports nothing of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

_TWICE = b"trimtab's backward is once_differentiable and cannot be differentiated: leave create_graph=True out"


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A static `backward` of an autograd function, run without autocast, in the dtypes of the forward.

    Under create_graph=True its results raise where they are differentiated. torch's own decorator leaves them without
    a graph if the gradient that comes in has none, as that of a sum has not: a penalty on them would have no gradient,
    and nobody would be told.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return backward(ctx, *grads)
        with torch.no_grad(), _no_autocast(grads):
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        several = isinstance(found, tuple)
        results = found if several else (found,)
        fail = torch._C._functions.DelayedError(_TWICE, len(results))
        raising = fail(*(t.detach().requires_grad_() if isinstance(t, Tensor) else t for t in results))
        return raising if several else raising[0] if isinstance(raising, tuple) else raising

    return run


def _no_autocast(grads: tuple[Any, ...]) -> Any:
    kind = next((grad.device.type for grad in grads if isinstance(grad, Tensor)), "cpu")
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
