"""The race: contestants in processes of their own, warmed up, judged, then timed in turns.

    build   one by one       a contestant that cannot be built is a row with its reason
    warm    one by one       two steps of each mode, one where steps are slow
    judge   one by one       a contestant with wrong numbers does not race
    turns   A B C, C B A …   each turn some steps of every mode

Of several limits only those that may set it take turns: where bf16 is emulated, dense float32 GEMMs do.

A fresh process for each contestant and malloc setting: none inherits another's heap, and peers' times were seen to
differ by up to 1.8 with what malloc had served before.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.bench.contestant import Contestant, ContestantFailed, Team
from trimtab.bench.result import Entry
from trimtab.errors import ConfigError

Judge = Callable[[Contestant, list[dict[str, Tensor]]], str | None]
"""(contestant, outcome of each rank) -> what is wrong with it, or None."""
Say = Callable[[str], None]

REST = 0.01
"""Seconds between turns, in which threads of the last one stop spinning."""
SLOW = 2.0
"""Seconds of a step from which a second one warms nothing up."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How long a race takes.

    turns: of every contestant. seconds: for all turns of all contestants together, at least one step each.
    patience: after so many seconds without an answer a contestant is given up.

    Raises ConfigError for values that make no race.
    """

    turns: int = 5
    seconds: float = 20.0
    patience: float = 600.0

    def __post_init__(self) -> None:
        if self.turns < 1 or self.seconds <= 0 or self.patience <= 0:
            raise ConfigError("--turns must be at least 1, --seconds and --patience more than 0")


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
    failed: dict[str, str] = {}
    facts: dict[str, dict[str, Any]] = {}
    taken: dict[str, dict[str, list[list[float]]]] = {c.name: {} for c in contestants}
    teams: dict[str, Team] = {}
    with _ended(teams):

        @contextmanager
        def excused(name: str) -> Iterator[None]:
            try:
                yield
            except ContestantFailed as error:
                failed[name] = str(error)
                say(f"{name}: {error}")
                teams.pop(name).kill()

        for c in contestants:
            teams[c.name] = Team(c, malloc)
            with excused(c.name):
                facts[c.name] = _joined(teams[c.name].answers(pace.patience))
        steps: dict[tuple[str, str], float] = {}
        for c in contestants:
            for mode in _modes_of(c.name, facts, modes) if c.name in teams else ():
                with excused(c.name):
                    for _ in range(2):
                        steps[c.name, mode] = max(teams[c.name].ask(("warm", mode, 1), pace.patience))
                        if steps[c.name, mode] > SLOW:
                            break
                if c.name not in teams:
                    break
            if judge is not None and c.name in teams:
                with excused(c.name):
                    _judge(c, teams[c.name], judge, pace.patience)
        idle = set_aside(contestants, {key: seconds for key, seconds in steps.items() if key[0] in teams})
        for name, mode in idle:
            facts[name].setdefault("set aside in warm-up", []).append(mode)
        racing = [(name, mode) for name, mode in steps if name in teams and (name, mode) not in idle]
        share = pace.seconds / max(1, pace.turns * len(racing))
        for turn in range(pace.turns):
            for name, mode in racing if turn % 2 == 0 else racing[::-1]:
                if name not in teams:
                    continue
                time.sleep(REST)
                count = max(1, int(share / max(steps[name, mode], 1e-7)))
                with excused(name):
                    by_rank = teams[name].ask(("time", mode, min(count, 10_000)), pace.patience)
                    taken[name].setdefault(mode, []).append(slowest(by_rank))
    return [
        Entry(
            name=c.name, role=c.role, group=c.group, failed=failed.get(c.name),
            facts={k: v for k, v in facts.get(c.name, {}).items() if k != "modes"},
            seconds={} if c.name in failed else taken[c.name],
        )
        for c in contestants
    ]  # fmt: skip


def weigh(contestants: Sequence[Contestant], mode: str, *, patience: float, say: Say) -> dict[str, dict[str, Any]]:
    """Bytes of one step of each contestant, the rank with the most; one after another, each alone."""
    found: dict[str, dict[str, Any]] = {}
    for c in contestants:
        teams = {c.name: Team(c, "strict")}
        with _ended(teams):
            try:
                teams[c.name].answers(patience)
                found[c.name] = _joined(teams[c.name].ask(("memory", mode), patience))
            except ContestantFailed as error:
                found[c.name] = {"failed": str(error)}
                say(f"{c.name}: {error}")
                teams.pop(c.name).kill()
    return found


@contextmanager
def _ended(teams: dict[str, Team]) -> Iterator[None]:
    """No process is left behind."""
    try:
        yield
    except BaseException:
        for team in teams.values():
            team.kill()
        raise
    for team in teams.values():
        team.close()


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


def _modes_of(name: str, facts: dict[str, dict[str, Any]], modes: Sequence[str]) -> list[str]:
    return [mode for mode in modes if mode in facts[name]["modes"]]


def _joined(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' answers as one: the most of each number, the first rank's word for the rest."""
    return {
        key: max(rank[key] for rank in by_rank) if isinstance(value, int | float) else value
        for key, value in by_rank[0].items()
    }


def _judge(contestant: Contestant, team: Team, judge: Judge, patience: float) -> None:
    saved = team.ask(("outcome",), patience)
    outcomes = [torch.load(io.BytesIO(one), weights_only=True) for one in saved if one is not None]
    if outcomes and (wrong := judge(contestant, outcomes)) is not None:
        raise ContestantFailed(f"wrong numbers, not raced: {wrong}")
