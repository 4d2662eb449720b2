"""What the records say, one value per (case, workload, mode, implementation of ours): the rows of the page, the bars.

Of the two settings of malloc the less favourable one is quoted: the smaller speed-up, the larger multiple of the limit.
Whoever of ours failed took for ever. Where a peer or a limit failed there is nothing to quote.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.result import Limit, Record, largest, smallest


@dataclass(frozen=True, kw_only=True)
class Finding:
    """own, peer, limits, speed_ups and over_limits by malloc setting; what the last two are: `benchmarks.result`.

    name: ours, without its workload. own, peer: median seconds; infinite where ours failed. peer_name: the fastest
    peer, "" without one. failed, peer_failed, limit_failed: why ours, a peer or a limit has no time, "" where all have.
    """

    record: Record
    group: str
    mode: str
    name: str
    own: dict[str, float]
    peer: dict[str, float]
    peer_name: str
    limits: dict[str, Limit]
    speed_ups: dict[str, float]
    over_limits: dict[str, float]
    failed: str = ""
    peer_failed: str = ""
    limit_failed: str = ""

    @property
    def case(self) -> dict[str, Any]:
        return self.record.case

    @property
    def speed_up(self) -> float | None:
        """The one to quote: 0 where ours failed, None without peers or where one of them failed."""
        if self.failed:
            return 0.0
        return None if self.peer_failed else smallest(self.speed_ups.values())

    @property
    def limit_speed_up(self) -> float | None:
        """What would be quoted for a layer that took as long as the limit; None where either is not known."""
        both = self.speed_ups.keys() & self.over_limits.keys()
        known = not (self.failed or self.peer_failed or self.limit_failed)
        return smallest(self.speed_ups[m] * self.over_limits[m] for m in both) if known else None

    @property
    def over_limit(self) -> float | None:
        """The one to quote: infinite where ours failed, None without a limit or where a part of it failed."""
        if self.failed:
            return math.inf
        return None if self.limit_failed else largest(self.over_limits.values())


def findings(records: Iterable[Record]) -> list[Finding]:
    """In the order of the records and their contestants."""
    return [
        found
        for record in records
        for name, group in dict.fromkeys((e.name, e.group) for r in record.races for e in r.entries if e.role == "ours")
        for mode in record.modes
        if (found := _finding(record, name, group, mode)).own
    ]


def _finding(record: Record, name: str, group: str, mode: str) -> Finding:
    own, peer, limits, peer_name = dict[str, float](), dict[str, float](), dict[str, Limit](), ""
    speed_ups, over_limits = dict[str, float](), dict[str, float]()
    failed, peer_failed, limit_failed = list[str](), list[str](), list[str]()
    for race in record.races:
        entry = next(e for e in race.entries if (e.name, e.group) == (name, group))
        seconds = race.median(entry, mode)
        if entry.failed is not None:
            failed.append(f"{plain(name)}: {entry.failed}")
            seconds = math.inf
        if seconds is None:
            continue
        own[race.malloc] = seconds
        peer_failed += [f"{plain(e.name)}: {e.failed}" for e in race.broken(group, "peer")]
        limit_failed += [f"{plain(e.name)}: {e.failed}" for e in race.broken(group, "limit", "bandwidth")]
        if fastest := race.peer(group, mode):
            peer_name, peer[race.malloc] = fastest
        if limit := race.limit(group, mode):
            limits[race.malloc] = limit
        speed_up, over_limit = race.speed_up(entry, mode), race.over_limit(entry, mode)
        if entry.failed is not None:
            speed_up, over_limit = 0.0 if fastest else None, math.inf if limit else None
        if speed_up is not None:
            speed_ups[race.malloc] = speed_up
        if over_limit is not None:
            over_limits[race.malloc] = over_limit
    return Finding(
        record=record, group=group, mode=mode, name=plain(name), own=own, peer=peer, peer_name=plain(peer_name),
        limits=limits, speed_ups=speed_ups, over_limits=over_limits, failed=next(iter(failed), ""),
        peer_failed=next(iter(peer_failed), ""), limit_failed=next(iter(limit_failed), ""),
    )  # fmt: skip


def times(found: Finding, base: Finding) -> list[float]:
    """How many times as long as another of the same record and mode it takes, by malloc setting."""
    ratios = []
    for race in found.record.races:
        mine, theirs = (
            next(e for e in race.entries if (plain(e.name), e.group) == (f.name, f.group)) for f in (found, base)
        )
        ratios.append(race.times(mine, found.mode, theirs))
    return [value for value in ratios if value is not None]


def plain(name: str) -> str:
    """A contestant's name without its workload."""
    return name.partition(" @")[0]
