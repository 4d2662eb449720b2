"""The GPU benchmark's own code, on the CPU at a small shape: it runs, agrees with its peer, and refuses to guess."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import gpu_launches, gpu_tables
from benchmarks.gpu import main
from benchmarks.gpu_case import GpuCase, agree, our_layer, steps
from benchmarks.gpu_launches import LaunchCase
from benchmarks.gpu_race import race
from benchmarks.gpu_tables import report
from trimtab.errors import InputError

CASE = GpuCase(dim=64, hidden=32, experts=4, top_k=2, tokens=48, device=torch.device("cpu"))


def test_a_shape_is_reported_beside_its_peer() -> None:
    parts: list[str] = []
    section = report(CASE, ("loop", "stock"), rounds=3, done=lambda section, part: parts.append(part))
    assert parts == section.parts
    assert (section.failed, section.whole) == ([], True)
    assert section.line == ""  # nothing is put down as measured that was not measured on a GPU
    for who in ("trimtab loop", "trimtab stock", "transformers grouped_mm", "dense", "copy", "combine torch"):
        assert f"| {who} |" in section.text
    assert section.text.count("| forward+backward | ") == 3


def test_no_graph_outlives_its_step() -> None:
    """A CUDA graph cannot be captured while the leaves' nodes are those of a step on another stream."""
    layer = our_layer(CASE, "loop")
    forward, both = steps(layer, CASE)
    assert all(t.grad_fn is None and not t.requires_grad for t in (forward(), *both()))


def test_who_fails_is_a_row_and_the_others_are_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("CUDA error: no `grouped_mm` here | none")

    why = "RuntimeError: CUDA error: no 'grouped_mm' here / none"
    monkeypatch.setattr(gpu_tables, "their_layer", fails)
    section = report(CASE, ("loop", "stock"), rounds=3)
    assert section.failed == ["transformers grouped_mm"]
    assert f"|  | transformers grouped_mm | failed |  |  |  | {why} |" in section.text
    assert section.text.count("| forward+backward | trimtab ") == 2
    monkeypatch.setattr(gpu_tables, "gemms", lambda *args: {"dense": lambda: None, "stock": fails})
    section = report(CASE, ("loop", "stock"), rounds=3, peer=False)
    assert section.failed == ["stock"]
    assert f"| stock | failed |  |  | {why} |" in section.text
    monkeypatch.setattr(gpu_tables, "moves", fails)
    section = report(CASE, ("loop", "stock"), rounds=3, peer=False)
    assert section.failed == ["stock", "row moves"]
    assert section.parts[-1] == f"row moves: not measured, it failed: `{why}`"
    assert "trimtab loop" in section.text


class Device(TorchDispatchMode):
    """Computes until it is broken, as a CUDA device in one process."""

    broken = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return func(*args, **(kwargs or {}))

    def breaks(self) -> None:
        self.broken = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_device_that_breaks_ends_its_section(monkeypatch: pytest.MonkeyPatch) -> None:
    device, kept = Device(), list[str]()
    made = {"dense": lambda: None, "stock": device.breaks, "loop": lambda: None}
    monkeypatch.setattr(gpu_tables, "gemms", lambda *args: made)
    with device:
        section = report(CASE, ("loop",), rounds=3, peer=False, done=lambda section, part: kept.append(part))
    assert (section.broken, section.whole, section.failed) == (True, False, ["stock"])
    assert kept == section.parts
    assert [part.splitlines()[0].split(" | ")[0] for part in kept[1:]] == [
        "| ",
        "| ",
        "| grouped GEMM, [R, D] by [D, 2F]",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's kernels run there")
def test_kernels_that_are_not_there_cost_no_other_contestant_its_numbers() -> None:
    section = report(CASE, ("loop", "triton"), rounds=3, peer=False)
    assert section.failed == ["trimtab triton", "triton", "gather triton", "combine triton"]
    for who in ("trimtab loop", "loop", "dense", "copy", "gather loop", "combine torch"):
        assert f"| {who} |" in section.text


@pytest.mark.parametrize(("table", "usual"), [("gemms", "dense"), ("moves", "copy")])
def test_the_others_are_measured_where_what_they_are_compared_with_fails(
    table: str, usual: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise RuntimeError("out of memory")

    made: dict[str, Any] = {usual: fails, "stock": lambda: None}
    made = {name: (run, 8) for name, run in made.items()} if table == "moves" else made
    monkeypatch.setattr(gpu_tables, table, lambda *args: made)
    section = report(CASE, ("loop",), rounds=3, peer=False)
    assert section.failed == [usual]
    (row,) = [line for line in section.text.splitlines() if line.startswith("| stock |")]
    assert row.endswith(" |  |")


def test_each_launch_is_kept_before_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    device, kept = Device(), list[str]()
    cases = [
        LaunchCase(name="first", tiles=None, flops=0.0, run=lambda _: kept.append("ran")),
        LaunchCase(name="second", tiles=None, flops=1.0, run=lambda _: device.breaks()),
        LaunchCase(name="third", tiles=None, flops=1.0, run=lambda _: None),
    ]
    monkeypatch.setattr(gpu_launches, "layer_launches", lambda case: cases)

    def launches(first: int) -> gpu_tables.Section:
        return report(CASE, ("triton",), rounds=3, launches=first, done=lambda section, part: kept.append(part[:8]))

    with device:
        section = launches(0)
    assert [part for part in kept[1:] if part != "ran"] == ["| first ", "| second"]
    assert (section.launches, section.broken, section.whole) == (2, True, False)
    section = launches(2)
    assert (section.launches, section.whole, section.failed) == (1, True, [])
    assert "| third |" in section.text
    assert "first" not in section.text


def test_results_that_differ_are_not_timed() -> None:
    x = torch.ones(4)
    agree([x], [x * 1.01], "close")
    with pytest.raises(InputError, match="far: result 0 differs"):
        agree([x], [x * 1.2], "far")


def test_every_contestant_has_its_turn_in_every_round() -> None:
    turns: list[str] = []
    timings = race(
        {name: lambda name=name: turns.append(name) for name in ("a", "b")}, CASE.device, rounds=5, seconds=0.0
    ).timings
    assert {name: len(t.seconds) for name, t in timings.items()} == {"a": 5, "b": 5}
    assert "".join(turns[-8:]) in ("babaabba", "abbabaab", "baabbaab", "abbaabba")


def test_who_fails_in_a_turn_takes_no_more() -> None:
    """Memory may run out only when all others have theirs."""
    runs = {"well": 0, "out": 0}

    def run(name: str) -> None:
        runs[name] += 1
        if name == "out" and runs[name] > 6:
            raise RuntimeError("out of memory")

    raced = race({name: lambda name=name: run(name) for name in runs}, CASE.device, rounds=9, seconds=0.0)
    assert len(raced.timings["well"].seconds) == 9
    assert "out" not in raced.timings
    assert raced.failed == {"out": "RuntimeError: out of memory"}
    assert runs["out"] == 7


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, so it would run in full")
def test_without_a_device_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert "nothing was measured" in capsys.readouterr().err
