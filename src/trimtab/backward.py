"""What every backward of ours is wrapped in, and what autograd is told of a result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.autocast import without_autocast
from trimtab.errors import InputError

_TWICE = b"trimtab's backward is once_differentiable and cannot be differentiated: leave create_graph=True out"


def once_differentiable(backward: Callable[..., Any], *, traced: bool = True) -> Callable[..., Any]:
    """A static `backward` of an autograd function, run without autocast, in the dtypes of the forward.

    Under create_graph=True its results raise where they are differentiated, but for a function within a graph of
    `torch.compile`. torch's own decorator leaves them without a graph if the gradient that comes in has none, as that
    of a sum has not, and with one that `torch.autograd.grad` passes by where it is asked for tensors that they were
    made of: a penalty on them would have no gradient, and nobody would be told.

    traced: whether `torch.compile` may trace it, see `eager_backward`.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if torch.compiler.is_compiling():
            if not traced:
                from trimtab.eager import eagerly

                return eagerly(run, ctx, *grads)
            kind = next((grad.device.type for grad in grads if isinstance(grad, Tensor)), "cpu")
            with torch.no_grad(), torch.autocast(kind, enabled=False):
                return backward(ctx, *grads)
        if any(torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads if isinstance(grad, Tensor)):
            raise InputError("trimtab's backward takes one gradient at a time: leave is_grads_batched, vectorize out")
        twice = torch.is_grad_enabled()
        ctx = _Unpacked(ctx) if twice else ctx
        with torch.no_grad(), without_autocast():
            found = backward(ctx, *grads)
        if not twice:
            return found
        results = found if isinstance(found, tuple) else (found,)
        roots = [t for t in (*ctx.saved_tensors, *grads) if isinstance(t, Tensor) and t.requires_grad]
        leaves = [t.detach().requires_grad_() if isinstance(t, Tensor) else t for t in results]
        given = (*leaves, *roots)
        return torch._C._functions.DelayedError(_TWICE, len(given))(*given)[: len(leaves)]

    return run


def in_backward() -> bool:
    """Whether this runs inside a backward pass, as a recomputed forward does."""
    return torch._C._current_graph_task_id() != -1  # no public function says this


class _Unpacked:
    """A function's context, its saved tensors unpacked once: a checkpoint hands them out once."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def eager_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`once_differentiable` for a function whose forward is in no graph of `torch.compile`: compiled autograd, which
    traces every backward, leaves this one out."""
    return once_differentiable(backward, traced=False)


def needed(ctx: Any) -> tuple[bool, ...]:
    """Of a function's inputs, those whose gradient this backward is for: of all that need one, as `needs_input_grad`
    says, `torch.autograd.grad(y, x)` and each half of a zero-bubble schedule's backward want some."""
    needs: tuple[bool, ...] = ctx.needs_input_grad
    if torch.compiler.is_compiling():
        return needs
    edges = getattr(ctx, "next_functions", None)  # an operator's context has none
    if edges is None:
        return needs
    nodes = iter([node for node, _ in edges if node is not None])
    return tuple(need and _runs(next(nodes)) for need in needs)


def _runs(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)  # no public function says this
    except RuntimeError:  # a leaf that `torch.autograd.grad` was asked for, or no engine: compiled autograd has none
        return True


class Context:
    """What autograd hands to a function's forward and backward, where somebody else calls them."""

    call: Any

    def __init__(self, saved: Sequence[Tensor | None] = (), needs: Sequence[bool] = ()) -> None:
        self.saved_tensors, self.needs_input_grad = tuple(saved), tuple(needs)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors


def forward_of(function: type[Function], *args: Any) -> Any:
    """`function.apply(*args)`, or its forward alone where no backward may come: for few tokens, `apply` takes as long
    as a kernel."""
    if torch.compiler.is_compiling() and may_have_tangents():
        from trimtab.eager import eagerly

        return eagerly(function.apply, *args)
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or _transformed():
        return function.apply(*args)  # type: ignore[no-untyped-call]
    return function.forward(Context(), *args)


def _transformed() -> bool:
    """Whether values may carry tangents or be batches, which `apply` refuses."""
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def refuse_torch_func(who: str, phase: str | None = None, layer: str = "") -> None:
    """Raises:
    InputError: `torch.func.grad`, `vmap` or the like is at work.
    """
    if torch._C._are_functorch_transforms_active():
        raise InputError(
            f"{who} {layer}".rstrip()
            + " does not run under torch.func's transforms (grad, jacrev, jvp, vmap): use torch.autograd.grad",
            phase=phase,
        )


def may_have_tangents() -> bool:
    """While a graph is traced: whether values may carry tangents, for which torch takes zeros in an operator. They are
    not seen there, only that there may be some; whoever then leaves the graph is told by `apply`.

    Raises:
        InputError: under a transform of `torch.func`, which leaves no graph in good order.
    """
    refuse_torch_func("trimtab")
    return torch.autograd.forward_ad._current_level >= 0


class _Shaped(Function):
    """A view that is none to autograd, but shares its counter of changes with what it was made of: whoever has saved
    that for a backward is told of changes in place."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shape: torch.Size) -> Tensor:
        ctx.shape = rows.shape
        return rows.view(shape).detach()

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None]:
        return d.reshape(ctx.shape), None


class _Zeroed(Function):
    """The mask is no saved tensor: a rank without one saves nothing here either, so that a checkpoint that runs a layer
    again begins and ends at the same place, among the exchanges, on both."""

    @staticmethod
    def forward(ctx: Any, rows_TD: Tensor, mask_T: Tensor) -> Tensor:
        ctx.masked_T1 = ~mask_T[:, None]
        return rows_TD.masked_fill(ctx.masked_T1, 0)

    @staticmethod
    @eager_backward
    def backward(ctx: Any, d_TD: Tensor) -> tuple[Tensor, None]:
        return d_TD.masked_fill(ctx.masked_T1, 0), None


def zeroed(rows_TD: Tensor, mask_T: Tensor, *, over_ranks: bool) -> Tensor:
    """`rows_TD` with zeros where the mask is False, in the gradient as well, which may be NaN there."""
    if torch.compiler.is_compiling():
        if not over_ranks:
            return rows_TD.masked_fill(~mask_T[:, None], 0)
        from trimtab.eager import eagerly

        return cast(Tensor, eagerly(zeroed, rows_TD, mask_T, over_ranks=True))
    return cast(Tensor, forward_of(_Zeroed, rows_TD, mask_T))


def not_a_view(rows: Tensor, shape: torch.Size) -> Tensor:
    """`rows` in another shape: what FSDP2 hangs on a layer's result is lost from a view that is changed in place, as by
    a residual `y += x`."""
    if rows.shape == shape:
        return rows
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return rows.view(shape)
    shaped: Tensor = forward_of(_Shaped, rows, shape)
    return shaped
