"""Every code block of README.md and docs/ runs, from top to bottom of its page, with what the page installs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from helpers.doc_blocks import FIRST, PAGES, ROOT, Block, blocks_of, run_page

BLOCKS = {page: blocks_of(page) for page in PAGES}
RUN_AT_LEAST = 67
MARKED = {"minutes": 8, "tested": 7, "clone": 5, "elsewhere": 7, "network": 1}
"""Blocks that do not run with the others, by the reason that their page gives."""


def runs(block: Block, minutes: bool = False) -> bool:
    why = "" if minutes and block.why == "minutes" else block.why
    return block.kind in ("python", "sh", "file") and not why


RUN = [page for page, blocks in BLOCKS.items() if any(map(runs, blocks))]
MINUTES = [page for page, blocks in BLOCKS.items() if any(block.why == "minutes" for block in blocks)]


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of the command that pages begin with."""
    folder = tmp_path_factory.mktemp("first")
    run_page(ROOT / "README.md", folder, [Block("README.md", 1, "sh", FIRST)])
    return folder / "runs/first"


@pytest.mark.xdist_group("docs")
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_one_after_the_other(page: Path, tmp_path: Path, first: Path) -> None:
    said = run_page(page, tmp_path, [block for block in BLOCKS[page] if runs(block)], first)
    print(said[-4000:])
    lines = {" ".join(line.split()) for line in said.splitlines()}
    shown = [line for block in BLOCKS[page] if block.name == "printed" for line in block.text.splitlines()]
    assert [line for line in shown if " ".join(line.split()) not in lines] == []


@pytest.mark.docs_full
@pytest.mark.parametrize("page", MINUTES, ids=lambda page: page.stem)
def test_those_that_take_minutes_run_as_well(page: Path, tmp_path: Path, first: Path) -> None:
    run_page(page, tmp_path, [block for block in BLOCKS[page] if runs(block, minutes=True)], first)


@pytest.mark.parametrize(
    ("page", "there", "hidden"),
    [
        ("own-model", ["torch"], ["transformers", "numpy", "peft", "megatron"]),
        ("quantized", ["transformers", "numpy"], ["peft", "trl", "datasets", "megatron", "matplotlib"]),
        ("adapters", ["peft", "trl", "datasets"], ["megatron", "matplotlib"]),
    ],
)
def test_a_page_can_import_what_it_installs(page: str, there: list[str], hidden: list[str], tmp_path: Path) -> None:
    code = "from importlib import util\nfound = [n for n in {} if util.find_spec(n)]\nassert found == {}, found"
    block = Block(page, 1, "python", code.format(there + hidden, there))
    run_page(ROOT / f"docs/howto/{page}.md", tmp_path, [block])
    (tmp_path / "again").mkdir()
    with pytest.raises(AssertionError, match="exit code 3"):
        run_page(
            ROOT / f"docs/howto/{page}.md", tmp_path / "again", [Block(page, 1, "sh", "python -c 'exit(3)'; true")]
        )


def test_every_block_is_accounted_for() -> None:
    """Blocks that do not run must compile; how many there are for each reason is held here."""
    blocks = [block for found in BLOCKS.values() for block in found]
    for block in blocks:
        block.compiles()
    whys = ["tested" if "." in block.why else block.why for block in blocks]
    count = Counter(why or ("run" if runs(block) else block.kind) for why, block in zip(whys, blocks, strict=True))
    print(dict(count))
    assert [page for page in RUN if "pip install" not in page.read_text(encoding="utf-8")] == []
    assert {why: count[why] for why in MARKED} == MARKED
    assert count["run"] >= RUN_AT_LEAST
    assert set(count) == {*MARKED, "run", "output", "site", "installs"}
