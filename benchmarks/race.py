"""The race: contestants in processes of their own, warmed up, judged, then timed in turns.

    build   all at once      a contestant that cannot be built is a row with its reason
    judge   one by one       a contestant with wrong numbers does not race; what it ran for that was its first warm-up
    warm    one by one       two steps of each mode, one where steps are slow
    turns   A B C, C B A …   mode by mode, a step or a few each: what is compared is timed side by side

A fresh process for each contestant and malloc setting: none inherits another's heap, and peers' times were seen to
differ by up to 1.8 with what malloc had served before.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.contestant import Contestant, ContestantFailed, Team
from benchmarks.result import Entry
from trimtab.errors import ConfigError

Judge = Callable[[Contestant, list[dict[str, Tensor]]], str | None]
"""(contestant, outcome of each rank) -> what is wrong with it, or None."""
Say = Callable[[str], None]

REST = 0.01
"""Seconds between turns, in which threads of the last one stop spinning."""
SLOW = 0.5
"""Seconds of a step from which a second one warms nothing up."""
BRIEF = 0.03
"""Seconds of a turn below which it takes several steps: what comes before it has left its data in the caches."""
MOST = 60
"""Turns."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long a race takes.

    turns: of every contestant, at least. seconds: for all turns of all contestants together; more turns as long as they
    last, up to `MOST`. A turn is one step of each mode, or as many as take `BRIEF` seconds.
    patience: after so many seconds without an answer a contestant is given up.

    Raises ConfigError for values that make no race.
    """

    turns: int = 5
    seconds: float = 20.0
    patience: float = 600.0

    def __post_init__(self) -> None:
        if self.turns < 1 or not 0 < self.seconds < math.inf or not 0 < self.patience < math.inf:
            raise ConfigError("--turns must be at least 1, --seconds and --patience more than 0, and numbers")

    def turns_of(self, steps: Sequence[float]) -> int:
        """Turns of a race whose contestants and modes take so many seconds a step."""
        a_round = sum(REST + step * steps_of(step) for step in steps)
        return max(self.turns, min(MOST, int(self.seconds / max(a_round, REST))))


def steps_of(seconds: float) -> int:
    """Steps in a turn, where one takes so many seconds."""
    return min(1_000, max(1, int(BRIEF / max(seconds, 1e-7))))


def race(
    contestants: Sequence[Contestant],
    modes: Sequence[str],
    *,
    malloc: str,
    pace: Pace,
    judge: Judge | None = None,
    say: Say = lambda _: None,
) -> list[Entry]:
    """One entry per contestant, in their order. A contestant takes part in those of `modes` that it has."""
    field = Field(pace.patience, say)
    taken: dict[str, dict[str, list[list[float]]]] = {c.name: {} for c in contestants}
    with field.ended():
        field.build(contestants, malloc)
        for c in [c for c in contestants if c.name in field.teams]:
            with field.excused(c.name):
                judged = _judge(c, field, judge)
                _warm(c.name, field, [mode for mode in modes if mode in field.facts[c.name]["modes"]], judged)
        racing = [(name, mode) for mode in modes for name, of in field.steps if of == mode and name in field.teams]
        for turn in range(pace.turns_of([field.steps[each] for each in racing])):
            for name, mode in racing if turn % 2 == 0 else racing[::-1]:
                if name not in field.teams:
                    continue
                time.sleep(REST)
                with field.excused(name):
                    by_rank = field.ask(name, ("time", mode, steps_of(field.steps[name, mode])))
                    for part, seconds in slowest(by_rank).items():
                        taken[name].setdefault(part, []).append(seconds)
        for name in list(field.teams):
            with field.excused(name):
                field.facts[name]["peak"] = max(field.ask(name, ("peak",)))
    return [
        Entry(
            name=c.name,
            role=c.role,
            group=c.group,
            failed=field.failed.get(c.name),
            facts={k: v for k, v in field.facts.get(c.name, {}).items() if k not in ("modes", "judged")},
            seconds={} if c.name in field.failed else taken[c.name],
        )
        for c in contestants
    ]


def weigh(contestants: Sequence[Contestant], mode: str, *, patience: float, say: Say) -> dict[str, dict[str, Any]]:
    """contestant -> bytes of one step, of the rank with the most; or {"failed": why}."""
    field = Field(patience, say)
    found: dict[str, dict[str, Any]] = {}
    with field.ended():
        field.build(contestants, "strict")
        for name in list(field.teams):
            with field.excused(name):
                found[name] = joined(field.ask(name, ("memory", mode)))
    return {c.name: found[c.name] if c.name in found else {"failed": field.failed[c.name]} for c in contestants}


class Field:
    """The teams that are in, and why the others are not. steps: (contestant, mode) -> seconds of its last warm-up."""

    def __init__(self, patience: float, say: Say) -> None:
        self._patience, self._say = patience, say
        self.teams: dict[str, Team] = {}
        self.failed: dict[str, str] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.steps: dict[tuple[str, str], float] = {}

    def build(self, contestants: Sequence[Contestant], malloc: str) -> None:
        """All at once: most of it is waiting for imports, and none of it is timed."""
        for c in contestants:
            self.teams[c.name] = Team(c, malloc)
        for c in contestants:
            with self.excused(c.name):
                self.facts[c.name] = joined(self.teams[c.name].answers(self._patience))

    def ask(self, name: str, command: tuple[Any, ...]) -> list[Any]:
        """A team's answers. Raises ContestantFailed."""
        return self.teams[name].ask(command, self._patience)

    @contextmanager
    def excused(self, name: str) -> Iterator[None]:
        """Who fails in here is out, with its reason."""
        try:
            yield
        except ContestantFailed as error:
            self.failed[name] = str(error)
            self._say(f"{name}: {error}")
            self.teams.pop(name).kill()

    @contextmanager
    def ended(self) -> Iterator[None]:
        """No process is left behind."""
        try:
            yield
        except BaseException:
            for team in self.teams.values():
                team.kill()
            raise
        for team in self.teams.values():
            team.close()


def _judge(contestant: Contestant, field: Field, judge: Judge | None) -> str:
    """The mode whose step was judged, "" where none was. Raises ContestantFailed for wrong numbers."""
    if judge is None:
        return ""
    saved = field.ask(contestant.name, ("outcome",))
    outcomes = [torch.load(io.BytesIO(one), weights_only=True) for one in saved if one is not None]
    if outcomes and (wrong := judge(contestant, outcomes)) is not None:
        raise ContestantFailed(f"wrong numbers, not raced: {wrong}")
    return str(field.facts[contestant.name]["judged"]) if outcomes else ""


def _warm(name: str, field: Field, modes: Sequence[str], judged: str) -> None:
    for mode in modes:
        for _ in range(1 if mode == judged else 2):
            field.steps[name, mode] = slowest(field.ask(name, ("time", mode, 1)))[mode][0]
            if field.steps[name, mode] > SLOW:
                break


def slowest(by_rank: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Mode or part -> seconds of each step: those of its slowest rank."""
    return {part: [max(times) for times in zip(*(rank[part] for rank in by_rank), strict=True)] for part in by_rank[0]}


def joined(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' answers as one: the most of each number, the first rank's word for the rest."""
    return {
        key: max(rank[key] for rank in by_rank) if isinstance(value, int | float) else value
        for key, value in by_rank[0].items()
    }
