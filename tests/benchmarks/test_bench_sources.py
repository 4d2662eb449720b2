"""Results belong to the sources that were raced: what changes them is measured anew, what does not is kept."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.campaign import Campaign, write_page
from benchmarks.contestant import Contestant
from benchmarks.race import Pace
from benchmarks.result import Race, Record
from benchmarks.sources import source_digest
from benchmarks.store import read_records, write_records
from benchmarks.task import Task, run_task
from helpers.records import NOW, record

MODULE = '"""What it is."""\n\nX = 1  # one\n'


def package(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("name", "text", "kept"),
    [
        ("experts/mlp.py", '"""Something else."""\n\n\nX = 1\n"""Said after it."""\n', {"layer", "train"}),
        ("experts/mlp.py", MODULE.replace("1", "2", 1), set()),
        ("experts/more.py", MODULE, set()),
        ("kernels/cpu/rows.h", "int y;", set()),
        ("train/loop.py", MODULE.replace("1", "2", 1), {"layer"}),
        ("kernels/cpu/experts.cpp", "int z;", set()),
        ("bench/page.py", MODULE.replace("1", "2", 1), {"layer", "train"}),
        ("bench/race.py", MODULE, set()),
        ("cli/bench.py", MODULE, {"layer", "train"}),
        ("kernels/triton/moves.py", MODULE, {"layer", "train"}),
        ("bench/readme.txt", "words", {"layer", "train"}),
    ],
)
def test_the_digest_is_of_what_is_raced(tmp_path: Path, name: str, text: str, kept: set[str]) -> None:
    files = {"experts/mlp.py": MODULE, "kernels/cpu/rows.h": "int x;", "bench/page.py": MODULE, "train/loop.py": MODULE}
    before, after = package(tmp_path / "a", files), package(tmp_path / "b", files | {name: text})
    assert {p for p in ("layer", "train") if source_digest(p, before) == source_digest(p, after)} == kept


@pytest.mark.usefixtures("as_of_now")
def test_a_record_bears_its_digest_unless_it_changed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Contestant(name="one", role="ours", build="helpers.fakes:sleeper", args={"modes": {"forward": 0.01}})
    task = Task(part="layer", case={}, contestants=[fake], modes=["forward"])
    made = run_task(task, ["default"], Pace(turns=1, seconds=0.01), command="here")
    assert made.sources == NOW
    assert made.settings["modes"] == ["forward"]
    assert made.settings["took"] > 0
    changing = iter(["before", "after"])
    monkeypatch.setattr("benchmarks.task.source_digest", lambda part: next(changing))
    assert run_task(task, ["default"], Pace(turns=1, seconds=0.01), command="here").sources == ""


@pytest.mark.usefixtures("as_of_now")
def test_a_campaign_measures_anew_what_no_longer_stands(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, quick=True, only=["layer", "fp32", "tokens-256"])
    files = list(campaign.left())
    in_vain = dataclasses.replace(
        record(), races=[Race(malloc="default", entries=[dataclasses.replace(e, seconds={}, failed="died")
                                                        for e in record().races[0].entries])])  # fmt: skip
    for old in (dataclasses.replace(record(), sources=""), dataclasses.replace(record(), sources="0" * 12), in_vain):
        write_records([old], files[0])
        assert list(campaign.left()) == files
    for _ in campaign.run(lambda task: record()):
        pass
    assert not campaign.left()
    assert read_records([files[0]]) == [record()]


@pytest.mark.usefixtures("as_of_now")
def test_results_of_earlier_sources_stand_apart(tmp_path: Path) -> None:
    old = dataclasses.replace(record(0.1, tokens=8192), sources="")
    write_records([record()], tmp_path / "now.json")
    write_records([old], tmp_path / "old.json")
    files, out = [tmp_path / "now.json", tmp_path / "old.json"], tmp_path / "x.md"
    assert write_page(files, out, tmp_path / "x.png")
    upper, _, lower = out.read_text().partition("## Measured with earlier sources")
    assert "measured with the sources that this page was written from: 1 (" in upper
    assert "**With other sources: 1, at the end, counted by no bar.**" in upper
    assert "| A, bf16, 2048 tokens, 1 thread | forward+" in upper
    assert "| A, bf16, 8192 tokens, 1 thread | forward+" not in upper
    assert "These numbers are not this version's" in lower
    assert "| A, bf16, 8192 tokens, 1 thread | forward+" in lower
    assert "### One experts layer" in lower
    assert "### Memory of forward+backward" in lower

    assert not write_page(files[1:], out, tmp_path / "y.png"), "nothing of these sources to draw"
    assert not (tmp_path / "y.png").exists()
    text = out.read_text()
    assert "![" not in text
    assert "| yes |" not in text, "no bar is met by what was measured before"


def test_a_file_without_a_digest_can_be_read(tmp_path: Path) -> None:
    """As it was written before records had one."""
    found = record().as_json()
    del found["sources"]
    assert Record.from_json(found).sources == ""
