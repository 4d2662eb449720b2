"""What a router decided in the first run of a checkpointed block is taken in the second: ids are recorded and taken,
logits, scores, weights and losses are computed again, loads are counted in the first run only. A near-tie that fell the
other way in the second run would change counts, and the recompute would fail, or worse, not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from trimtab.errors import InputError
from trimtab.operators import operator

T = TypeVar("T")
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


class _Tape:
    """The decisions of one run of a block, by kind and in order, and how many of them a second run has taken."""

    def __init__(self) -> None:
        self.again = self.graded = False
        self._decided: dict[object, list[Any]] = {}
        self._taken: dict[object, int] = {}

    def begin(self, again: bool) -> None:
        """A run begins. A backward in two halves begins the second one twice."""
        self.again = again
        self.graded = self.graded if again else torch.is_grad_enabled()
        self._taken.clear()

    def keep(self, value: Any, kind: object) -> None:
        self._decided.setdefault(kind, []).append(value)

    def next(self, kind: object, default: Any) -> Any:
        """The value kept at this place; `default` where there is none."""
        kept, at = self._decided.get(kind, []), self._taken.get(kind, 0)
        self._taken[kind] = at + 1
        return kept[at] if at < len(kept) else default


class _Tapes(threading.local):
    """Those of the blocks that this thread is in, the innermost last, and whether policies are shut out. A context
    manager around modules that it is not handed can reach them in no other way."""

    def __init__(self) -> None:
        self.running: list[_Tape] = []
        self.hidden_from_ac_policy = False


_TAPES = _Tapes()


class _Run:
    """The context of one run of a block."""

    def __init__(self, tape: _Tape, again: bool, inner: AbstractContextManager[Any]) -> None:
        self._tape, self._again = tape, again
        self._inner: AbstractContextManager[Any] = _Policy(inner) if isinstance(inner, TorchDispatchMode) else inner

    def __enter__(self) -> None:
        self._inner.__enter__()
        self._tape.begin(self._again)
        _TAPES.running.append(self._tape)

    def __exit__(self, *error: Any) -> bool | None:
        _TAPES.running.pop()
        return self._inner.__exit__(*error)


class Taped:
    """A function for a checkpoint that takes no `context_fn`, reentrant ones too: its second run takes what was decided
    in the first one.

    around: a context for each run.
    """

    def __init__(
        self, function: Callable[..., Any], around: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self._function, self._around = function, around
        self._tape, self._ran = _Tape(), False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        again, self._ran = self._ran, True
        with self._around(), _Run(self._tape, again, nullcontext()):
            return self._function(*args, **kwargs)


class _Policy(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of selective checkpointing, which is asked for what is not `hidden_from_ac_policy`."""

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _TAPES.hidden_from_ac_policy:
            return func(*args, **(kwargs or {}))
        return self._mode.__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


class hidden_from_ac_policy:
    """Within, selective checkpointing keeps nothing and runs all again, whatever its policy: it can keep no tensor that
    is written to, and counts on the same operators in both runs, which FSDP2's units do not have."""

    def __enter__(self) -> None:
        self._before = _TAPES.hidden_from_ac_policy
        _TAPES.hidden_from_ac_policy = bool(_TAPES.running)

    def __exit__(self, *error: object) -> None:
        _TAPES.hidden_from_ac_policy = self._before


def replay_in_recompute(context_fn: Callable[[], Contexts] | None = None) -> Contexts:
    """The two contexts of a non-reentrant `torch.utils.checkpoint`, for its `context_fn`:

        checkpoint(block, x, use_reentrant=False, context_fn=trimtab.replay_in_recompute)

    Without it a recompute decides again, and its loads are counted again. Reentrant checkpointing has no `context_fn`:
    its second run decides again, and alone is counted, for the first one runs without gradients.

    context_fn: other contexts to be entered as well. With selective checkpointing, whose policy then sees all of a
    `MoE` but what leads from the router to the combined rows:

        selective = partial(create_selective_checkpoint_contexts, policy)
        checkpoint(block, x, use_reentrant=False, context_fn=partial(replay_in_recompute, selective))

    Checkpoints may be nested, and any number of them in flight. In a graph of `torch.compile` that holds the
    checkpoint, the same graph runs again and nothing needs to be recorded.
    """
    if torch.compiler.is_compiling():
        context_fn = context_fn or partial(create_selective_checkpoint_contexts, [])
        return context_fn()
    first, second = (nullcontext(), nullcontext()) if context_fn is None else context_fn()
    tape = _Tape()
    return _Run(tape, False, first), _Run(tape, True, second)


def running() -> bool:
    """Whether a block is run whose decisions are recorded or taken."""
    return bool(_TAPES.running)


def replaying() -> bool:
    """Whether this is the second run of a block."""
    return any(tape.again for tape in _TAPES.running)


def noted(value: T, kind: object, *missing: T) -> T:
    """`value`; in the second run of a block the value that the first one noted, and where it noted none, `missing` or
    `value`. kind: names the queue."""
    for tape in _TAPES.running:
        if tape.again:
            value = tape.next(kind, *missing or (value,))
    for tape in _TAPES.running:
        if not tape.again:
            tape.keep(value, kind)
    return value


def counted_before() -> bool:
    """Whether the first run of a block, of which this is the second, had gradients and so has been counted. That of a
    reentrant checkpoint has none."""
    return any(tape.again and tape.graded for tape in _TAPES.running)


def replayed(decided: Sequence[Tensor], kind: str) -> Sequence[Tensor]:
    """Records tensors in the first run of a block; returns the recorded ones in the second. kind: names the queue."""
    return _REPLAYED(decided, kind) if running() else decided


def _replayed(decided: Sequence[Tensor], kind: str) -> Sequence[Tensor]:
    given = noted([t.clone() for t in decided], kind, [])
    if [t.shape for t in given] != [t.shape for t in decided]:
        raise InputError(
            "a checkpointed block came to another router, or with another number of tokens, than in its first run: "
            "what is checkpointed must do the same in both",
            phase="route",
        )
    return [t.clone() for t in given]  # nobody writes to what was kept


_REPLAYED = operator(
    "replayed(Tensor[] decided, str kind) -> Tensor[]", _replayed, lambda decided, _: [t.clone() for t in decided]
)
