"""From all ranks' Flight Recorder dumps to where the job stopped, who waits and who never came.

A group has stopped at the first collective that some rank has issued and not finished. The ranks whose last collective
in that group is older never came; of those, the ones that wait nowhere themselves are the ones to look at.

What a collective is in MoE words is read off its stack: phase, direction, layer.

    count      exchange of counts before rows move            dispatch   rows out to the experts; backward: home
    combine    rows home; backward: out to the experts        shard      sequence shards put together
    route      replicated experts: slots of each expert         experts    their copies; backward: gradients home
    check before one of them: the guard's own exchange, so that no rank moves rows unless all are there
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from trimtab.dispatch import LAYER_FILE
from trimtab.doctor import Finding
from trimtab.doctor.flight_recorder import Entry, Frame, Trace

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


@dataclass(frozen=True)
class Stop:
    """One process group that stopped.

    behind: ranks of the group that never issued the collective `seq`. unseen: where the backend records no members
    (Gloo) and nobody is behind, the ranks that never used the group: they never came, or do not belong to it.
    """

    group: str
    desc: str
    seq: int
    here: dict[int, Entry]
    behind: list[int]
    unseen: list[int]
    no_dump: list[int]


def diagnose(traces: Sequence[Trace]) -> list[Finding]:
    """Findings of the dumps of one job: the groups that stopped, oldest first, and who is to be looked at."""
    stops = find_stops(traces)
    last = {trace.rank: max(trace.entries, key=lambda e: e.created_ns, default=None) for trace in traces}
    waiting = {entry.rank: entry for stop in stops for entry in stop.here.values() if not entry.done}
    if not stops:
        lines = ["no collective was under way when the dumps were made; the last one of each rank:"]
        lines += [f"  rank {rank}: {stage_of(e) if e else 'none recorded'}" for rank, e in sorted(last.items())]
        return [Finding("note", "all groups", "\n".join(lines), NONE_STOPPED)]
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
        unseen = [] if recorded.get(name) or behind or no_dump else sorted(dumped - members)
        stops.append(Stop(name, desc, seq, dict(sorted(here.items())), behind, unseen, no_dump))
    return sorted(stops, key=lambda stop: min(e.created_ns for e in stop.here.values()))


def _stopped(stop: Stop, waiting: dict[int, Entry], last: dict[int, Entry | None]) -> Finding:
    where = f"group {stop.group}" + (f" {stop.desc!r}" if stop.desc else "")
    differences = _differences(stop)
    if differences:
        lines = [f"its ranks are not in the same call at collective {stop.seq}: {differences}"]
        lines += [f"  rank {rank}: {stage_of(e)}, {_sizes(e)}" for rank, e in stop.here.items()]
        return Finding("broken", where, "\n".join(lines), DESYNC)
    waits = [rank for rank, entry in stop.here.items() if not entry.done]
    since = min(stop.here[rank].created_ns for rank in waits)
    lines = [
        f"stopped at its collective {stop.seq}: {stage_of(next(iter(stop.here.values())))}",
        f"  waiting: rank {_ranks(waits)}, since {_clock(since)}",
    ]
    if finished := sorted(set(stop.here) - set(waits)):
        lines.append(f"  through it: rank {_ranks(finished)}")
    for what, ranks in (("not there", stop.behind), ("never seen in this group", stop.unseen)):
        lines += [f"  {what}: rank {rank}, {_whereabouts(rank, waiting, last)}" for rank in ranks]
    if stop.no_dump:
        lines.append(f"  unknown: rank {_ranks(stop.no_dump)}, without a dump")
    todo = ALL_CAME
    if missing := stop.behind or stop.no_dump:
        todo = f"find out why rank {_ranks(missing)} did not come"
    elif stop.unseen:
        todo = f"if rank {_ranks(stop.unseen)} belongs to the group, find out why it did not come"
    return Finding("broken", where, "\n".join(lines), todo)


def _differences(stop: Stop) -> str:
    """The difference between ranks in one collective that cannot work; "" if they agree."""
    entries = list(stop.here.values())
    stages = [stage_of(e) for e in entries]
    # Everything, but for rows in an all-to-all, whose number is each rank's own.
    rows = stages[0].rows and "all_to_all" in entries[0].op
    sizes = {tuple(size[1:] for size in e.sizes) if rows else e.sizes for e in entries}
    if len({e.op for e in entries}) > 1:
        return "different collectives"
    if len({(p.what, p.backward, p.layer) for p in stages}) > 1:
        return "different phases or layers"
    if len({e.dtypes for e in entries}) > 1:
        return "different dtypes"
    return "sizes that do not fit" if len(sizes) > 1 else ""


def _whereabouts(rank: int, waiting: dict[int, Entry], last: dict[int, Entry | None]) -> str:
    if (entry := waiting.get(rank)) is not None:
        return f"itself waiting in group {entry.group}: {stage_of(entry)}"
    if (entry := last.get(rank)) is not None:
        return f"whose last collective is over: {stage_of(entry)}, issued {_clock(entry.created_ns)}"
    return "which has recorded no collective at all"


def _sizes(entry: Entry) -> str:
    dtypes = entry.dtypes or ("",) * len(entry.sizes)
    return " ".join(f"{list(size)} {dtype}" for size, dtype in zip(entry.sizes, dtypes, strict=False))


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _clock(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, UTC).strftime("%H:%M:%S UTC")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The part of a step that a collective belongs to. phase "": outside of our layers; layer "": not recorded.

    rows: rows move, whose number may differ between ranks; else all ranks bring the same sizes.
    """

    what: str
    phase: str = ""
    rows: bool = False
    backward: bool = False
    layer: str = ""
    at: str = ""

    def __str__(self) -> str:
        direction = f", {'backward' if self.backward else 'forward'}" if self.phase else ""
        layer = f", layer {self.layer}" if self.layer else ""
        return f"{self.what}{direction}{layer}{f' ({self.at})' if self.at else ''}"


