"""What a GPU's page says of memory and of shapes that fail, and where it is kept."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, gpu_tables
from benchmarks.gpu import SHAPES, main, write_gpu_page
from benchmarks.gpu_case import GpuCase
from benchmarks.gpu_race import Replay, race
from benchmarks.gpu_tables import Section, heading, layer_tables
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
    timings = race({"graph": replay, "plain": lambda: None}, CPU, rounds=3, seconds=0.0).timings
    assert graph.replays > 3
    assert (timings["graph"].memory, timings["graph"].is_graph) == (3_000_000, True)
    assert (timings["plain"].memory, timings["plain"].is_graph) == (None, False)


def test_what_was_not_measured_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    case = GpuCase(dim=32, hidden=16, experts=4, top_k=2, tokens=8, device=CPU)
    text = "\n".join(layer_tables(case, ("loop",), Section([]), rounds=3, peer=False))
    assert text.splitlines()[0].endswith("| memory |")
    assert text.count("| not measured |") == 2
    assert " 0.0 MB" not in text
    monkeypatch.setattr(gpu_tables, "race", lambda runs, device, *, rounds: race(
        {name: Replay(graph=Graph(), kept=None, pool=5_000_000) for name in runs}, device, rounds=rounds, seconds=0.0
    ))  # fmt: skip
    assert "| 5.0 MB, pool of the graph |" in next(layer_tables(case, ("loop",), Section([]), rounds=3, peer=False))


def test_a_graph_that_only_transformers_cannot_have_is_said_and_fails_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case, section = GpuCase(dim=32, hidden=16, experts=4, top_k=2, tokens=8, device=CPU), Section([])
    failed = {f"{who}, {gpu_tables.GRAPH}": "a sync" for who in (gpu_tables.PEER, "trimtab loop")}
    monkeypatch.setattr(gpu_tables, "_layer_runs", lambda *_: ({"forward": {}, gpu_tables.BOTH: {}}, failed))
    text = "\n".join(layer_tables(case, ("loop",), section, rounds=3, peer=True))
    assert text.count("| failed |") == text.count("| a sync |") == 2
    assert section.failed == ["trimtab loop, CUDA graph"]


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


SMALL = ["--device", "cpu", "--kernels", "loop", "--tokens", "8", "--rounds", "3"]


def test_each_shape_has_a_process_of_its_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shapes = ["--shape", "32,16,4,2", "--shape", "16,16,4,1"]
    assert main([*SMALL, *shapes, "--out", str(tmp_path)]) == 0
    text, told = (tmp_path / "benchmarks-gpu.md").read_text(), capfd.readouterr()
    assert text.count("| forward+backward | trimtab loop |") == text.count("\n## D ") == 2
    assert all(line in told.out for line in text.splitlines()[3:])
    assert "Measured(" not in told.out  # the table of measured kernels is for devices


def section_of(
    monkeypatch: pytest.MonkeyPatch, parts: list[str], end: str, whole: bool = False
) -> tuple[int, str]:  # fmt: skip
    """(exit code, page) where the processes have written these parts and end so."""

    def ended(command: list[str], limit: float) -> str:
        assert limit == 150.0
        if parts:
            section = Section(parts, line="a line", whole=whole)
            Path(command[-1]).write_text(json.dumps(vars(section)))
        return end

    monkeypatch.setattr(gpu, "_ended", ended)
    pages: list[list[str]] = []
    monkeypatch.setattr(gpu, "write_gpu_page", lambda sections, folder: pages.append(list(sections)))
    code = main([*SMALL, "--out", "anywhere"])
    assert [len(page) for page in pages] == [2, 3, 4]  # written after each shape
    return code, pages[-1][-1]


@pytest.mark.parametrize(
    "end", ["its process ended with 1", "its process ended with -11", "it was stopped after 150 s"]
)
@pytest.mark.parametrize("parts", [["## D", "| a table |"], ["## D"], []], ids=len)
def test_what_a_shape_had_measured_when_it_ended_is_on_the_page(
    monkeypatch: pytest.MonkeyPatch, parts: list[str], end: str
) -> None:
    dim, hidden, experts, top_k = SHAPES[-1]
    case = GpuCase(dim=dim, hidden=hidden, experts=experts, top_k=top_k, tokens=8, device=CPU)
    said = "\n\n".join([*(parts or [heading(case)]), f"The rest was not measured: {end}."])
    assert section_of(monkeypatch, parts, end) == (1, said)


def measured_apart(monkeypatch: pytest.MonkeyPatch, *found: Section | str) -> tuple[list[str], Section]:
    """(what processes were started with, the section) of a shape where they gave these, or ended so with nothing."""
    started, left = list[str](), list(found)

    def ended(command: list[str], limit: float) -> str:
        started.append(" ".join(command[command.index("--kernels") + 1 : -2]).replace(" --shape 32,16,4,2", ""))
        gave = left.pop(0)
        if isinstance(gave, Section):
            Path(command[-1]).write_text(json.dumps(vars(gave)))
        return gave if isinstance(gave, str) else "its process ended with 1"

    monkeypatch.setattr(gpu, "_ended", ended)
    options = gpu._parser().parse_args(["--device", "cpu", "--kernels", "stock", "triton"])
    section = gpu.apart(options, (32, 16, 4, 2))
    assert not left
    return started, section


WHOLE = Section(["## D", "| all |"], line="a line", whole=True)
LAUNCHES = Section(["## D", "| launches |"], whole=True)


def test_all_contestants_are_measured_in_one_process_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    started, section = measured_apart(monkeypatch, WHOLE, LAUNCHES)
    assert started == ["stock triton", "triton --launches 0"]
    assert section.parts == ["## D", "| all |", "The launches of the Triton layer, one by one:", "| launches |"]
    assert (section.failed, section.line) == ([], "a line")


@pytest.mark.parametrize("broken", [True, False])
def test_where_triton_breaks_the_device_or_hangs_the_others_are_measured_without_it(
    monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    first = Section(["## D", "| stock failed too |"], broken=True) if broken else "it was stopped after 100 s"
    started, section = measured_apart(monkeypatch, first, Section(["## D", "| stock |"], whole=True), LAUNCHES)
    assert started == ["stock triton", "stock", "triton --launches 0"]
    why = "the device answered nothing more" if broken else "it was stopped after 100 s"
    assert section.failed == [why]
    assert f"The rest was not measured: {why}." in section.parts
    assert section.parts[-4:] == ["Again, without Triton:", "| stock |", section.parts[-2], "| launches |"]


def test_a_launch_that_ends_its_process_loses_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    breaks = Section(["## D", "| one |", "| two, which broke the device |"], launches=2, behind=6, broken=True)
    crashes, again = Section(["## D", "| three |"], launches=1, behind=5), "its process ended with -11"
    started, section = measured_apart(monkeypatch, WHOLE, breaks, crashes, again, again, LAUNCHES)
    assert started[1:] == [f"triton --launches {first}" for first in (0, 2, 4, 5, 6)]
    assert [part for part in section.parts if part[0] == "|"][1:] == [*breaks.parts[1:], "| three |", "| launches |"]


@pytest.mark.parametrize("broken", [True, False])
def test_behind_the_last_launch_none_is_tried(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    last = Section(["## D", "| seven |"], launches=8 if broken else 7, behind=0 if broken else 1, broken=broken)
    assert len(measured_apart(monkeypatch, WHOLE, last)[0]) == 2


def test_launches_that_cannot_begin_are_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    started, section = measured_apart(monkeypatch, WHOLE, *[Section(["## D", "it failed"], broken=True)] * gpu.TRIES)
    assert started[1:] == [f"triton --launches {first}" for first in range(gpu.TRIES)]
    assert section.failed == ["the device answered nothing more"] * gpu.TRIES + ["launches"]


def test_no_launch_is_begun_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 140.0, 151.0])
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(times))
    started, section = measured_apart(monkeypatch, WHOLE, Section(["## D", "| one |"], launches=1, behind=7))
    assert len(started) == 2
    assert section.parts[-1] == "No more launches were measured."


def test_who_failed_is_said_at_the_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert section_of(monkeypatch, ["## D"], "its process ended with -11")[0] == 1
    assert capsys.readouterr().out.endswith("Failed, D: its process ended with -11\n")


def test_lines_for_the_table_are_printed_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert section_of(monkeypatch, ["## D"], "its process ended with 0", whole=True) == (0, "## D")
    assert capsys.readouterr().out.count("    a line,\n") == len(SHAPES)


def test_a_process_is_stopped_when_its_time_is_over() -> None:
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    start = time.monotonic()
    assert gpu._ended(sleeper, 0.5) == "it was stopped after 0 s"
    assert time.monotonic() - start < 30
    assert gpu._ended([sys.executable, "-c", "raise SystemExit(3)"], 60.0) == "its process ended with 3"


@pytest.mark.parametrize("wrong", ["--rounds 1", "--tokens 0", "--limit nan", "--shape 1,2,3"])
def test_numbers_that_measure_nothing_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, *wrong.split()])
    assert ended.value.code == 2
    assert wrong.split()[0] in capsys.readouterr().err
