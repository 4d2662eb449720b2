"""Where the gradients of one weight's tensors are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from trimtab.kernels.api import put


class Sink:
    """Where the gradients of a weight's tensors go, in the order of `GroupedWeight.tensors`.

    wanted: which are asked for. into: where those are written, None elsewhere, and everywhere as long as products wait.
    adds: whether they are added to what is there.
    """

    __slots__ = ("adds", "into", "wanted")

    def __init__(self, wanted: Sequence[bool]) -> None:
        self.wanted = wanted
        self.into: list[Tensor | None] = [None] * len(wanted)
        self.adds: list[bool] = [False] * len(wanted)

    @classmethod
    def of(cls, out: Sequence[Tensor], wanted: Sequence[bool], adds: Sequence[bool]) -> Sink:
        """From the lists that operators take: `out` and `adds` have an entry for each one that is wanted."""
        sink = cls(wanted)
        sink.fill(out, adds)
        return sink

    def fill(self, out: Iterable[Tensor], adds: Iterable[bool]) -> None:
        """Take as many as are wanted."""
        buffers, flags = iter(out), iter(adds)
        self.into = [next(buffers) if want else None for want in self.wanted]
        self.adds = [next(flags) if want else False for want in self.wanted]


def put_each(targets: Sequence[Tensor | None], values: Sequence[Tensor], adds: Sequence[bool]) -> None:
    """`put` each that there is a target for."""
    for target, value, add in zip(targets, values, adds, strict=True):
        if target is not None:
            put(target, value, add)
