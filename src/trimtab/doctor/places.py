"""Where the ranks of this host stand, read from outside; they need not answer."""

from __future__ import annotations

from collections.abc import Iterable

from trimtab.doctor.findings import Finding
from trimtab.guard.peers import process_state, start_of
from trimtab.guard.place import Place


def judge(places: Iterable[tuple[int, int, Place, float]]) -> list[Finding]:
    """Findings about what `trimtab.guard.scan.places_here` gave."""
    found = [_stands(*place) for place in places]
    if found:
        return found
    return [
        Finding(
            severity="note",
            where="this host",
            what="no process that may be read here is in a guarded layer, or has been in one",
            do="run this on the hosts of the job, as its user or as root; in a container, inside of it",
        )
    ]


def _stands(pid: int, rank: int, place: Place, seconds: float) -> Finding:
    stopped = process_state(pid, start_of(pid)) == "stopped"
    return Finding(
        severity="broken" if stopped else "ok",
        where=f"pid {pid}, rank {rank} of its group",
        what=f"{place}, for {seconds:.0f} s" + (": the process is stopped (SIGSTOP or a debugger)" if stopped else ""),
        do="continue it (kill -CONT) or end it" if stopped else "",
    )
