"""All parts of the check-up, in the order in which they are shown, and where the ranks of this host stand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trimtab.doctor import backends, loopback, machine, versions
from trimtab.doctor.findings import Finding, Part
from trimtab.guard.peers import process_state, start_of
from trimtab.guard.record import Place


def checkup() -> Iterator[Part]:
    """Each part's name and findings, as soon as they are known. Starts two processes for the last part."""
    yield "versions", versions.look()
    yield "machine and environment", machine.look()
    yield "process groups and transports", backends.transports()
    yield "kernels, self-tested", backends.kernels()
    yield "loopback", loopback.look()


def judge_places(places: Iterable[tuple[int, int, Place]]) -> list[Finding]:
    """Findings about what `trimtab.guard.record.places_here` read from outside; the ranks need not answer."""
    found = [_stands(*place) for place in places]
    if found:
        return found
    what = "no process that may be read here is in a guarded layer, or has been in one"
    do = "run this on the hosts of the job, as its user or as root; in a container, inside of it"
    return [Finding("note", "this host", what, do)]


def _stands(pid: int, rank: int, place: Place) -> Finding:
    where, what = f"pid {pid}, rank {rank} of its group", f"{place}, for {place.seconds:.0f} s"
    if process_state(pid, start_of(pid)) != "stopped":
        return Finding("ok", where, what)
    what += ": the process is stopped (SIGSTOP or a debugger)"
    return Finding("broken", where, what, "continue it (kill -CONT) or end it")
