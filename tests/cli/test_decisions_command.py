"""`trimtab decisions`: a file's shape, loads and dropped slots; where two files part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trimtab.cli.main import main
from trimtab.layer import MoEConfig
from trimtab.routing.config import RouterConfig
from trimtab.routing.decisions import Decisions
from trimtab.routing.record import record

NAMES = ("layers.0.moe.router", "layers.1.moe.router")


def write(path: Path, ids: torch.Tensor, experts: int = 4, layers: tuple[str, ...] = NAMES) -> Path:
    Decisions(ids=ids, num_experts=experts, layers=layers).save(path)
    return path


def by_hand() -> torch.Tensor:
    """[B, L, layers, K] = [2, 3, 2, 2]: the first layer even, the second all on 0 and 1, one dropped, one no pick."""
    ids = torch.tensor([[[0, 1], [0, 1]], [[2, 3], [0, 1]], [[0, 1], [0, 1]]]).repeat(2, 1, 1, 1)
    ids[1, 0, 0] = torch.tensor([2, 3])
    ids[1, 2, 1] = torch.tensor([-2 - 0, -1])
    return ids


def test_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "a", by_hand())
    assert main(["decisions", str(file)]) == 0
    head, columns, first, second = capsys.readouterr().out.splitlines()
    assert head == "2 sequences of 3 positions, 2 layers, 2 of 4 experts per token"
    assert columns.split() == ["layer", "picks", "dropped", "no", "pick", "max_vio", "idle", "loads"]
    assert first.split() == [NAMES[0], "12", "0", "0", "0.000", "0", "3", "3", "3", "3"]
    # 6 picks of expert 0 and 5 of 1, the mean is 11 / 4: 6 / 2.75 - 1 = 1.182
    assert second.split() == [NAMES[1], "11", "1", "1", "1.182", "2", "6", "5", "0", "0"]
    assert main(["decisions", str(file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["layers"][1]["loads"] == [6, 5, 0, 0]
    assert found["layers"][1]["max_vio"] == pytest.approx(6 / 2.75 - 1)


def test_many_experts_are_not_all_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = torch.arange(64).repeat(2).view(1, 32, 1, 4)
    ids[0, 0, 0, 0] = 63
    assert main(["decisions", str(write(tmp_path / "a", ids, 64, NAMES[:1]))]) == 0
    assert "1 to 3; busiest 63: 3, 1: 2" in capsys.readouterr().out


def test_where_two_files_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = by_hand()
    one, same = write(tmp_path / "a", ids), write(tmp_path / "same", ids.int())
    assert main(["decisions", str(one), "--other", str(same)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("the same in every slot")
    ids = by_hand()
    ids[1, 1, 1, 1], ids[1, 2, 0, 0] = 3, -2 - 0
    other = write(tmp_path / "b", ids)
    assert main(["decisions", str(one), "--other", str(other)]) == 1
    first, count = capsys.readouterr().out.splitlines()[-2:]
    assert "first differs at sequence 1, position 1, layer layers.1.moe.router, k 1: [0, 1] and [0, 3]" in first
    assert count == "2 of 24 slots differ, in 2 of 6 tokens"
    ids = by_hand()
    ids[0, 1, 0] = ids[0, 1, 0].flip(0)
    other = write(tmp_path / "c", ids)
    assert main(["decisions", str(one), "--other", str(other), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["difference"]
    assert (found["sequence"], found["position"], found["layer"], found["k"]) == (0, 1, NAMES[0], 0)
    assert found["same_experts"]


def test_files_that_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = by_hand()
    one = write(tmp_path / "a", ids)
    for name, other, words in (
        ("b", write(tmp_path / "b", ids[:, :2]), "(2, 3, 2, 2) and (2, 2, 2, 2)"),
        ("c", write(tmp_path / "c", ids, experts=8), "experts: 4 and 8"),
        ("d", write(tmp_path / "d", ids, layers=("x", "y")), "layers: ("),
    ):
        assert main(["decisions", str(one), "--other", str(other)]) == 1, name
        assert f"not comparable, {words.split(' and ')[0]}" in capsys.readouterr().out.replace(
            "sequences, positions, layers, k: ", ""
        )


def test_recorded_by_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `record` keeps: drops of a full expert are counted, loads are the picks before dropping."""
    torch.manual_seed(0)
    router = RouterConfig(num_experts=6, top_k=2, capacity_factor=0.6)
    layer = MoEConfig(dim=8, hidden=4, router=router).build("moe")
    with record(layer) as recording:
        out = layer(torch.randn(3, 5, 8))
    recording.decisions().save(tmp_path / "a")
    assert main(["decisions", str(tmp_path / "a"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["layers"]
    assert found["picks"] == 30
    assert found["dropped"] == int((out.ids_TK < 0).sum()) > 0
    assert sum(found["loads"]) == 30


@pytest.mark.parametrize("content", [None, b"text", b""])
def test_no_such_file(content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a"
    if content is not None:
        path.write_bytes(content)
    assert main(["decisions", str(path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert len(error.strip().splitlines()) == 1
    assert main(["decisions", "--debug", str(path)]) == 2
    debug = capsys.readouterr().err
    assert debug.startswith("Traceback")
    assert debug.endswith(f"trimtab.errors.InputError: {error.removeprefix('trimtab: ')}{error}")
