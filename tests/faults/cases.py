"""What can go wrong with one rank, what the others must say then, and whether they did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal[
    "kill", "freeze", "raise", "stall", "delay",
    "skip_layer", "swap_layers", "extra_call", "skip_combine", "wrong_splits", "top_k", "fingerprint", "width", "dtype",
    "combine_rows", "bad_shape",
]  # fmt: skip
DESYNCS: tuple[Kind, ...] = (
    "skip_layer", "swap_layers", "extra_call", "skip_combine", "wrong_splits", "top_k", "fingerprint", "width", "dtype",
)  # fmt: skip
PLACES = (
    ("route", "forward"), ("count", "forward"), ("dispatch", "forward"), ("experts", "forward"), ("combine", "forward"),
    ("combine", "backward"), ("experts", "backward"), ("dispatch", "backward"), ("route", "backward"),
)  # fmt: skip
MOVED = (("route", "forward"), ("experts", "forward"), ("experts", "backward"))
"""What replicated experts move besides."""
_ERRORS: dict[str, str] = {
    "kill": "PeerLost", "freeze": "PeerLost", "raise": "PeerLost", "stall": "PhaseTimeout", "delay": "",
    "combine_rows": "InputError", "bad_shape": "InputError", **dict.fromkeys(DESYNCS, "DesyncError"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is done to `rank`, in which phase of which layer and step, and on what kind of group.

    kind: kill (SIGKILL), freeze (SIGSTOP), raise (an error of the user's), stall (longer than the deadline), delay
        (shorter: nothing may be raised); the rest are mistakes in what the rank calls.
    store: a file, or served by rank 0. replicated: hot experts are copied; route and experts are the movements of
        counts and of weights then, and not what lies before. amid: the others know that the rank comes, and move rows.
    """

    kind: Kind
    phase: str = "count"
    direction: str = "forward"
    rank: int = 1
    layer: int = 1
    step: int = 1
    ranks: int = 3
    transport: Literal["alltoall", "allgather", "shared_memory"] = "alltoall"
    combine: Literal["sum", "ordered"] = "sum"
    store: Literal["file", "tcp"] = "file"
    replicated: bool = False
    amid: bool = False

    def __str__(self) -> str:
        where = f" in {self.phase} {self.direction}" if self.kind in _PLACED else ""
        how = [self.transport, self.combine, f"{self.store} store"]
        how += ["replicated"] * self.replicated + ["amid"] * self.amid
        return f"{self.kind} rank {self.rank} of {self.ranks}{where} ({', '.join(how)})"


