"""A finding: how bad, where, what, and what to do about it. Plain values, and one way to print them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["ok", "note", "warn", "broken"]
WIDTH = 100


@dataclass(frozen=True)
class Finding:
    """One finding.

    severity: "ok"; "note" worth knowing; "warn" costs speed or may fail later; "broken" something that trimtab needs
        does not work, or a job that stopped.
    where: the part looked at. what: one line, or several. do: what to do about it, if anything.
    """

    severity: Severity
    where: str
    what: str
    do: str = ""


Part = tuple[str, list[Finding]]
"""A part of a check-up by name, and what was found there."""


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if anything is broken, else 0."""
    return int(any(finding.severity == "broken" for finding in findings))


def as_text(findings: Sequence[Finding]) -> str:
    """Findings as aligned plain text, at most 100 columns where words allow."""
    left = max((len(finding.where) for finding in findings), default=0)
    margin = " " * (9 + left)
    lines = []
    for finding in findings:
        first = f"{finding.severity:<6} {finding.where:<{left}}  "
        for i, line in enumerate(finding.what.splitlines()):
            lines += _wrapped(line, margin if i else first, margin)
        for line in finding.do.splitlines():
            lines += _wrapped(f"-> {line}", margin, margin + "   ")
    return "\n".join(lines)


def as_json(parts: Sequence[Part]) -> dict[str, Any]:
    """What `--json` prints."""
    findings = [{"part": name, **asdict(finding)} for name, part in parts for finding in part]
    return {"ok": all(finding["severity"] != "broken" for finding in findings), "findings": findings}


def _wrapped(line: str, first: str, later: str) -> list[str]:
    text = line.lstrip()
    indent = " " * (len(line) - len(text))
    wrapper = textwrap.TextWrapper(
        max(WIDTH, len(later) + 40), first + indent, later + indent, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text)
