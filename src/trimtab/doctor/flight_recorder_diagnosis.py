"""From all ranks' Flight Recorder dumps to where the job stopped, who waits and who never came.

A group has stopped at the first collective that some rank has issued and not finished. The ranks whose last collective
in that group is older never came; of those, the ones that wait nowhere themselves are the ones to look at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from trimtab.doctor.findings import Finding
from trimtab.doctor.flight_recorder import Entry, Trace
from trimtab.doctor.flight_recorder_words import place_of

ABSENT = (
    "others wait for it and it is in no collective itself: it computes, waits for something else (data, a lock, the "
    "disk), has left the loop, or is dead"
)
DESYNC = (
    "every rank of a group must run the same layers in the same order with the same configuration: look for a branch "
    "on data or on the rank, another batch count, an unused or re-ordered layer"
)
ALL_CAME = (
    "all ranks came and it does not end: a process that died in it, the network, or a GPU. Look at each rank's log and "
    "at the kernel's (dmesg: Xid, OOM), then run trimtab doctor on the hosts"
)
NONE_STOPPED = (
    "dump while the job hangs: after an error Gloo counts a failed collective as done. If it did hang then, it hung "
    "outside of collectives: py-spy dump --pid PID shows where"
)


@dataclass(frozen=True, kw_only=True)
class Stop:
    """One process group that stopped.

    behind: ranks of the group that never issued the collective `seq`. unseen: where the backend records no members
    (Gloo) and nobody is behind, the ranks that never used the group: they never came, or do not belong to it.
    """

    group: str
    desc: str
    seq: int
    here: dict[int, Entry]
    behind: tuple[int, ...]
    unseen: tuple[int, ...]
    no_dump: tuple[int, ...]


def diagnose(traces: Sequence[Trace]) -> list[Finding]:
    """Findings of the dumps of one job: the groups that stopped, oldest first, and who is to be looked at."""
    stops = find_stops(traces)
    last = {trace.rank: max(trace.entries, key=lambda e: e.created_ns, default=None) for trace in traces}
    waiting = {entry.rank: entry for stop in stops for entry in stop.here.values() if not entry.done}
    if not stops:
        return [_nothing_stopped(last)]
    findings = [_stopped(stop, waiting, last) for stop in stops]
    absent = sorted({rank for stop in stops for rank in (*stop.behind, *stop.unseen)} - waiting.keys())
    dead = sorted({rank for stop in stops for rank in stop.no_dump})
    if absent and not any(_differences(stop) for stop in stops):
        do = "see its stack: py-spy dump --pid PID on its host; if the process is gone, its own log says why"
        findings.append(Finding("broken", f"rank {_ranks(absent)}", ABSENT, do))
    if dead:
        do = "if its process is gone it is the cause: read its log; else dump it too and run this again"
        findings.append(Finding("warn", f"rank {_ranks(dead)}", "no dump of it is here", do))
    return findings


def find_stops(traces: Sequence[Trace]) -> list[Stop]:
    """The groups with a collective under way, by the time of its first issue."""
    groups: dict[str, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        for entry in trace.entries:
            if not entry.p2p:
                groups[entry.group][trace.rank].append(entry)
    recorded = {name: ranks for trace in traces for name, ranks in trace.members.items() if ranks}
    dumped = {trace.rank for trace in traces}
    stops = []
    for name, by_rank in groups.items():
        open_seqs = [entry.seq for entries in by_rank.values() for entry in entries if not entry.done]
        if not open_seqs:
            continue
        seq = min(open_seqs)
        here = {rank: e for rank, entries in by_rank.items() for e in entries if e.seq == seq}
        desc = next(iter(here.values())).desc
        everyone = dumped if desc == "default_pg" else set(by_rank)
        members = set(recorded.get(name, ())) | everyone
        came = {rank for rank, entries in by_rank.items() if max(e.seq for e in entries) >= seq}
        behind, no_dump = sorted((members & dumped) - came), sorted(members - dumped)
        sure = bool(recorded.get(name)) or bool(behind) or bool(no_dump)
        stops.append(
            Stop(
                group=name,
                desc=desc,
                seq=seq,
                here=dict(sorted(here.items())),
                behind=tuple(behind),
                unseen=() if sure else tuple(sorted(dumped - members)),
                no_dump=tuple(no_dump),
            )
        )
    return sorted(stops, key=lambda stop: min(e.created_ns for e in stop.here.values()))


def _stopped(stop: Stop, waiting: dict[int, Entry], last: dict[int, Entry | None]) -> Finding:
    where = f"group {stop.group}" + (f" {stop.desc!r}" if stop.desc else "")
    differences = _differences(stop)
    if differences:
        lines = [f"its ranks are not in the same call at collective {stop.seq}: {differences}"]
        lines += [f"  rank {rank}: {place_of(e)}, {_sizes(e)}" for rank, e in stop.here.items()]
        return Finding("broken", where, "\n".join(lines), DESYNC)
    some = next(iter(stop.here.values()))
    lines = [f"stopped at its collective {stop.seq}: {place_of(some)}"]
    waits = [rank for rank, entry in stop.here.items() if not entry.done]
    since = min(stop.here[rank].created_ns for rank in waits)
    lines.append(f"  waiting: rank {_ranks(waits)}, since {_clock(since)}")
    finished = sorted(set(stop.here) - set(waits))
    if finished:
        lines.append(f"  through it: rank {_ranks(finished)}")
    for rank in stop.behind:
        lines.append(f"  not there: rank {rank}, {_whereabouts(rank, waiting, last)}")
    for rank in stop.unseen:
        lines.append(f"  never seen in this group: rank {rank}, {_whereabouts(rank, waiting, last)}")
    if stop.no_dump:
        lines.append(f"  unknown: rank {_ranks(stop.no_dump)}, without a dump")
    todo = ALL_CAME
    if missing := stop.behind or stop.no_dump:
        todo = f"find out why rank {_ranks(missing)} did not come"
    elif stop.unseen:
        todo = f"if rank {_ranks(stop.unseen)} belongs to the group, find out why it did not come"
    return Finding("broken", where, "\n".join(lines), todo)


def _differences(stop: Stop) -> str:
    """How the entries of one collective differ between ranks in a way that cannot work; "" if they agree."""
    entries = list(stop.here.values())
    places = [place_of(e) for e in entries]
    found = []
    if len({e.op for e in entries}) > 1:
        found.append("different collectives")
    elif len({(p.what, p.backward, p.layer) for p in places}) > 1:
        found.append("different phases or layers")
    elif len({e.dtypes for e in entries}) > 1:
        found.append("different dtypes")
    elif len({_agreed_size(e, p.rows) for e, p in zip(entries, places, strict=True)}) > 1:
        found.append("sizes that do not fit")
    return ", ".join(found)


def _agreed_size(entry: Entry, rows: bool) -> tuple[tuple[int, ...], ...]:
    """What of the sizes all ranks must share: everything, but for rows in an all-to-all the bytes of a row only."""
    return tuple(size[1:] for size in entry.sizes) if rows and "all_to_all" in entry.op else entry.sizes


def _whereabouts(rank: int, waiting: dict[int, Entry], last: dict[int, Entry | None]) -> str:
    if rank in waiting:
        entry = waiting[rank]
        return f"itself waiting in group {entry.group}: {place_of(entry)}"
    entry_or_none = last.get(rank)
    if entry_or_none is None:
        return "which has recorded no collective at all"
    return f"whose last collective is over: {place_of(entry_or_none)}, issued {_clock(entry_or_none.created_ns)}"


def _nothing_stopped(last: dict[int, Entry | None]) -> Finding:
    lines = ["no collective was under way when the dumps were made; the last one of each rank:"]
    lines += [f"  rank {rank}: {place_of(e) if e else 'none recorded'}" for rank, e in sorted(last.items())]
    return Finding("note", "all groups", "\n".join(lines), NONE_STOPPED)


def _sizes(entry: Entry) -> str:
    return " ".join(
        f"{list(size)} {dtype}" for size, dtype in zip(entry.sizes, entry.dtypes or [""] * 99, strict=False)
    )


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _clock(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, UTC).strftime("%H:%M:%S UTC")
