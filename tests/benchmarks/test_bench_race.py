"""The race: known durations give known ratios, and every way to fail becomes a row with its reason."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.child import cores_of
from benchmarks.contestant import MALLOC, Contestant, ContestantFailed, Team
from benchmarks.race import Pace, race, slowest, steps_of, weigh
from benchmarks.result import Race
from trimtab.errors import ConfigError


def fake(name: str, build: str, role: Any = "ours", ranks: int = 1, **args: Any) -> Contestant:
    return Contestant(name=name, role=role, build=f"helpers.fakes:{build}", args=args, ranks=ranks)


def judge(contestant: Contestant, outcomes: list[dict[str, Tensor]]) -> str | None:
    off = float(outcomes[0]["y"][0]) - 1.0
    return None if off == 0 else f"y is off by {off}"


def test_known_durations_give_known_ratios() -> None:
    contestants = [
        fake("fast", "sleeper", modes={"forward": 0.02, "forward+backward": 0.05}),
        fake("slow", "sleeper", "peer", modes={"forward": 0.06}),
        fake("slower", "sleeper", "peer", modes={"forward": 0.2}),
        fake("floor", "sleeper", "limit", modes={"forward": 0.01}),
        fake("copy", "sleeper", "bandwidth", modes={"copy": 0.01}, bytes=1000),
    ]
    modes = ("forward", "forward+backward", "copy")
    entries = race(contestants, modes, malloc="tuned", pace=Pace(turns=3, seconds=2.0, patience=60))
    assert [(e.name, e.role, e.failed) for e in entries] == [(c.name, c.role, None) for c in contestants]
    fast, slow, slower, _, copy = entries
    # A round takes 0.45 s: 0.02 + 0.06 + 0.2 + 3 * 0.01, 0.05, 3 * 0.01, and 0.01 between.
    assert [len(turn) for turn in fast.seconds["forward"]] == [1, 1, 1, 1], "more turns than 3: there is time"
    assert [len(turn) for turn in slower.seconds["forward"]] == [1, 1, 1, 1]
    assert [len(turn) for turn in copy.seconds["copy"]] == [3, 3, 3, 3], "a turn takes 0.03 s at least"
    assert fast.steps("forward") == pytest.approx([0.02] * 4)
    assert set(slow.seconds) == {"forward"}, "modes that it has"
    assert fast.facts["malloc"] == MALLOC["tuned"]["MALLOC_TRIM_THRESHOLD_"]
    found = Race(malloc="tuned", entries=entries, fewest_bytes={"": {"forward+backward": 4000}})
    assert found.fastest("peer", "", "forward") == ("slow", pytest.approx(0.06))
    assert found.speed_up(fast, "forward") == pytest.approx(3)
    assert found.over_limit(fast, "forward") == pytest.approx(2)
    assert found.bandwidth() == pytest.approx(1000 / 0.01)
    assert found.median(copy, "copy") == pytest.approx(0.01)
    assert found.over_limit(fast, "forward+backward") == pytest.approx(0.05 / 0.04)
    assert found.speed_up(fast, "forward+backward") is None, "no peer has that mode"


def test_a_race_lasts_as_long_as_asked_and_has_the_turns_asked_for() -> None:
    pace = Pace(turns=3, seconds=10.0)
    assert pace.turns_of([0.09] * 10) == 10
    assert pace.turns_of([5.0, 5.0]) == 3
    assert pace.turns_of([]) == pace.turns_of([1e-6]) == 60
    assert (steps_of(0.5), steps_of(0.014), steps_of(1e-9)) == (1, 2, 1000)


def test_a_failure_is_a_row_with_its_reason() -> None:
    contestants = [
        fake("good", "answers", value=1.0), fake("absent", "not_installed", "peer"),
        fake("nowhere", "no_such_function", "peer"), fake("raises", "raises", "peer"), fake("dies", "dies", "peer"),
        fake("wrong", "answers", "peer", value=1.25),
    ]  # fmt: skip
    said: list[str] = []
    pace = Pace(turns=1, seconds=0.01, patience=120)
    entries = race(contestants, ["forward"], malloc="default", pace=pace, judge=judge, say=said.append)
    by_name = {e.name: e for e in entries}
    assert by_name["good"].failed is None
    assert len(by_name["good"].steps("forward")) >= 1
    expected = {
        "absent": "cannot be imported here: No module named 'a_package_that_nobody_has'",
        "nowhere": "AttributeError: module 'helpers.fakes' has no attribute 'no_such_function'",
        "raises": "ValueError: bad shapes",
        "dies": "died: exit code 3, out of luck",
        "wrong": "wrong numbers, not raced: y is off by 0.25",
    }
    assert {name: e.failed for name, e in by_name.items() if name != "good"} == expected
    assert all(not by_name[name].seconds for name in expected)
    assert sorted(said) == sorted(f"{name}: {reason}" for name, reason in expected.items())


def test_a_contestant_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone: what others take to start on this machine says nothing here."""
    ask, patiences = Team.ask, set()

    def asked(team: Team, command: tuple[Any, ...], patience: float) -> list[Any]:
        patiences.add(patience)
        return ask(team, command, 1.0 if team.contestant.name == "hangs" else patience)

    monkeypatch.setattr(Team, "ask", asked)
    contestants = [fake("hangs", "hangs", "peer"), fake("good", "sleeper", modes={"forward": 0.01})]
    entries = race(contestants, ["forward"], malloc="default", pace=Pace(turns=1, seconds=0.01, patience=120))
    assert entries[0].failed == "no answer within 1 s"
    assert entries[1].failed is None
    assert patiences == {120}


