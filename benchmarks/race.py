"""The race: contestants in processes of their own, warmed up, judged, then timed in turns.

    build   all at once      a contestant that cannot be built is a row with its reason
    judge   one by one       a contestant with wrong numbers does not race; what it ran for that was its first warm-up
    warm    one by one       two steps of each mode, one where steps are slow
    turns   A B C, C B A …   mode by mode, a step or a few each: what is compared is timed side by side

Of several limits only those that may set it take turns: where bf16 is emulated, dense float32 GEMMs do.

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
from benchmarks.result import ASIDE, Entry
from trimtab.errors import ConfigError

Judge = Callable[[Contestant, list[dict[str, Tensor]]], str | None]
"""(contestant, outcome of each rank) -> what is wrong with it, or None."""
Say = Callable[[str], None]

REST = 0.01
"""Seconds between turns, in which threads of the last one stop spinning."""
SLOW = 0.5
"""Seconds of a step from which a second one warms nothing up."""
VERY_SLOW = 4.0
"""Seconds of a judged step, with what it sends to be judged, from which it is taken for the length of a step."""
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
                _warm(contestants, c, field, [mode for mode in modes if mode in field.facts[c.name]["modes"]], judged)
        idle = set_aside(contestants, {key: seconds for key, seconds in field.steps.items() if key[0] in field.teams})
        for name, mode in sorted(idle):
            if mode not in field.facts[name].setdefault(ASIDE, []):
                field.facts[name][ASIDE].append(mode)
        racing = [(name, mode) for mode in modes for name, of in field.steps if of == mode]
        racing = [each for each in racing if each[0] in field.teams and each not in idle]
        turns = pace.turns_of([field.steps[each] for each in racing])
        for turn in range(turns):
            for name, mode in racing if turn % 2 == 0 else racing[::-1]:
                if name not in field.teams:
                    continue
                time.sleep(REST)
                with field.excused(name):
                    by_rank = field.ask(name, ("time", mode, steps_of(field.steps[name, mode])))
                    taken[name].setdefault(mode, []).append(slowest(by_rank))
    return [
        Entry(
            name=c.name, role=c.role, group=c.group, failed=field.failed.get(c.name),
            facts={k: v for k, v in field.facts.get(c.name, {}).items() if k not in ("modes", "judged")},
            seconds={} if c.name in field.failed else taken[c.name],
        )
        for c in contestants
    ]  # fmt: skip


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

    def team(self, name: str) -> Team:
        """Raises ContestantFailed where it is out."""
        if name not in self.teams:
            raise ContestantFailed(self.failed[name])
        return self.teams[name]

    def ask(self, name: str, command: tuple[Any, ...]) -> list[Any]:
        """A team's answers. Raises ContestantFailed."""
        return self.team(name).ask(command, self._patience)

    @contextmanager
    def excused(self, name: str) -> Iterator[None]:
        """Who fails in here is out, with its reason."""
        try:
            yield
        except ContestantFailed as error:
            if name in self.teams:
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


def _judge(contestant: Contestant, field: Field, judge: Judge | None) -> dict[str, float]:
    """mode -> seconds of the step that was judged, where there was one. Raises ContestantFailed for wrong numbers."""
    began = time.monotonic()
    saved = field.ask(contestant.name, ("outcome",)) if judge is not None else []
    took = time.monotonic() - began
    outcomes = [torch.load(io.BytesIO(one), weights_only=True) for one in saved if one is not None]
    if judge is not None and outcomes and (wrong := judge(contestant, outcomes)) is not None:
        raise ContestantFailed(f"wrong numbers, not raced: {wrong}")
    ran = field.facts[contestant.name]["judged"] if outcomes else ""
    return {ran: took} if ran else {}


def _warm(
    contestants: Sequence[Contestant], c: Contestant, field: Field, modes: Sequence[str], judged: dict[str, float]
) -> None:
    """A limit that another beats by far in one mode is asked for no more."""
    for mode in modes:
        if judged.get(mode, 0.0) > VERY_SLOW:
            field.steps[c.name, mode] = judged[mode]
            continue
        for warm in (True,) if mode in judged else (False, True):
            field.steps[c.name, mode] = max(field.ask(c.name, ("warm", mode, 1)))
            # A first step that is short may have made kernels for most of its time.
            fair = warm or field.steps[c.name, mode] > SLOW
            if fair and (c.name, mode) in set_aside(contestants, field.steps):
                field.facts[c.name][ASIDE] = list(modes)
                return
            if field.steps[c.name, mode] > SLOW:
                break


def set_aside(contestants: Sequence[Contestant], warm: dict[tuple[str, str], float]) -> set[tuple[str, str]]:
    """Limits that took twice as long as another limit of their group: they set none, and their turns cost time."""
    limits = [c for c in contestants if c.role == "limit"]
    found = set()
    for (name, mode), seconds in warm.items():
        group = next((c.group for c in limits if c.name == name), None)
        others = [warm[c.name, mode] for c in limits if c.group == group and (c.name, mode) in warm]
        if group is not None and seconds > 2 * min(others):
            found.add((name, mode))
    return found


def slowest(by_rank: list[list[float]]) -> list[float]:
    """Seconds of each step: those of its slowest rank."""
    return [max(times) for times in zip(*by_rank, strict=True)]


def joined(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' answers as one: the most of each number, the first rank's word for the rest."""
    return {
        key: max(rank[key] for rank in by_rank) if isinstance(value, int | float) else value
        for key, value in by_rank[0].items()
    }
