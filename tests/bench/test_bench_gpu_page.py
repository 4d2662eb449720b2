"""What a GPU's page says of memory, and where it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trimtab.bench.gpu import layer_table, write_gpu_page
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
