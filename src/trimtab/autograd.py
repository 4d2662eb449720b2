"""Wrappers of our autograd functions: backwards that run once, without autocast; forwards alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from trimtab.errors import InputError

P = ParamSpec("P")
Result = TypeVar("Result")

_KINDS = ("cpu", "cuda")


def computed_in(param: Tensor, dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype of products with a parameter: autocast's where it is at work, but for float64; else its own, or the
    `dtype` that it stands for."""
    kind, own = param.device.type, dtype or param.dtype
    return torch.get_autocast_dtype(kind) if _at_work(kind) and own is not torch.float64 else own


def narrowed(x: Tensor, experts: nn.Module) -> Tensor:
    """Rows on their way to experts, in autocast's dtype already where it is narrower: an exchange moves no more."""
    param = next(experts.parameters(), None) if _at_work(x.device.type) else None
    if param is None or computed_in(param).itemsize >= x.dtype.itemsize:
        return x
    return x.to(computed_in(param))


def autocast_at_work() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


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


def outside_graph(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """method(*args, **kwargs), out of the graph that is being traced."""
    from trimtab.graph_break import eagerly

    return eagerly(method, *args, **kwargs)


def not_in_graphs(method: Callable[P, Result]) -> Callable[P, Result]:
    """For what has state that a graph does not see: where `torch.compile` traces, it runs between two graphs."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        if torch.compiler.is_compiling():
            return outside_graph(method, *args, **kwargs)  # type: ignore[no-any-return]
        return method(*args, **kwargs)

    return run


def once_differentiable(backward: Callable[..., Any], *, traced: bool = True) -> Callable[..., Any]:
    """A static `backward` of an autograd function, run without autocast, in the dtypes of the forward.

    Under create_graph=True its results raise where they are differentiated, but in a graph of `torch.compile`. torch's
    own decorator may leave them without a graph: a penalty on them would silently have no gradient.

    traced: whether `torch.compile` may trace it, see `eager_backward`.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling():
            if not traced:
                return outside_graph(run, ctx, *grads)
            kind = next((grad.device.type for grad in grads if isinstance(grad, Tensor)), "cpu")
            with torch.no_grad(), torch.autocast(kind, enabled=False):
                return backward(ctx, *grads)
        twice = torch.is_grad_enabled()
        ctx = _Unpacked(ctx) if twice else ctx
        with torch.no_grad(), without_autocast():
            found = backward(ctx, *grads)
        if not twice:
            return found
        results = found if isinstance(found, tuple) else (found,)
        roots = [t for t in (*ctx.saved_tensors, *grads) if isinstance(t, Tensor) and t.requires_grad]
        leaves = [t.detach().requires_grad_() if isinstance(t, Tensor) else t for t in results]
        return _Once.apply(len(leaves), *leaves, *roots)  # type: ignore[no-untyped-call]

    return run


class _Once(Function):
    """Results of a backward, made of all that it read; raises when they are differentiated."""

    @staticmethod
    def forward(ctx: Any, results: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if t is None else t.detach() for t in tensors[:results])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            "trimtab's backward is once_differentiable and cannot be differentiated: leave create_graph=True out"
        )


class _Unpacked:
    """A function's context, its saved tensors unpacked once: a checkpoint hands them out once."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


eager_backward = functools.partial(once_differentiable, traced=False)
"""For a forward that is in no graph of `torch.compile`: compiled autograd, which traces others, leaves this out."""


def functions_of(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> tuple[type[Function], ...]:
    """Autograd functions of the two: one for graphs of `torch.compile` as well, and one for what has state that a graph
    does not see: `main_grad`, delayed gradients, a recipe."""

    def made(name: str, backward: Callable[..., Any]) -> type[Function]:
        return type(name, (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})

    return made(name, once_differentiable(backward)), made(f"{name}WithState", eager_backward(backward))


def in_backward() -> bool:
    """True inside a backward pass, where a recomputed forward runs."""
    return torch._C._current_graph_task_id() != -1  # no public function says this


def needed(ctx: Any) -> tuple[bool, ...]:
    """The inputs of a function whose gradient this backward is for: of all that need one, as `needs_input_grad` says,
    `torch.autograd.grad(y, x)` and each half of a zero-bubble schedule's backward want some."""
    needs: tuple[bool, ...] = ctx.needs_input_grad
    if torch.compiler.is_compiling() or not hasattr(ctx, "next_functions"):  # an operator's context has none
        return needs
    edges = iter([edge for edge in ctx.next_functions if edge[0] is not None])
    return tuple(need and _runs(*next(edges)) for need in needs)


def _runs(node: Any, output: int) -> bool:
    """True where this backward is for that output of a node; or for the input behind it, of a node that hands gradients
    on one by one: it runs if it is for any."""
    behind: tuple[int, ...] | None = getattr(node, "behind", None)
    if behind is not None:
        return needed(node)[behind[output]]
    try:
        return torch._C._will_engine_execute_node(node)  # no public function says this
    except RuntimeError:  # a leaf that `torch.autograd.grad` was asked for, or no engine: compiled autograd has none
        return True


def forward_of(function: type[Function], *args: Any) -> Any:
    """`function.apply(*args)`, or its forward alone where no backward may come: for few tokens, `apply` takes as long
    as a kernel. `apply` refuses transforms and tangents."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or _transformed():
        return function.apply(*args)  # type: ignore[no-untyped-call]
    context = SimpleNamespace(save_for_backward=lambda *tensors: None)  # stands for autograd's
    return function.forward(context, *args)


def _transformed() -> bool:
    """True under a transform of `torch.func`, or where values may carry tangents."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def refuse_transforms(who: str, layer: str = "") -> None:
    """Raises InputError: `torch.func.grad`, `vmap` or the like is at work, whose tensors have no memory to read,
    forward-mode AD, or `torch.jit.trace`, which would note addresses."""
    if _transformed() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise InputError(
            f"{who} {layer}".rstrip()
            + " does not run under torch.func's transforms (grad, jacrev, jvp, vmap), forward-mode AD or "
            "torch.jit.trace: use torch.autograd.grad and torch.compile",
            phase="experts",
        )


class _Shaped(Function):
    """Reshape that autograd treats as a new tensor but that shares the version counter, so that in-place edits are
    detected. The mask is no saved tensor: a rank without one saves nothing here either, so that a checkpoint that runs
    a layer again begins and ends at the same place, among the exchanges, on both."""

    @staticmethod
    def forward(ctx: Any, rows_TD: Tensor, shape: torch.Size, mask_T: Tensor | None) -> Tensor:
        ctx.shape, ctx.masked_T1 = rows_TD.shape, None if mask_T is None else ~mask_T[:, None]
        rows_TD = rows_TD if mask_T is None else rows_TD.masked_fill(ctx.masked_T1, 0)
        return rows_TD.view(shape).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        d_TD = d.reshape(ctx.shape)
        return d_TD if ctx.masked_T1 is None else d_TD.masked_fill(ctx.masked_T1, 0), None, None


def detached_reshape(rows_TD: Tensor, shape: torch.Size, mask_T: Tensor | None = None) -> Tensor:
    """Reshape rows to what is no view of them: FSDP2's hooks on a layer's result are lost from a view that is changed
    in place, as by a residual `y += x`. With a mask zeros where it is False, in the gradient as well, which may be NaN
    there."""
    if rows_TD.shape == shape and mask_T is None:
        return rows_TD
    shaped: Tensor = forward_of(_Shaped, rows_TD, shape, mask_T)
    return shaped