_PLACED = ("kill", "freeze", "raise", "stall", "delay", "wrong_splits")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one rank. error: its type's name, empty if none; seconds: from the fault to the error.

    exit_seconds: from the error to the end of the process; exit_code: None if it had to be killed.
    """

    rank: int
    error: str = ""
    message: str = ""
    ranks: tuple[int, ...] = ()
    phase: str = ""
    layer: str = ""
    seconds: float = 0.0
    exit_code: int | None = None
    exit_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FaultResult:
    """One case: what every rank but a dead or frozen one did, and what is wrong with it; nothing if all is right."""

    fault: Fault
    outcomes: tuple[Outcome, ...]
    problems: tuple[str, ...]

    @property
    def good(self) -> bool:
        return not self.problems

    @property
    def seconds(self) -> float:
        """From the fault to the last error of the others."""
        return max((o.seconds for o in self.outcomes if o.rank != self.fault.rank), default=0.0)

    def __str__(self) -> str:
        said = f"{self.seconds:4.1f} s" if self.good else "; ".join(self.problems)
        return f"{'ok  ' if self.good else 'FAIL'} {self.fault}: {said}"


def fault_cases() -> list[Fault]:
    """Every kind at every place where it makes sense, on 3 ranks; then other transports, sizes and the store."""
    cases = [Fault(kind=k, phase=p, direction=d) for k in ("kill", "freeze", "raise", "stall") for p, d in PLACES]
    cases += [Fault(kind="delay", phase=p, direction=d) for p, d in (("experts", "forward"), ("combine", "backward"))]
    wrong = (("count", "forward"), ("combine", "forward"), ("combine", "backward"), ("dispatch", "backward"))
    for transport in ("alltoall", "allgather", "shared_memory"):
        cases += [Fault(kind=k, transport=transport) for k in DESYNCS if k != "wrong_splits"]
        cases += [Fault(kind="wrong_splits", phase=p, direction=d, transport=transport) for p, d in wrong]
        cases += [Fault(kind="combine_rows", transport=transport), Fault(kind="bad_shape", transport=transport)]
    cases += [
        Fault(kind=k, phase=p, direction=d, transport="shared_memory")
        for k in ("kill", "freeze", "raise", "stall")
        for p, d in PLACES
    ]
    places = (("count", "forward"), ("experts", "forward"), ("combine", "backward"))
    for kind in ("kill", "freeze", "raise", "stall"):
        cases += [Fault(kind=kind, phase=p, direction=d, transport="allgather", combine="ordered") for p, d in places]
        cases += [Fault(kind=kind, phase=p, direction=d, ranks=4, rank=2) for p, d in places]
        cases += [Fault(kind=kind, phase="experts", rank=0, ranks=2, store="tcp")]
        cases += [Fault(kind=kind, phase="experts", rank=rank, store="tcp") for rank in (0, 1)]
    for transport in ("alltoall", "allgather", "shared_memory"):
        own: dict[str, Any] = {"transport": transport, "replicated": True}
        cases += [
            Fault(kind=k, phase=p, direction=d, **own)
            for k in ("kill", "freeze", "raise", "stall", "delay", "wrong_splits")
            for p, d in MOVED
        ]
        cases += [
            Fault(kind=k, phase=p, direction=d, amid=True, combine=combine, **own)
            for k, combine in (("kill", "sum"), ("freeze", "ordered"), ("stall", "sum"))
            for p, d in MOVED
        ]
        cases += [
            Fault(kind=k, **own) for k in ("skip_layer", "extra_call", "fingerprint", "bad_shape", "skip_combine")
        ]
    return cases


def problems_of(
    fault: Fault, outcomes: Sequence[Outcome], when: float | None, deadline: float, slack: float
) -> list[str]:
    """What does not match the fault. A rank that ran to its end where an error was due has computed in silence."""
    expected = _ERRORS[fault.kind]
    problems = [] if when is not None else ["the fault never happened"]
    within = {"freeze": deadline + 1.0, "stall": deadline + 1.0}.get(fault.kind, 2.0)
    for o in outcomes:
        who, victim = f"rank {o.rank}", o.rank == fault.rank
        if victim and fault.kind == "raise":
            continue
        if o.error != expected:
            problems.append(f"{who} raised {o.error or 'nothing'} instead of {expected or 'nothing'}: {o.message}")
        if o.exit_code != (1 if expected else 0):
            problems.append(f"{who} ended with code {o.exit_code}")
        if not expected or o.error != expected:
            continue
        if o.exit_seconds > 10.0 + slack:  # Gloo's own timeout is 60 s here
            problems.append(f"{who} took {o.exit_seconds:.1f} s to end")
        if victim and fault.kind == "stall":  # it comes late itself
            continue
        if o.seconds > within + slack:
            problems.append(f"{who} raised after {o.seconds:.1f} s, later than {within:g} s")
        if fault.kind in ("kill", "freeze", "raise", "stall"):
            if o.ranks != (fault.rank,):
                problems.append(f"{who} named ranks {o.ranks}: {o.message}")
            if (o.phase, o.layer) != (fault.phase, f"layers.{fault.layer}"):
                problems.append(f"{who} named phase {o.phase} of {o.layer}: {o.message}")
            if f"{fault.phase} {fault.direction}" not in o.message:
                problems.append(f"{who} did not say {fault.phase} {fault.direction}: {o.message}")
    return problems
