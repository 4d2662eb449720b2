"""What the README and the docs show is what is in the repository; `tests/docs` runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.__main__ import build_parser as benchmarks_parser
from trimtab.cli.main import build_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "results" not in page.parts and "build" not in page.parts]


def test_the_readme_is_short_and_its_example_is_the_file() -> None:
    assert len(README.splitlines()) <= 150
    shown = re.search(r"<!-- examples/finetune.py -->\n```python\n(.*?)```", README, re.DOTALL)
    assert shown
    assert shown[1] == (ROOT / "examples" / "finetune.py").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if ":" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []
    written = r"(?:src/trimtab|tests|docs|benchmarks|examples)/[\w./-]*\w"
    made = {"docs/build", "benchmarks/results/gpu.md"}
    assert [
        path for path in re.findall(written, text) if not (path in made or "NAME" in path or (ROOT / path).exists())
    ] == []


def test_the_proofs_are_many() -> None:
    assert (ROOT / "docs/proofs.md").read_text().count("`pytest tests") > 30


def commands() -> list[str]:
    """Every line of a shell block, without its comment and line ends."""
    blocks = [block for page in PAGES for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)]
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return sorted({line for line in lines if line})


def test_commands_are_those_that_there_are() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    parsers = {"trimtab": build_parser(), "-m trimtab": build_parser(), "-m benchmarks": benchmarks_parser()}
    seen = 0
    for line in commands():
        for target in re.findall(r"\bmake ([a-z-]+)", line):
            assert target in targets, line
        for start, parser in parsers.items():
            found = re.search(rf"(?:^|; |python ){start}((?: [^;&|]+)?)$|torchrun.* {start}((?: [^;&|]+)?)$", line)
            if found:
                words = (found[1] or found[2] or "").split()
                parser.parse_args([word.strip("'") for word in words])  # raises SystemExit for what it does not know
                seen += 1
    assert seen > 12


CASE = re.compile(r"([ABC]), (bf16|fp32), (2048|8192) tokens, [12] threads?(, [24] ranks)?")
RESULTS = ROOT / "benchmarks/results"


def span(pages: list[str], dtypes: str, ranks: bool) -> str:
    """The least and the most that pages quote: times as fast as the fastest peer."""
    found = []
    for line in [line for page in pages for line in (RESULTS / page).read_text().splitlines()]:
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        if len(cells) != 15 or cells[1] != "forward+backward" or cells[2] not in ("auto", "auto shared_memory"):
            continue
        case = CASE.fullmatch(cells[0])
        if case and cells[5] and case[2] in dtypes and bool(case[4]) == ranks:
            found.append(float(cells[10]))
    assert len(found) > 3
    return f"{min(found):.2f} to {max(found):.2f}"


def column(page: str, start: str, number: int) -> str:
    """The least and the most of a column, over the rows of a page that begin so."""
    rows = [line.strip("| ").split(" | ") for line in (RESULTS / page).read_text().splitlines()]
    found = [float(cells[number]) for cells in rows if " | ".join(cells).startswith(start)]
    least, most = (f"{bound(found):.2f}" for bound in (min, max))
    return least if least == most else f"{least} to {most}"


def test_the_speeds_are_those_of_the_pages() -> None:
    pages = ["intel-amx.md", "amd-zen5.md", "amd-zen4.md"]
    for page in pages:
        assert f"benchmarks/results/{page}): {span([page], 'bf16', False)}" in README
    modes = ("forward", "forward+backward")
    few, own = (
        "; ".join(column("overhead.md", f"{mode} | {who} |", 3) for mode in modes)
        for who in ("trimtab in transformers", "trimtab's MoE")
    )
    quoted = {
        "overhead.md": f"{few}, and trimtab's `MoE` {own}",
        "step.md": column("step.md", "step | trimtab |", 3),
        "adapters.md": column("adapters.md", "forward+backward | trimtab under peft", 3),
        "megatron.md": column("megatron.md", "forward+backward | trimtab, alltoall", 3),
        "imbalance.md": "; ".join(column("imbalance.md", "hot_rank", number) for number in (8, 10)),
        "amd-zen5.md": span(pages, "bf16 fp32", True),
    }
    for page, speed in quoted.items():
        (row,) = [line for line in README.splitlines() if line.startswith("|") and f"benchmarks/results/{page}" in line]
        assert row.endswith(f"| {speed} |"), (page, speed)
