"""Decisions survive activation recompute: a forward that runs again inside a backward takes the ones it took before.

The second run of a forward may differ from the first in the last bits, and a near-tie then falls the other way: counts
change and recompute fails, or worse, does not. So each router remembers its decisions until they cannot be asked for
any more, and a forward inside a backward asks. Which of several forwards in flight (micro-batches of a pipeline) runs
again is told by the checkpoint that runs it, and within one by its mask and its logits, of which decisions are made:
their sum over the tokens, by weights that tell positions apart, is nearly equal for the same tokens in the same order,
and far from equal for others. A reentrant checkpoint, or another inside or around it, does not say which it is: all are
looked at then, and in float64 sums must be as near as rounding leaves them, for a forward within a backward may also be
of tokens of its own. Where several are equal there, so are their decisions, but for a
jitter from the router's own generator and the step's counts before them, for `global_aux_loss`: a backward asks for
each of them once, the last forward first, as it goes; backwards of their own, in the order of the forwards, get each
other's. Those that were given their `ids` are given them again.

A decision lives as long as the autograd graph of its forward; under non-reentrant checkpointing, as long as anything
can be asked for that the checkpoint makes again: of a backward in two halves, the second may run the forward again for
the weights of shared experts alone, when the router's part of the graph is gone. Where there is none (the first run
under reentrant `torch.utils.checkpoint` has gradients off) it is kept, in training mode, until it is asked for, `limit`
of them at most. Under `torch.compile` nothing is remembered: what is run again there is the same compiled graph.

Legend: T tokens, K experts per token, E experts.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.checkpoint import _CachedTorchDispatchMode as _Cached
from torch.utils.checkpoint import _CachingTorchDispatchMode as _Caching
from torch.utils.checkpoint import _CheckpointFrame

from trimtab.autocast import without_autocast
from trimtab.kernels.memory import no_values

P = ParamSpec("P")
Result = TypeVar("Result")

TOLERANCE = 0.2
"""How far apart the sums of two runs may be, relative to their size. bfloat16 rounding makes 0.004, and more where the
router tells tokens apart by less than what they have in common; other tokens are about 1.4 apart."""

IN_FLOAT64 = 1e-4
"""In place of it for tokens in float64 where no checkpoint says that a forward runs again: it may as well be one of
tokens that are near others. Those in float32 may have come of bfloat16."""

SAME = 8.0
"""How many times as far as the nearest may be the sum of the same tokens: other tokens are hundreds of times as far."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """Ids: chosen [T, K], and kept [T, K], which is -1 also where the expert had no room. most: how many of the kept
    are not -1 at most, where a capacity says so. whole: whether all that were chosen are known to name an expert."""

    chosen: Tensor
    kept: Tensor
    most: int | None = None
    whole: bool = False

    @property
    def changes(self) -> int:
        """How often the ids were written to in place, as far as it is counted: not those of an inference mode."""
        return sum(ids._version for ids in (self.chosen, self.kept) if not ids.is_inference())

    def to(self, dtype: torch.dtype) -> Choice:
        """The same in other integers."""
        chosen = self.chosen.to(dtype)
        return replace(self, chosen=chosen, kept=chosen if self.kept is self.chosen else self.kept.to(dtype))


@dataclass(frozen=True, kw_only=True, eq=False)
class Remembered:
    """A choice and the changes of its ids by then, the sum of the logits and the mask that it was made of, the state
    that their jitter was drawn from, and the counts of the micro-batches before."""

    choice: Choice
    changes: int
    sum_E: Tensor
    real_T: Tensor | None
    noise: Tensor | None
    counts_before_E: Tensor


class _Hold(Function):
    """The identity; its node keeps `remembered` alive. No view to autograd: what FSDP2 hangs on a unit's result is lost
    where that is one and is changed in place, and it warns."""

    @staticmethod
    def forward(ctx: Any, weights_TK: Tensor, remembered: Remembered) -> Tensor:
        ctx.remembered = remembered
        return weights_TK.view_as(weights_TK).detach()

    @staticmethod
    def backward(ctx: Any, d_TK: Tensor) -> tuple[Tensor, None]:
        return d_TK, None


def in_backward() -> bool:
    """Whether this runs inside a backward pass, as a recomputed forward does."""
    return torch._C._current_graph_task_id() != -1  # no public function says this


def sum_of(logits_TE: Tensor) -> Tensor:
    """What tells micro-batches apart: the sum over the tokens, n-th by sin(n^2) and half its sign. Each token counts,
    and no shift or other order leaves the sum as it is."""
    logits = logits_TE.detach()
    n = torch.arange(1, logits.shape[0] + 1, dtype=torch.float32, device=logits.device)
    by = (n * n).sin()
    with without_autocast():
        return (by + by.sign() / 2).to(logits.dtype) @ logits


def unseen() -> AbstractContextManager[None]:
    """Around what a recompute leaves out, or does instead: selective checkpointing does not see it, which counts on
    the same operators in both runs. Other dispatch modes do."""
    if torch.compiler.is_compiling():
        return nullcontext()
    modes = _get_current_dispatch_mode_stack()
    return _only([m for m in modes if not _selects(m)]) if any(map(_selects, modes)) else nullcontext()


def _selects(mode: TorchDispatchMode) -> bool:
    return isinstance(mode, (_Caching, _Cached))


@contextmanager
def _only(modes: Sequence[TorchDispatchMode]) -> Iterator[None]:
    """Of the current dispatch modes these alone, which are not entered anew."""
    with _disable_current_modes(), ExitStack() as pushed:
        for mode in modes:
            _push_mode(mode)
            pushed.callback(_pop_mode)
        yield


def always_recomputed(function: Callable[P, Result]) -> Callable[P, Result]:
    """For what writes into memory of its own: selective checkpointing runs all of it again, whatever its policy, which
    can keep no tensor that is written to later."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Result:
        with unseen():
            return function(*args, **kwargs)

    # Dynamo counts compiled graphs by code object, and gives up at eight: each function has a count of its own.
    wrapped.__code__ = wrapped.__code__.replace(co_name=function.__name__)  # type: ignore[attr-defined]
    wrapped.always_recomputed = True  # type: ignore[attr-defined]
    return wrapped


