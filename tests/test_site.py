"""The site reads on a small screen, where no line of code is cut, and its API page says what each parameter is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from docs.docstrings import ENTRIES, ITEMS, MEMBERS, at, listed, told

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
    for file, part in re.findall(r"literalinclude\} (\S+)\n:language: \w+\n(?::pyobject: (\w+)\n)?", page.read_text()):
        shown = (page.parent / file).read_text()
        shown = re.findall(rf"^def {part}\(.*?(?=^\w)", shown, re.MULTILINE | re.DOTALL)[0] if part else shown
        assert [line for line in shown.splitlines() if len(line) > 90] == []


def test_a_parameter_is_told_in_words_and_once() -> None:
    """Not "E and K.", nor by a place that has no words for it."""
    bare = []
    for name in [*ITEMS, *MEMBERS]:
        text = told(listed(inspect.getdoc(at(name)) or "", at(name)), name)
        entries = re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n {5,}.*)*)", text, re.MULTILINE)
        bare += [(name, entry) for entry, words in entries if re.fullmatch(r"(?:\b\w\b(?:, | and )?)+\.", words)]
        bare += [(name, found[0]) for found in ENTRIES.finditer(text)]
    assert bare == []


def test_entries_are_told_in_the_words_of_another_place() -> None:
    said = told(
        "Args:\n    combine: as in `Dispatcher`.\n    kernels, device: as in `ExpertMLP`.\n", "trimtab.MoEConfig"
    )
    assert '    combine: "sum" takes the weighted sum' in said
    assert "    device: of the parameters" in said
    scores = told("a name of `trimtab.routing.scores.SCORES`.", "trimtab.RouterConfig")
    assert scores.startswith('a name of `trimtab.routing.scores.SCORES`: "softmax", "sigmoid"')
