"""The GPU benchmark's own code, on the CPU at a small shape: it runs, agrees with its peer, and refuses to guess."""

from __future__ import annotations

import pytest
import torch

from trimtab.bench.gpu import main, report
from trimtab.bench.gpu_case import GpuCase, agree
from trimtab.bench.gpu_race import race
from trimtab.errors import InputError

CASE = GpuCase(dim=64, hidden=32, experts=4, top_k=2, tokens=48, device=torch.device("cpu"))


def test_a_shape_is_reported_beside_its_peer() -> None:
    section, line = report(CASE, ("loop", "stock"), rounds=3)
    assert line == ""  # nothing is put down as measured that was not measured on a GPU
    for who in ("trimtab loop", "trimtab stock", "transformers grouped_mm", "dense", "copy", "combine torch"):
        assert f"| {who} |" in section
    assert section.count("| forward+backward | ") == 3


def test_results_that_differ_are_not_timed() -> None:
    x = torch.ones(4)
    agree([x], [x * 1.01], "close")
    with pytest.raises(InputError, match="far: result 0 differs"):
        agree([x], [x * 1.2], "far")


def test_every_contestant_has_its_turn_in_every_round() -> None:
    turns: list[str] = []
    timings = race(
        {name: lambda name=name: turns.append(name) for name in ("a", "b")}, CASE.device, rounds=5, seconds=0.0
    )
    assert {name: len(t.seconds) for name, t in timings.items()} == {"a": 5, "b": 5}
    assert "".join(turns[-8:]) in ("babaabba", "abbabaab", "baabbaab", "abbaabba")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, so it would run in full")
def test_without_a_device_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert "nothing was measured" in capsys.readouterr().err
