"""What the records say, one value per (case, workload, mode, implementation of ours): the rows of the page, the bars.

Of the two settings of malloc the less favourable one is quoted: the smaller speed-up, the larger multiple of the limit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trimtab.bench.result import Limit, Record, largest, smallest


@dataclass(frozen=True, kw_only=True)
class Finding:
    """All by malloc setting.

    name: ours, without its workload. own, peer: median seconds. peer_name: the fastest peer, "" without one.
    """

    record: Record
    group: str
    mode: str
    name: str
    own: dict[str, float]
    peer: dict[str, float]
    peer_name: str
    limits: dict[str, Limit]

    @property
    def case(self) -> dict[str, Any]:
        return self.record.case

    @property
    def speed_ups(self) -> dict[str, float]:
        """Times faster than the fastest peer."""
        return {malloc: self.peer[malloc] / own for malloc, own in self.own.items() if malloc in self.peer}

    @property
    def over_limits(self) -> dict[str, float]:
        """Own time over the limit's."""
        return {malloc: own / self.limits[malloc].seconds for malloc, own in self.own.items() if malloc in self.limits}

    @property
    def speed_up(self) -> float | None:
        """The one to quote."""
        return smallest(self.speed_ups.values())

    @property
    def over_limit(self) -> float | None:
        """The one to quote."""
        return largest(self.over_limits.values())


def findings(records: Iterable[Record]) -> list[Finding]:
    """In the order of the records and their contestants."""
    found = []
    for record in records:
        kinds = {(e.name, e.group): e for race in record.races for e in race.entries if e.role == "ours"}
        modes = list(dict.fromkeys(mode for race in record.races for e in race.entries for mode in e.seconds))
        for (name, group), mode in ((kind, mode) for kind in kinds for mode in modes):
            own, peer, limits, peer_name = dict[str, float](), dict[str, float](), dict[str, Limit](), ""
            for race in record.races:
                entry = next(e for e in race.entries if (e.name, e.group) == (name, group))
                if (seconds := race.median(entry, mode)) is None:
                    continue
                own[race.malloc] = seconds
                if fastest := race.fastest("peer", group, mode):
                    peer_name, peer[race.malloc] = fastest
                if limit := race.limit(group, mode):
                    limits[race.malloc] = limit
            if own:
                found.append(
                    Finding(
                        record=record, group=group, mode=mode, name=plain(name), own=own, peer=peer,
                        peer_name=plain(peer_name), limits=limits,
                    )
                )  # fmt: skip
    return found


def plain(name: str) -> str:
    """A contestant's name without its workload."""
    return name.partition(" @")[0]