def stage_of(entry: Entry) -> Stage:
    """The stage of a collective. Without frames (JSON dumps) only the collective's own name is known."""
    calls = {(_file_of_trimtab(f.file), f.name) for f in entry.frames}

    def called(where: str) -> set[str]:
        return {name for file, name in calls if file.startswith(where)}

    names, maps, replication = map(called, ("dispatch/", "dispatch/route.py", "dispatch/replica_route.py"))
    # Of our own functions: below a forward that is computed again lies torch's backward.
    backward, checked = "backward" in names, "handshake" in names
    out, home = "dispatch" in maps, "combine" in maps
    phase = "dispatch" if out != backward else "combine"
    rows = out != home and not checked
    if names & {"join_shards", "unshard", "take_shard"}:
        what, phase, rows = "sequence shards put together", "shard", False
    elif replication & {"send", "add_home"}:
        what, phase, backward, rows = "replicas of experts", "experts", "add_home" in replication, not checked
    elif "gather" in replication:
        what, phase, backward, rows = "slots of each expert", "route", False, False
    elif out != home:
        what = phase
    elif checked:
        what, phase, backward, checked = "exchange of counts", "count", False, False
    else:
        what, phase, backward = _other(entry), "", False
    return Stage(
        what=f"check before {what}" if checked else what, phase=phase, rows=rows, backward=backward,
        layer=next((f.name for f in entry.frames if f.file == LAYER_FILE), ""), at=_users(entry.frames),
    )  # fmt: skip


def _other(entry: Entry) -> str:
    """The name of a collective that is not an exchange of ours."""
    backward = any(f.name == "backward" for f in entry.frames)
    kinds = {"all_gather": "gathers parameters", "reduce_scatter": "scatters gradients"}
    fsdp = next((says for op, says in kinds.items() if op in entry.op), "reduces gradients over replicas")
    users = {
        "transformers/distributed/expert_parallel": "transformers' own expert exchange", "fsdp": f"FSDP {fsdp}",
        "clip_grad": "gradient norm", "distributed/checkpoint": "checkpoint", "nn/parallel/distributed.py": "DDP",
    }  # fmt: skip
    for part, what in users.items():
        if any(part in f.file or part in f.name for f in entry.frames):
            return f"{what} ({entry.op})"
    if "barrier" in entry.op:
        return "barrier"
    if entry.op.startswith(("all_reduce", "allreduce")) and backward:
        return f"all-reduce issued from backward: DDP's gradients, or a hook ({entry.op})"
    return entry.op


def _users(frames: tuple[Frame, ...]) -> str:
    """The innermost line that is neither torch's nor ours nor another library's: where the user's code called."""
    library = ("site-packages/", "dist-packages/", "/torch/", "<", "lib/python")
    users = (f for f in frames if not any(part in f.file for part in library) and not _file_of_trimtab(f.file))
    mine = next(users, None)
    return f"{mine.file.rpartition('/')[2]}:{mine.line} {mine.name}" if mine else ""


def _file_of_trimtab(file: str) -> str:
    """A file of this package by its path in it, wherever the host that wrote the dump has it; "" for any other file.

    A folder called trimtab may also be a checkout's or a project of the user's: what lies in it decides.
    """
    inside = file.rpartition("/trimtab/")[2]
    return inside if inside != file and inside in _files() else ""


@cache
def _files() -> frozenset[str]:
    package = Path(__file__).parents[1]
    return frozenset(file.relative_to(package).as_posix() for file in package.rglob("*.py"))
