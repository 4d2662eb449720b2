"""Findings about this machine and about jobs: how bad, where, what, and what to do; and the one way to print them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WIDTH = 90


@dataclass(frozen=True)
class Finding:
    """One finding.

    severity: "ok"; "note" worth knowing; "warn" costs speed or may fail later; "broken" something that trimtab needs
        does not work, or a job that stopped.
    where: the part looked at. what: one line, or several. do: what to do about it, if anything.
    """

    severity: Literal["ok", "note", "warn", "broken"]
    where: str
    what: str
    do: str = ""


def as_text(findings: Sequence[Finding]) -> str:
    """Findings as aligned plain text, at most 90 columns where words allow."""
    left = max((len(finding.where) for finding in findings), default=0)
    margin = " " * (9 + left)
    lines = []
    for finding in findings:
        first = f"{finding.severity:<6} {finding.where:<{left}}  "
        for i, line in enumerate(finding.what.splitlines()):
            indent = " " * (len(line) - len(line.lstrip()))
            lines += _wrapped(line.lstrip(), (margin if i else first) + indent, margin + indent)
        for line in finding.do.splitlines():
            lines += _wrapped(line, margin + "-> ", margin + "   ")
    return "\n".join(lines)


def _wrapped(text: str, first: str, later: str) -> list[str]:
    width = max(WIDTH, len(later) + 40)
    return textwrap.TextWrapper(width, first, later, break_long_words=False, break_on_hyphens=False).wrap(text)
