"""What a race found: raw times, and what follows from them. Plain values that go to JSON and come back.

median, middle half   over all steps of all turns
times                 one's time over another's: the median over the turns of what it was within each, so that a
                      machine that is now fast, now slow is so for both
speed-up              times of the fastest peer of the same group and mode over one's own, the least of all peers
limit                 the longer of the fastest "limit" entry and (fewest bytes / bandwidth)
x limit               times of one's own over the limit

A peer that failed might have been the fastest, a limit that failed the one that counts: where one did, there is no
speed-up, or no limit. A peer that is not installed took no part.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

ABSENT = "cannot be imported here"
"""How the reason of a contestant begins that is not installed."""
COPY = "copy"
"""The only mode of a "bandwidth" entry."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One contestant's part in a race.

    seconds: mode -> for each turn the seconds of its steps, the slowest rank of each. failed: why there are none.
    """

    name: str
    role: str
    group: str = ""
    failed: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, list[list[float]]] = field(default_factory=dict)

    def steps(self, mode: str) -> list[float]:
        """The seconds of every step of a mode; empty where it has none."""
        return [step for turn in self.seconds.get(mode, []) for step in turn]

    @property
    def broken(self) -> bool:
        """It was here, and failed."""
        return self.failed is not None and not self.failed.startswith(ABSENT)


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The shortest time that a mode could take, and what sets it."""

    seconds: float
    what: str


@dataclass(frozen=True, kw_only=True)
class Race:
    """Contestants that took turns under one setting of malloc.

    fewest_bytes: group -> mode -> bytes that any implementation reads and writes.
    """

    malloc: str
    entries: list[Entry]
    fewest_bytes: dict[str, dict[str, int]] = field(default_factory=dict)

    def median(self, entry: Entry, mode: str) -> float | None:
        """Seconds of a step; None where there is none."""
        steps = entry.steps(mode)
        return statistics.median(steps) if steps else None

    def times(self, entry: Entry, mode: str, other: Entry, other_mode: str | None = None) -> float | None:
        """How many times as long as `other` it takes; None where one of them has no times."""
        pairs = zip(entry.seconds.get(mode, []), other.seconds.get(other_mode or mode, []), strict=False)
        ratios = [statistics.median(own) / statistics.median(others) for own, others in pairs]
        return statistics.median(ratios) if ratios else None

    def fastest(self, role: str, group: str, mode: str) -> tuple[str, float] | None:
        """(name, median seconds) of the fastest of a role in a group; those of group "" belong to all."""
        found = [(self.median(e, mode), e.name) for e in self._of(role, group)]
        timed = [(seconds, name) for seconds, name in found if seconds is not None]
        return None if not timed else (min(timed)[1], min(timed)[0])

    def peer(self, group: str, mode: str) -> tuple[str, float] | None:
        """(name, median seconds) of the fastest peer; None where there is none, or one is broken."""
        return None if self.broken(group, "peer") else self.fastest("peer", group, mode)

    def broken(self, group: str, *roles: str) -> list[Entry]:
        """Those of these roles in a group that failed."""
        return [e for role in roles for e in self._of(role, group) if e.broken]

    def _of(self, role: str, group: str) -> list[Entry]:
        return [e for e in self.entries if e.role == role and e.group in (group, "")]

    def bandwidth(self) -> float | None:
        """Bytes per second, read and written, of the "bandwidth" entry; its mode moves facts["bytes"]."""
        for entry in self.entries:
            if entry.role == "bandwidth" and (seconds := self.median(entry, COPY)) is not None:
                return float(entry.facts["bytes"]) / seconds
        return None

    def limit(self, group: str, mode: str) -> Limit | None:
        """What no implementation can beat by much; None where nothing of the kind was measured, or a part is broken."""
        if self.broken(group, "limit", "bandwidth"):
            return None
        candidates = []
        if dense := self.fastest("limit", group, mode):
            candidates.append(Limit(seconds=dense[1], what=dense[0]))
        fewest, speed = self.fewest_bytes.get(group, {}).get(mode), self.bandwidth()
        if fewest is not None and speed is not None:
            candidates.append(Limit(seconds=fewest / speed, what=f"{fewest / 1e6:.1f} MB at {speed / 1e9:.1f} GB/s"))
        return max(candidates, key=lambda limit: limit.seconds, default=None)

    def speed_up(self, entry: Entry, mode: str) -> float | None:
        """Over the fastest peer; None where there is none, or one is broken."""
        if self.broken(entry.group, "peer"):
            return None
        return smallest(self.times(peer, mode, entry) for peer in self._of("peer", entry.group))

    def over_limit(self, entry: Entry, mode: str) -> float | None:
        """None where there is no limit."""
        if self.broken(entry.group, "limit", "bandwidth"):
            return None
        dense = largest(self.times(entry, mode, limit) for limit in self._of("limit", entry.group))
        fewest, moved = self.fewest_bytes.get(entry.group, {}).get(mode), None
        for copy in [e for e in self.entries if e.role == "bandwidth"]:
            replicas = self.times(entry, mode, copy, COPY)
            if fewest is not None and replicas is not None:
                moved = replicas * float(copy.facts["bytes"]) / fewest
        return smallest((dense, moved))


@dataclass(frozen=True, kw_only=True)
class Record:
    """One case: its races, one per malloc setting, and how they came about. What a JSON file holds.

    memory: contestant -> the bytes of `benchmarks.memory.step_bytes`, or {"failed": why}.
    """

    part: str
    case: dict[str, Any]
    command: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    races: list[Race]
    memory: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def modes(self) -> list[str]:
        """What contestants were to do, and the parts that they timed themselves, in order."""
        timed = [mode for race in self.races for e in race.entries for mode in e.seconds]
        return [mode for mode in dict.fromkeys([*self.settings["modes"], *timed]) if mode != COPY]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Record:
        """Raises KeyError or TypeError where `found` is something else."""
        races = [
            Race(**{**race, "entries": [Entry(**entry) for entry in race["entries"]]}) for race in found["races"]
        ]  # fmt: skip
        return cls(**{**found, "races": races})


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile; the value itself where there is one."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def smallest(values: Iterable[float | None]) -> float | None:
    """The least of those that are there."""
    return min((value for value in values if value is not None), default=None)


def largest(values: Iterable[float | None]) -> float | None:
    """The most of those that are there."""
    return max((value for value in values if value is not None), default=None)
