"""Where the ranks of this host are, seen from outside: for a job that hangs and raises nothing, as on GPUs.

    for pid, rank, place, seconds in places_here():
        print(f"pid {pid}, rank {rank} of its group: {place}, for {seconds:.0f} s")

Nothing is sent to the processes and they need not answer. Reads those of the same user (root: all).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trimtab.guard.judge import seconds_at
from trimtab.guard.place import NAME, Place, SlateView


def places_here() -> Iterator[tuple[int, int, Place, float]]:
    """(pid, rank within its group, place, seconds there) of each record that holds a place, by pid.

    A process that has several transports has a record for each of their guards.
    """
    for process in sorted((p for p in Path("/proc").iterdir() if p.name.isdigit()), key=lambda p: int(p.name)):
        views = {}
        for link in _files(process):
            with suppress(OSError, ValueError):  # it has been closed meanwhile
                if link.readlink().name.startswith(f"memfd:{NAME}"):
                    views[link.stat().st_ino] = SlateView.open(int(process.name), int(link.name))
        for _, view in sorted(views.items()):
            place = view.place()
            if place is not None and view.owner() == int(process.name):
                yield int(process.name), view.rank(), place, seconds_at(place)


def _files(process: Path) -> list[Path]:
    """Links to what a process has open; none of one that has ended, or is another user's."""
    try:
        return list((process / "fd").iterdir())
    except OSError:
        return []
