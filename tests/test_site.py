"""The site reads on a small screen: no line of code is cut."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PRINTED = ("ledger.md", "peers.md")  # by commands; their longest lines are errors of other libraries, and wrap
WRITTEN = [page for page in WRITTEN if page.name not in PRINTED and not {"results", "build"} & {*page.parts}]
FENCE = re.compile(r"^( *)(`{3,}|:{3,})(.*)$")


def code(page: Path) -> list[tuple[int, str]]:
    """Number and text of each line in a block of code."""
    lines, fence, shown = [], "", False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        found = FENCE.match(line)
        if found and not fence:
            fence, shown = found[2], not found[3].startswith("{")
        elif found and found[2] == fence and not found[3]:
            fence = ""
        elif fence and shown:
            lines.append((number, line))
    return lines


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_code_is_as_wide_as_a_page_of_the_site(page: Path) -> None:
    assert [f"{page.name}:{number}" for number, line in code(page) if len(line) > 90] == []
    included = re.findall(r"```\{literalinclude\} (\S+)\n:language: \w+\n```", page.read_text())
    long = [line for file in included for line in (page.parent / file).read_text().splitlines() if len(line) > 90]
    assert long == []
