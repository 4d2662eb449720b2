"""The ledger of a run: the table on the terminal, `ledger.json`, and the page `ledger.md`."""

from __future__ import annotations

import json
import platform
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trimtab import __version__
from trimtab.atomic_write import write_whole
from trimtab.kernels.compiler import processor_name
from trimtab.processes import cores
from trimtab.verify.cases import Case
from trimtab.verify.collect import Status, Verdict
from trimtab.verify.on_rank import BOUNDS
from trimtab.verify.patterns import PATTERNS

MOST_LOCAL = 8
"""Ranks of a local run that names no number."""
MARKS: dict[Status, str] = {"ok": ".", "lacking": "-", "refused": "R", "mismatch": "X", "error": "E", "hang": "H"}
"""A status in the table, from the best to the worst: a cell of several dtypes shows the worst."""


@dataclass(kw_only=True)
class Ledger:
    """A run: the implementation, the command, and the verdicts.

    program: "trimtab", or what starts it on a cluster. repeat: how often each case ran.
    """

    implementation: str
    command: str
    seed: int
    program: str = "trimtab"
    repeat: int = 1
    verdicts: list[Verdict] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failures(self) -> list[Verdict]:
        """Mismatches, refusals, errors and hangs."""
        return [verdict for verdict in self.verdicts if verdict.failed]

    def counts(self) -> dict[str, int]:
        """Cases by status."""
        found = Counter(verdict.status for verdict in self.verdicts)
        return {status: found[status] for status in MARKS if found[status]}

    def worst(self) -> dict[str, dict[str, float]]:
        """Largest relative error by dtype and column, over the cases that were compared."""
        found: dict[str, dict[str, float]] = {}
        for verdict in self.verdicts:
            columns = found.setdefault(verdict.case.dtype, {})
            for column, error in verdict.errors.items():
                columns[column] = max(columns.get(column, 0.0), error)
        return {dtype: columns for dtype, columns in found.items() if columns}

    def table(self) -> str:
        """Topologies down, patterns across; a cell shows the worst of its dtypes."""
        names = [p.name for p in PATTERNS if any(v.case.pattern.name == p.name for v in self.verdicts)]
        cells: dict[tuple[str, str], str] = {}
        for verdict in sorted(self.verdicts, key=lambda verdict: list(MARKS).index(verdict.status)):
            cells[verdict.case.topology.name, verdict.case.pattern.name] = MARKS[verdict.status]
        rows = list(dict.fromkeys(verdict.case.topology.name for verdict in self.verdicts))
        width = max((len(row) for row in rows), default=0)
        numbers = [f"{i:2}" for i in range(1, len(names) + 1)]
        lines = [f"{'':{width}}  {''.join(digits)}" for digits in zip(*numbers, strict=True)]
        lines += [f"{row:{width}}  {''.join(cells.get((row, name), ' ') for name in names)}" for row in rows]
        says = {pattern.name: pattern.says for pattern in PATTERNS}
        lines += ["", *(f"{i:3} {name}: {says[name]}" for i, name in enumerate(names, 1))]
        lines += ["", "    " + "   ".join(f"{mark} {status}" for status, mark in MARKS.items())]
        return "\n".join(lines)

    def summary(self) -> str:
        """One line of counts, one of how many cases copied experts, and one of errors by dtype."""
        lines = [", ".join(f"{n} {status}" for status, n in self.counts().items()) + f" in {self.seconds:.0f} s"]
        replicating = [v for v in self.verdicts if v.case.topology.replicas != "none"]
        if replicating:
            some = sum(v.replicas > 0 for v in replicating)
            lines.append(f"{some} of {len(replicating)} cases with replicated experts copied some")
        for dtype, columns in self.worst().items():
            bound = BOUNDS[getattr(torch, dtype)]
            shown = "  ".join(f"{column} {error:.1e}" for column, error in columns.items())
            lines.append(f"worst relative error, {dtype} (bound {bound:.0e}):  {shown}")
        return "\n".join(lines)

    def explain(self, verdict: Verdict) -> str:
        """A failure: where, what, and the command that runs just this case again."""
        shown = "\n".join(f"    {detail}" for detail in verdict.details[:3])
        return f"{verdict.case.name}: {verdict.status}\n{shown}\n    again: {self.again(verdict.case)}"

    def again(self, case: Case) -> str:
        """The command that runs one case again."""
        words = [self.program, f"verify --impl {self.implementation} --only {case.name} --seed {case.seed}"]
        words += [f"--repeat {self.repeat}"] if self.repeat > 1 else []
        local = self.program == "trimtab" and case.topology.ranks > MOST_LOCAL
        return " ".join([*words, f"--nproc {case.topology.ranks}"] if local else words)

    def write(self, folder: Path) -> None:
        """`ledger.json` and `ledger.md` in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        cases = [
            {"case": v.case.name, "status": v.status, "errors": v.errors, "details": v.details, "seconds": v.seconds}
            | ({"replicas": v.replicas} if v.case.topology.replicas != "none" else {})
            for v in self.verdicts
        ]
        made = {"command": self.command, "implementation": self.implementation, "seed": self.seed}
        made |= {"machine": machine(), "counts": self.counts(), "worst": self.worst(), "cases": cases}
        write_whole(folder / "ledger.json", json.dumps(made, indent=1) + "\n")
        write_whole(folder / "ledger.md", self.page())

    def page(self) -> str:
        """The page: what ran, on what, how many, the worst error of each tensor, and the table."""
        facts = [f"| {name} | {value} |" for name, value in machine().items()]
        parts = ["# Ledger", "", f"Printed by `{self.command}`.", "", "| | |", "|---|---|", *facts, ""]
        parts += [f"**{self.implementation}, {len(self.verdicts)} cases, seed {self.seed}**", ""]
        parts += [
            "Errors are the largest difference over the largest true value of a tensor, the worst of all cases.",
            "",
        ]
        parts += ["```", self.summary(), "", self.table(), "```"]
        if self.failures:
            parts += ["", "## Failures", "", "```", *(self.explain(v) for v in self.failures), "```"]
        return "\n".join(parts) + "\n"


def machine() -> dict[str, str]:
    """Versions and hardware that a number depends on. No host names."""
    found = {"trimtab": __version__, "torch": torch.__version__, "python": platform.python_version()}
    found |= {"processor": processor_name(), "cores": str(cores())}
    if torch.cuda.is_available():
        found |= {"gpu": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"}
    return found
