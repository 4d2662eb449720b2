"""Implementations that go wrong in one way each, on top of trimtab's."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from trimtab.verify.implementation import Outcome, Place, Share, Subject
from trimtab.verify.patterns import Pattern
from trimtab.verify.topologies import Topology
from trimtab.verify.trimtab_impl import Impl
from trimtab.verify.truth import LayerWeights, Sizes


class _Broken(Impl):
    """`given` may change what a rank is given, `spoil` what came of a step: where K = 2, on two ranks."""

    def given(self, share: Share, rank: int) -> None:
        pass

    def spoil(self, outcome: Outcome, rank: int, step: int) -> Outcome:
        return outcome

    def build(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> Subject:
        subject = super().build(place, sizes, weights)
        return _Subject(self, subject, place.rank) if sizes.top_k == 2 and place.topology.ranks == 2 else subject


class _Subject:
    def __init__(self, broken: _Broken, subject: Subject, rank: int) -> None:
        self.broken, self.subject, self.rank, self.steps = broken, subject, rank, 0

    def step(self, share: Share) -> Outcome:
        self.steps += 1
        self.broken.given(share, self.rank)
        return self.broken.spoil(self.subject.step(share), self.rank, self.steps)


class OffByOneImpl(_Broken):
    def spoil(self, outcome: Outcome, rank: int, step: int) -> Outcome:
        down = outcome.grads["0.down"]
        assert down is not None
        down = down.clone()
        down[1, 2, 3] += rank
        return replace(outcome, grads={**outcome.grads, "0.down": down})


class NoGradientImpl(_Broken):
    def spoil(self, outcome: Outcome, rank: int, step: int) -> Outcome:
        return replace(outcome, grads={**outcome.grads, "0.up": None})


class AtHomeImpl(_Broken):
    """All is computed at home, whatever was asked for."""

    def spoil(self, outcome: Outcome, rank: int, step: int) -> Outcome:
        return replace(outcome, copied=[torch.zeros_like(copied) for copied in outcome.copied or []])


class UnevenImpl(_Broken):
    """A rank has one slot more than the mean, and another one less."""

    def spoil(self, outcome: Outcome, rank: int, step: int) -> Outcome:
        return replace(outcome, slots=[slots + torch.tensor([1, -1]) for slots in outcome.slots or []])


class FlakyImpl(_Broken):
    """The last bit of one output changes from run to run."""

    def spoil(self, outcome: Outcome, rank: int, step: int) -> Outcome:
        y = outcome.y.detach().clone()
        if step % 2 == 0:
            y[0, 0, 0] = torch.nextafter(y[0, 0, 0], torch.tensor(9.0))
        return replace(outcome, y=y)


class HangsImpl(_Broken):
    def spoil(self, outcome: Outcome, rank: int, step: int) -> Outcome:
        if rank == 1:
            time.sleep(600)
        return outcome


class DiesImpl(_Broken):
    def spoil(self, outcome: Outcome, rank: int, step: int) -> Outcome:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome


class LeavesImpl(_Broken):
    def spoil(self, outcome: Outcome, rank: int, step: int) -> Outcome:
        return sys.exit(0) if rank == 1 else outcome


class RaisesAloneImpl(_Broken):
    """One rank raises where the others wait for it."""

    def given(self, share: Share, rank: int) -> None:
        if rank == 1:
            raise KeyError("no such slot")


class OverwritesImpl(_Broken):
    """Computes with other numbers than it was given, and puts them where those were."""

    def given(self, share: Share, rank: int) -> None:
        share.x_BlD.mul_(2)
        share.dy_BlD.zero_()


class WidensImpl(_Broken):
    """The right numbers in another dtype, and a gradient that nobody asked for."""

    def spoil(self, outcome: Outcome, rank: int, step: int) -> Outcome:
        grads = {**outcome.grads, "7.up": torch.zeros(3)}
        return replace(outcome, y=outcome.y.double(), dx=outcome.dx.double(), grads=grads)


class RaisesOnceImpl(_Broken):
    """One rank raises in the first case alone, when all have done their part; what follows has the same sizes."""

    def __init__(self) -> None:
        self.raised = False

    def spoil(self, outcome: Outcome, rank: int, step: int) -> Outcome:
        if rank == 1 and not self.raised:
            self.raised = True
            raise KeyError("no such slot")
        return outcome


class LacksImpl(Impl):
    def lacks(self, topology: Topology, pattern: Pattern) -> str | None:
        return "knows one expert only" if pattern.name == "top1" else None


class RefusesImpl(Impl):
    """Says on every rank that it can't; one kind of it on one rank alone."""

    def build(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> Subject:
        if sizes.top_k == 1 or (sizes.layers == 2 and place.rank == 1):
            raise ValueError("takes a power of two of these")
        return super().build(place, sizes, weights)
