"""The records as a picture: time over the limit, trimtab beside the fastest peer, case by case.

Where there are more cases than a picture holds, only forward+backward of the layer on the kernels that users get; if
those are still too many, only those that a peer raced, with new gradients; then only those on one rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.finding import Finding, findings
from benchmarks.result import Record, largest
from benchmarks.store import check_place
from benchmarks.subject import BOTH
from benchmarks.words import case_words
from trimtab.errors import BackendError, InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 40
NARROWER: tuple[Callable[[Finding], bool], ...] = (
    lambda f: f.record.part == "layer" and f.mode == BOTH and f.name.startswith("trimtab auto"),
    lambda f: bool(f.peer) and not f.case.get("in_place"),
    lambda f: f.case.get("ranks", 1) == 1,
)
"""What is still shown, one after the other, while there are more than `MOST`."""


def can_draw(records: Sequence[Record]) -> bool:
    """Whether any race has both a trimtab contestant and a limit."""
    return any(f.over_limits for f in findings(records))


def chosen(found: Sequence[Finding]) -> Sequence[Finding]:
    """Those that are shown."""
    for narrower in NARROWER:
        if len(found) > MOST:
            found = [f for f in found if narrower(f)] or found
    return found


def check_chart(png: Path) -> type[Figure]:
    """What draws, where `png` can be written: asked before a race takes its time.

    Raises BackendError without matplotlib, InputError for another kind of file and a folder that cannot be made.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError(f"no chart without matplotlib: pip install 'trimtab[plot]' ({error})") from error
    if png.suffix.lower() != ".png":
        raise InputError(f"{png}: a chart is a .png")
    check_place(png)
    return Figure


def draw(records: Sequence[Record], png: Path) -> None:
    """Write `png`. Raises as `check_chart`, and InputError where nothing has a limit or it cannot be written."""
    figure_class = check_chart(png)
    shown = chosen([f for f in findings(records) if f.over_limits])
    if not shown:
        raise InputError("no chart: none of the races has both a trimtab contestant and a limit")
    figure = figure_class(figsize=(10, 1.5 + 0.32 * len(shown)), layout="constrained")
    axes = figure.subplots()
    places = range(len(shown))
    bars = [largest(value for value in f.over_limits.values() if value < math.inf) or 0.0 for f in shown]
    axes.barh([p - 0.2 for p in places], bars, 0.38, label="trimtab", color="#2a6f97")
    peers = [(p + 0.2, _peer(f), f.peer_name) for p, f in zip(places, shown, strict=True)]
    raced = [(p, value, name) for p, value, name in peers if value is not None]
    if raced:
        axes.barh(
            [p for p, _, _ in raced], [value for _, value, _ in raced], 0.38, label="fastest peer", color="#c9ada7"
        )
        for p, value, name in raced:
            axes.text(value, p, f" {name}", va="center", fontsize="x-small")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(places, [_label(f) for f in shown], fontsize="small")
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.set_xlim(right=1.5 * max(axes.get_xlim()[1], *bars))  # room for the peers' names
    axes.set_xlabel("time / limit, the worse of the malloc settings; the line is the limit")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    try:
        figure.savefig(png, dpi=120)
    except OSError as error:
        raise InputError(f"{png}: cannot be written ({error.strerror})") from error


def _peer(f: Finding) -> float | None:
    return largest(f.peer[malloc] / f.limits[malloc].seconds for malloc in f.peer if malloc in f.limits)


def _label(f: Finding) -> str:
    words = [f.record.part, case_words(f.record), f.mode]
    if f.group and f.group != "balanced":
        words.append(f.group)
    return f"{', '.join(words)}\n{f.name}{' (failed)' if f.failed else ''}"
