"""What a GPU's page says of memory and of shapes that fail, and where it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trimtab.bench import gpu
from trimtab.bench.gpu import SHAPES, layer_table, main, write_gpu_page
from trimtab.bench.gpu_case import GpuCase
from trimtab.bench.gpu_race import Replay, race
from trimtab.errors import InputError

CPU = torch.device("cpu")


class Graph:
    """In place of a CUDA graph."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1


def test_a_graph_holds_its_pool_and_a_run_without_a_device_was_not_measured() -> None:
    graph = Graph()
    replay = Replay(graph=graph, kept="what it gave", pool=3_000_000)
    assert replay() == "what it gave"
    timings = race({"graph": replay, "plain": lambda: None}, CPU, rounds=3, seconds=0.0)
    assert graph.replays > 3
    assert (timings["graph"].memory, timings["graph"].is_graph) == (3_000_000, True)
    assert (timings["plain"].memory, timings["plain"].is_graph) == (None, False)


def test_what_was_not_measured_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    case = GpuCase(dim=32, hidden=16, experts=4, top_k=2, tokens=8, device=CPU)
    text, _ = layer_table(case, ("loop",), rounds=3, peer=False)
    assert text.splitlines()[0].endswith("| memory |")
    assert text.count("| not measured |") == 2
    assert " 0.0 MB" not in text
    monkeypatch.setattr("trimtab.bench.gpu.race", lambda runs, device, *, rounds: race(
        {name: Replay(graph=Graph(), kept=None, pool=5_000_000) for name in runs}, device, rounds=rounds, seconds=0.0
    ))  # fmt: skip
    assert "| 5.0 MB, pool of the graph |" in layer_table(case, ("loop",), rounds=3, peer=False)[0]


def test_the_page_of_a_gpu_is_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "benchmarks.md").write_text("as it was")
    page = write_gpu_page(["# Benchmarks on one GPU", "## D 64", "## D 128"], tmp_path / "docs")
    assert page == tmp_path / "docs" / "benchmarks-gpu.md"
    assert page.read_text().splitlines()[::2] == [
        "# Benchmarks on one GPU", "What was measured on a CPU is in [benchmarks.md](benchmarks.md).", "## D 64",
        "## D 128",
    ]  # fmt: skip
    assert (tmp_path / "docs" / "benchmarks.md").read_text() == "as it was"
    with pytest.raises(InputError, match="cannot be written"):
        write_gpu_page(["# one"], tmp_path / "docs" / "benchmarks.md")


def run_with(monkeypatch: pytest.MonkeyPatch, folder: Path, fails: tuple[int, ...]) -> tuple[int, list[str]]:
    """(exit code, the page as it was when each shape began), where the shapes of these numbers fail."""
    before: list[str] = []
    page = folder / "benchmarks-gpu.md"

    def report(case: GpuCase, *, rounds: int) -> tuple[str, str]:
        before.append(page.read_text() if page.exists() else "")
        if len(before) - 1 in fails:
            raise RuntimeError(f"CUDA error: `illegal` access\nin {case.hidden}")
        return f"{gpu.heading(case)}\n\nmeasured {rounds}", f"line {case.hidden}"

    monkeypatch.setattr(gpu, "report", report)
    for name, value in {"is_available": True, "current_device": 0, "get_device_name": "a GPU"}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, value=value: value)
    return main(["--rounds", "5", "--out", str(folder)]), before


def test_the_page_is_written_after_each_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, before = run_with(monkeypatch, tmp_path, fails=())
    assert code == 0
    assert [text.count("measured 5") for text in before] == list(range(len(SHAPES)))
    assert (tmp_path / "benchmarks-gpu.md").read_text().count("measured 5") == len(SHAPES)
    assert capsys.readouterr().out.count("    line ") == len(SHAPES)


@pytest.mark.parametrize("fails", [(0,), (1,), tuple(range(len(SHAPES)))], ids=str)
def test_a_shape_that_fails_is_a_line_of_the_page(
    fails: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, before = run_with(monkeypatch, tmp_path, fails)
    assert code == 1
    assert len(before) == len(SHAPES)
    text, told = (tmp_path / "benchmarks-gpu.md").read_text(), capsys.readouterr()
    assert text.count("\n## D ") == len(SHAPES)
    assert text.count("measured 5") == told.out.count("    line ") == len(SHAPES) - len(fails)
    for i in fails:
        assert f"\nNot measured, it failed: `RuntimeError: CUDA error: 'illegal' access in {SHAPES[i][1]}`\n" in text
    assert told.err.count("Traceback") == len(fails)
