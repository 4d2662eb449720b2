"""Frozen experts: the race runs, wrong numbers do not race, peers that are not installed are listed as such."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.contestant import Contestant
from benchmarks.frozen import BOUNDS, RACERS, Drawn, build, frozen_table, layer_judge, mode_of
from benchmarks.layer_case import LayerCase
from benchmarks.race import Pace, race
from benchmarks.result import ABSENT
from benchmarks.subject import Where
from benchmarks.task import read_record

CASE = LayerCase(dim=128, hidden=128, num_experts=16, top_k=2, tokens=70, dtype="bf16")
COUNTS = [1, 70]
QUICK = ["--turns", "1", "--seconds", "1", "--threads", "1"]


def outcome(who: str) -> dict[str, torch.Tensor]:
    found = build(CASE.as_args(who=who, counts=COUNTS, bits=16), Where(rank=0, ranks=1)).outcome
    assert found is not None
    return found()


@pytest.mark.parametrize("kind", ["bf16", "codes"])
def test_what_races_is_right_and_another_layer_is_not(kind: str) -> None:
    judge = layer_judge(BOUNDS[kind])
    for who, role, _, bits in RACERS[kind]:
        args = CASE.as_args(who=who, counts=COUNTS, bits=bits)
        contestant = Contestant(name=who, role="peer", build="", args=args)
        if role == "ours" or who.startswith("transformers"):
            assert judge(contestant, [outcome(who)]) is None, who
    right = outcome("trimtab, plain")
    for tokens in COUNTS:
        mode, (x_TD, ids_TK, w_TK) = mode_of(tokens), Drawn(CASE).calls(tokens, torch.int64)[0]
        assert (len(x_TD), ids_TK.shape) == (tokens, w_TK.shape)
        for wrong in (right[mode] * (1 + 4 * BOUNDS[kind]), right[mode].flip(1), right[mode] * float("nan")):
            assert f"{mode} is off by" in (judge(contestant, [right | {mode: wrong}]) or ""), tokens


def test_wrong_numbers_do_not_race() -> None:
    """Those of a layer whose tokens go to other experts."""
    of = [replace(CASE, num_experts=experts).as_args(who="trimtab, nf4", counts=[1], bits=4) for experts in (16, 8)]
    field = [Contestant(name=str(i), role="ours", build="benchmarks.frozen:build", args=of[i]) for i in (0, 1)]
    pace, judge = Pace(turns=1, seconds=1), layer_judge(BOUNDS["codes"])
    right, wrong = race(field, ["1 token"], malloc="default", pace=pace, judge=judge)
    assert (right.failed, set(right.seconds), wrong.seconds) == (None, {"1 token"}, {})
    assert (wrong.failed or "").startswith("wrong numbers, not raced: 1 token is off by")


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
def test_pieces_make_one_page(tmp_path: Path) -> None:
    page, pieces = tmp_path / "frozen.md", ["--json", str(tmp_path / "found"), "--out", str(tmp_path / "frozen.md")]
    sizes, kept = ["--shape", "128,128,16,2", "--tokens", "1", "3"], "## On another processor\n\n### a case\n"
    page.write_text(f"# What it was called\n\n## of a page without processors\n\n{kept}")
    for kind in ("bf16", "codes", "step"):
        assert main(["frozen", "--of", kind, "--tiny", *sizes, *QUICK, *pieces]) == 0
    assert main(["frozen", "--merge", str(tmp_path / "found"), "--out", str(page)]) == 0
    text = page.read_text()
    assert [text.count(each) for each in (kept, "## On ", "without processors", "adapters, 8 tokens")] == [1, 2, 0, 1]
    assert all(f"{row} |" in text for row in ("nf4, x plain", "| trimtab, fp8", "trimtab, plain, x packed"))
    records = [read_record(file) for file in (tmp_path / "found").glob("*.json")]
    for entry in [entry for record in records for entry in record.races[0].entries if entry.role == "peer"]:
        assert entry.failed is None or entry.failed.startswith(ABSENT), entry
    layers = next(record for record in records if record.case["dtype"] == "bf16")
    assert frozen_table(layers)[0] == ["contestant", "1 token", "3 tokens"]