def test_the_slowest_rank_counts_and_one_rank_fails_for_all() -> None:
    team = Team(fake("uneven", "sleeper", ranks=2, modes={"forward": 0.05}, fails_on_rank=1), "default")
    try:
        assert [facts["bytes"] for facts in team.answers(120)] == [0, 0]
        by_rank = team.ask(("time", "forward", 2), 60)
        assert [rank["forward"] for rank in by_rank] == [pytest.approx([0.05, 0.05]), pytest.approx([0.1, 0.1])]
        with pytest.raises(ContestantFailed, match="ValueError: only this rank"):
            team.ask(("time", "fails", 1), 60)
    finally:
        team.kill()
    assert slowest([{"a": [1.0, 5.0]}, {"a": [2.0, 3.0]}]) == {"a": [2.0, 5.0]}


def test_all_contestants_run_on_the_same_cores() -> None:
    one, two, four = (Contestant(name="", role="ours", build="", threads=n) for n in (1, 2, 4))
    assert [cores_of(one, rank, [3, 5]) for rank in range(3)] == [{3}, {5}, {3}]
    assert [cores_of(two, rank, [0, 1, 2, 3]) for rank in range(3)] == [{0, 1}, {2, 3}, {0, 1}]
    assert cores_of(four, 1, [0, 1]) == {0, 1}
    here = sorted(os.sched_getaffinity(0))
    team = Team(fake("stays", "stays", ranks=2), "default")
    try:
        team.answers(120)
        saved = team.ask(("outcome",), 60)
    finally:
        team.kill()
    cores = [torch.load(io.BytesIO(one), weights_only=True)["cores"].tolist() for one in saved]
    assert cores == [[here[0]], [here[1 % len(here)]]]


def test_the_step_that_was_judged_is_a_warm_up() -> None:
    """The judged one and one more."""
    contestants, pace = [fake("one", "counts")], Pace(turns=1, seconds=0.01)
    (entry,) = race(contestants, ["forward"], malloc="default", pace=pace, judge=judge)
    assert entry.failed is None
    assert entry.steps("forward") == [2.0]


def test_steps_may_time_their_parts() -> None:
    (entry,) = race([fake("one", "parts")], ["step"], malloc="default", pace=Pace(turns=2, seconds=0.01))
    assert set(entry.seconds) == {"step", "first", "second"}
    assert set(entry.steps("first")) == {0.25}
    assert entry.facts["peak"] > 0


def test_a_contestant_has_an_environment_and_a_source_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.py").write_text("")
    c = replace(fake("one", "elsewhere"), env={"SET_FOR_ONE": "yes"}, source=str(tmp_path))
    (entry,) = race([c], ["forward"], malloc="default", pace=Pace(turns=1, seconds=0.01))
    assert (entry.facts["found"], entry.facts["said"]) == (str(tmp_path / "elsewhere.py"), "yes")


def test_memory_sees_pages_and_tensors() -> None:
    size = 2**24
    contestants = [fake("big", "allocates", bytes=size), fake("bad", "raises"), fake("absent", "not_installed")]
    found = weigh(contestants, "forward+backward", patience=60, say=print)
    assert found["absent"]["failed"].startswith("cannot be imported here")
    assert found["big"]["tensors"] == size
    assert found["big"]["gradients"] == 7
    assert 2 * size <= found["big"]["resident"] < 3 * size
    assert "KeyError" in found["bad"]["failed"], "it has no such mode"


def test_a_pace_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="--turns must be at least 1"):
        Pace(turns=0)
