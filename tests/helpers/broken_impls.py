"""Implementations that go wrong in one way each, on top of trimtab's."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from trimtab.verify.implementation import Outcome, Place, Share, Subject
from trimtab.verify.patterns import Pattern
from trimtab.verify.topologies import Topology
from trimtab.verify.trimtab_impl import Impl
from trimtab.verify.truth import LayerWeights, Sizes

Spoil = Callable[[Outcome, int, int], Any]
"""(what came of a step, rank, step) -> what is said of it."""


class _Broken(Impl):
    """`given` may change what a rank is given, `spoil` what came of a step: where K = 2, on two ranks."""

    def __init__(self, spoil: Spoil = lambda o, *_: o, given: Callable[[Share, int], Any] = lambda *_: None) -> None:
        self.spoil, self.given = spoil, given

    def build(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> Subject:
        subject = super().build(place, sizes, weights)
        return _Subject(self, subject, place.rank) if sizes.top_k == 2 and place.topology.ranks == 2 else subject


class _Subject:
    def __init__(self, broken: _Broken, subject: Subject, rank: int) -> None:
        self.broken, self.subject, self.rank, self.steps = broken, subject, rank, 0

    def step(self, share: Share) -> Outcome:
        self.steps += 1
        self.broken.given(share, self.rank)
        outcome: Outcome = self.broken.spoil(self.subject.step(share), self.rank, self.steps)
        return outcome


def _off_by_one(o: Outcome, rank: int, step: int) -> Outcome:
    down = torch.as_tensor(o.grads["0.down"]).clone()
    down[1, 2, 3] += rank
    return replace(o, grads={**o.grads, "0.down": down})


def _flaky(o: Outcome, rank: int, step: int) -> Outcome:
    """The last bit of one output changes from run to run."""
    y = o.y.detach().clone()
    if step % 2 == 0:
        y[0, 0, 0] = torch.nextafter(y[0, 0, 0], torch.tensor(9.0))
    return replace(o, y=y)


def _wider(o: Outcome, rank: int, step: int) -> Outcome:
    """The right numbers in another dtype, and a gradient that nobody asked for."""
    return replace(o, y=o.y.double(), dx=o.dx.double(), grads={**o.grads, "7.up": torch.zeros(3)})


def _raise(rank: int) -> None:
    if rank == 1:
        raise KeyError("no such slot")


def _once() -> Spoil:
    """In the first case alone, when all have done their part; what follows has the same sizes."""
    left = [_raise]
    return lambda o, rank, step: (left.pop()(rank) if rank == 1 and left else None, o)[1]


OffByOneImpl, FlakyImpl, WidensImpl = (partial(_Broken, spoil) for spoil in (_off_by_one, _flaky, _wider))
NoGradientImpl = partial(_Broken, lambda o, *_: replace(o, grads={**o.grads, "0.up": None}))
AtHomeImpl = partial(_Broken, lambda o, *_: replace(o, copied=[torch.zeros_like(c) for c in o.copied or []]))
UnevenImpl = partial(_Broken, lambda o, *_: replace(o, slots=[s + torch.tensor([1, -1]) for s in o.slots or []]))
HangsImpl = partial(_Broken, lambda o, rank, _: (time.sleep(600 * rank), o)[1])
DiesImpl = partial(_Broken, lambda o, rank, _: os.kill(os.getpid(), signal.SIGKILL) if rank else o)
LeavesImpl = partial(_Broken, lambda o, rank, _: sys.exit(0) if rank else o)
RaisesAloneImpl = partial(_Broken, given=lambda share, rank: _raise(rank))  # where the others wait for it
OverwritesImpl = partial(_Broken, given=lambda share, _: (share.x_BlD.mul_(2), share.dy_BlD.zero_()))


def RaisesOnceImpl() -> Impl:
    return _Broken(_once())


class LacksImpl(Impl):
    def lacks(self, topology: Topology, pattern: Pattern) -> str | None:
        return "knows one expert only" if pattern.name == "top1" else None


class RefusesImpl(Impl):
    """Says on every rank that it can't; one kind of it on one rank alone."""

    def build(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> Subject:
        if sizes.top_k == 1 or (sizes.layers == 2 and place.rank == 1):
            raise ValueError("takes a power of two of these")
        return super().build(place, sizes, weights)
