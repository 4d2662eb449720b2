"""Implementations that go wrong in one way each, on top of trimtab's."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from trimtab.verify.adapters.base import Outcome, Place, Share, Subject
from trimtab.verify.adapters.trimtab_impl import Impl
from trimtab.verify.patterns import Pattern
from trimtab.verify.problem import LayerWeights, Sizes
from trimtab.verify.topologies import Topology


class _Wrapped:
    def __init__(self, subject: Subject, rank: int) -> None:
        self.subject, self.rank, self.steps = subject, rank, 0

    def step(self, share: Share) -> Outcome:
        self.steps += 1
        return self.spoil(self.subject.step(share))

    def spoil(self, outcome: Outcome) -> Outcome:
        raise NotImplementedError


class OffByOne(_Wrapped):
    def spoil(self, outcome: Outcome) -> Outcome:
        down = outcome.grads["0.down"]
        assert down is not None
        down = down.clone()
        down[1, 2, 3] += 1
        return replace(outcome, grads={**outcome.grads, "0.down": down if self.rank else outcome.grads["0.down"]})


class NoGradient(_Wrapped):
    def spoil(self, outcome: Outcome) -> Outcome:
        return replace(outcome, grads={**outcome.grads, "0.up": None})


class Flaky(_Wrapped):
    """The last bit of one output changes from run to run."""

    def spoil(self, outcome: Outcome) -> Outcome:
        y = outcome.y.detach().clone()
        if self.steps % 2 == 0:
            y[0, 0, 0] = torch.nextafter(y[0, 0, 0], torch.tensor(9.0))
        return replace(outcome, y=y)


class Hangs(_Wrapped):
    def spoil(self, outcome: Outcome) -> Outcome:
        if self.rank == 1:
            time.sleep(600)
        return outcome


class Dies(_Wrapped):
    def spoil(self, outcome: Outcome) -> Outcome:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome


class RaisesAlone:
    """One rank raises where the others wait for it."""

    def __init__(self, subject: Subject, rank: int) -> None:
        self.subject, self.rank = subject, rank

    def step(self, share: Share) -> Outcome:
        if self.rank == 1:
            raise KeyError("no such slot")
        return self.subject.step(share)


class RaisesAfter(_Wrapped):
    """One rank raises when all have done their part."""

    def spoil(self, outcome: Outcome) -> Outcome:
        if self.rank == 1:
            raise KeyError("no such slot")
        return outcome


class Overwrites(_Wrapped):
    """Computes with other numbers than it was given, and puts them where those were."""

    def step(self, share: Share) -> Outcome:
        share.x_BlD.mul_(2)
        share.dy_BlD.zero_()
        return self.subject.step(share)


class Widens(_Wrapped):
    """The right numbers in another dtype, and a gradient that nobody asked for."""

    def spoil(self, outcome: Outcome) -> Outcome:
        grads = {**outcome.grads, "7.up": torch.zeros(3)}
        return replace(outcome, y=outcome.y.double(), dx=outcome.dx.double(), grads=grads)


class Leaves(_Wrapped):
    def spoil(self, outcome: Outcome) -> Outcome:
        if self.rank == 1:
            sys.exit(0)
        return outcome


class _Made(Impl):
    wrapper: Callable[[Subject, int], Subject]

    def build(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> Subject:
        subject = super().build(place, sizes, weights)
        return self.wrapper(subject, place.rank) if sizes.top_k == 2 and place.topology.ranks == 2 else subject


class OffByOneImpl(_Made):
    wrapper = OffByOne


class NoGradientImpl(_Made):
    wrapper = NoGradient


class FlakyImpl(_Made):
    wrapper = Flaky


class HangsImpl(_Made):
    wrapper = Hangs


class DiesImpl(_Made):
    wrapper = Dies


class RaisesAloneImpl(_Made):
    wrapper = RaisesAlone


class OverwritesImpl(_Made):
    wrapper = Overwrites


class WidensImpl(_Made):
    wrapper = Widens


class LeavesImpl(_Made):
    wrapper = Leaves


class LacksImpl(Impl):
    def lacks(self, topology: Topology, pattern: Pattern) -> str | None:
        return "knows one expert only" if pattern.name == "top1" else None


class RaisesOnceImpl(Impl):
    """Goes wrong in the first case alone, on one rank; what follows has the same sizes."""

    def __init__(self) -> None:
        self.built = 0

    def build(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> Subject:
        self.built += 1
        subject = super().build(place, sizes, weights)
        return RaisesAfter(subject, place.rank) if self.built == 1 else subject