def is_always_recomputed(function: Callable[..., Any]) -> bool:
    """Whether `always_recomputed` is around it."""
    return getattr(function, "always_recomputed", False)


def _checkpoint() -> tuple[_CheckpointFrame | None, bool]:
    """The non-reentrant checkpoint that this forward is in, which every tensor that it saves holds; and whether the
    checkpoint runs it again."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # no public function says this
    pack = None if hooks is None else inspect.unwrap(hooks[0])
    if getattr(pack, "__module__", "") != torch.utils.checkpoint.__name__:
        return None, False
    for held in (cell.cell_contents for cell in getattr(pack, "__closure__", None) or ()):
        again = isinstance(held, weakref.ref)
        frame = held() if again else held
        if isinstance(frame, _CheckpointFrame):
            return frame, again
    return None, False


class Memory:
    """The decisions of one router that a recompute may ask for. Copies and pickles are empty.

    Args:
        limit: how many forwards without a graph are remembered; a pipeline has as many in flight as it has stages.
    """

    def __init__(self, limit: int = 64) -> None:
        self._in_graphs: list[weakref.ref[Remembered]] = []
        self._held: deque[Remembered] = deque(maxlen=limit)
        self._asked: WeakKeyDictionary[Remembered, int] = WeakKeyDictionary()  # in which backward, at last
        self._of: WeakKeyDictionary[_CheckpointFrame, list[Remembered]] = WeakKeyDictionary()  # in their order

    def hold(self, remembered: Remembered, weights_TK: Tensor, training: bool) -> Tensor:
        """Remember; the weights must be used in place of those given."""
        if weights_TK.requires_grad:
            self._in_graphs = [ref for ref in self._in_graphs if ref() is not None]
            self._in_graphs.append(weakref.ref(remembered))
            frame, again = _checkpoint()
            if frame is not None and not again:
                self._of.setdefault(frame, []).append(remembered)
            held: Tensor = _Hold.apply(weights_TK, remembered)  # type: ignore[no-untyped-call]
            return held
        if training:
            small = torch.int16 if remembered.sum_E.shape[0] < 1 << 15 else torch.int32  # many may lie here for long
            choice = remembered.choice.to(small)
            self._held.append(replace(remembered, choice=choice, changes=choice.changes))
        return weights_TK

    def recall(self, x_TD: Tensor, sum_E: Tensor, real_T: Tensor | None) -> Remembered | None:
        """What was decided for these tokens, if this is a forward that runs again. One host sync then, on a device."""
        if not in_backward():
            return None
        frame, again = _checkpoint()
        candidates: Sequence[Remembered] = self._of.get(frame, ()) if frame is not None and again else ()
        tolerance = TOLERANCE
        if not candidates:
            tolerance = IN_FLOAT64 if x_TD.dtype == torch.float64 else TOLERANCE
            in_graphs = [one for one in (ref() for ref in self._in_graphs) if one is not None]
            candidates = (*reversed(in_graphs), *reversed(self._held))
        alike = (x_TD.shape[0], sum_E.dtype, sum_E.device, real_T is None)
        known = [
            m for m in candidates
            if (m.choice.chosen.shape[0], m.sum_E.dtype, m.sum_E.device, m.real_T is None) == alike
        ]  # fmt: skip
        if not known:
            return None
        size = sum_E.norm().clamp(min=torch.finfo(sum_E.dtype).tiny)
        far_N = (torch.stack([one.sum_E for one in known]) - sum_E).norm(dim=-1) / size
        if real_T is not None:
            masks_NT = torch.stack([one.real_T for one in known if one.real_T is not None])
            far_N = far_N.masked_fill((masks_NT != real_T).any(-1), math.inf)
        distances = [0.0] * len(known) if no_values(far_N.device) else far_N.tolist()
        near = min(distances)
        if not near <= tolerance:
            return None
        same = [one for one, far in zip(known, distances, strict=True) if far <= SAME * near]
        this = torch._C._current_graph_task_id()
        found = next((one for one in same if self._asked.get(one) != this), same[0])
        self._asked[found] = this
        if any(one is found for one in self._held):
            self._held = deque((one for one in self._held if one is not found), maxlen=self._held.maxlen)
        return found

    def alive(self) -> int:
        """How many decisions may still be asked for."""
        return len(self._held) + sum(ref() is not None for ref in self._in_graphs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Memory, (self._held.maxlen,)
