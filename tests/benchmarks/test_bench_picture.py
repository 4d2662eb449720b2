"""Pictures of results show the numbers of their pages, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.picture import bars, draw

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
HEADER = "Machine: 2 cores of X (AVX512); trimtab 1, torch 2.\n\n## One experts layer\n\n"
ROW = (
    "| A, {dtype}, 256 tokens, 1 thread | forward+backward | auto | 4 ms | 4 ms | grouped_mm | 6 ms | 9 ms "
    "| 1.50 | 2.25 | **1.50** | 2 ms, dense bf16 | 2.00 | 1.50 | **2.00** |\n"
)


def test_ours_is_by_the_worse_malloc_and_the_peer_by_the_better() -> None:
    others = ROW.replace("| auto", "| loop") + ROW.replace("forward+backward", "forward")
    (bar,) = bars(HEADER + others.format(dtype="bf16") + ROW.format(dtype="bf16"))
    assert bar == ("A", "bf16", 256, 1, 2.0, 3.0)


@pytest.mark.parametrize("page", ["intel-amx.md", "amd-zen5.md", "amd-zen4.md"])
def test_every_case_of_a_page_is_in_its_picture(page: str) -> None:
    found = bars((RESULTS / page).read_text())
    assert len(found) == len({bar[:4] for bar in found}) == 36


def test_a_picture_lies_beside_its_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.md"
    page.write_text(HEADER + ROW.format(dtype="bf16") + ROW.format(dtype="fp32"))
    draw(page)
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
