"""One peer's cases, in this process and the ranks that it starts; what became of each, in the words of the page."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from unittest.mock import patch

from peers.registry import OURS_ALONE, SOURCES, Peer
from peers.reproduce import plain
from trimtab.verify.cases import Case
from trimtab.verify.collect import Verdict
from trimtab.verify.patterns import PATTERNS
from trimtab.verify.run import run_local
from trimtab.verify.topologies import topology_named

Status = Literal["right", "wrong", "refused", "crashed", "hung", "lacks"]
STATUSES: dict[str, Status] = {
    "ok": "right", "mismatch": "wrong", "refused": "refused", "error": "crashed", "hang": "hung", "lacking": "lacks",
}  # fmt: skip
DEADLINE = 20.0
"""Seconds for a case; the slowest that end take two."""


GRACE = 2.0
"""Seconds that others have once a rank has raised: there are hundreds of such cases."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One case. said: the first line of the error, the largest difference, or why it can't be asked.

    error: the largest relative error where numbers came.
    """

    topology: str
    pattern: str
    status: Status
    said: str = ""
    error: float | None = None


@dataclass(frozen=True, kw_only=True)
class Result:
    """A peer, its version, and its cases; absent: why it can't be judged here."""

    peer: str
    version: str = ""
    absent: str = ""
    seconds: float = 0.0
    cases: list[Judged] = field(default_factory=list)


def cases_of(peer: Peer, topologies: Sequence[str] = (), patterns: Sequence[str] = ()) -> list[Case]:
    """Those of the page, or of it those named."""
    return [
        Case(topology=topology_named(topology), pattern=pattern, dtype=peer.dtype, seed=0)
        for topology in topologies or peer.topologies
        for pattern in PATTERNS if pattern.name not in OURS_ALONE and (not patterns or pattern.name in patterns)
    ]  # fmt: skip


def judge(peer: Peer, cases: Sequence[Case]) -> list[Judged]:
    """A crash or a hang costs its own case and new ranks, no more."""
    with patch("trimtab.verify.collect.GRACE", GRACE):
        found = [judged(v) for v in run_local(cases, peer.impl, deadline=DEADLINE, anew=True, **peer.options())]
    order = [(case.topology.name, case.pattern.name) for case in cases]
    return sorted(found, key=lambda case: order.index((case.topology, case.pattern)))


def judged(verdict: Verdict) -> Judged:
    """A verdict in the page's words."""
    case, status, errors = verdict.case, STATUSES[verdict.status], verdict.errors
    first = verdict.details[0].strip() if verdict.details else ""
    said = re.sub(r"^rank \d+: ", "", first).splitlines()[-1].strip() if first else ""
    if status == "wrong":  # the worst of all ranks and tensors, rather than the first
        worst = max(errors, key=errors.__getitem__)
        missing = next((line for line in verdict.details if "got no tensor" in line), "")
        said = missing or f"{worst} by {errors[worst]:.1e}"
    return Judged(
        topology=case.topology.name, pattern=case.pattern.name, status=status, said=plain(said),
        error=max(errors.values(), default=None),
    )  # fmt: skip


def version_of(peer: Peer, root: Path) -> str:
    """A release's number, and what it was fetched at where it has none."""
    if peer.distribution:
        return importlib.metadata.version(peer.distribution)
    source = next(source for folder in peer.folders if (source := SOURCES[folder]).git[0])
    asked = ["git", "-C", str(root / source.folder), "rev-parse", "--short=7", "HEAD"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return f"commit {done.stdout.strip()}" if done.returncode == 0 else "unknown"
