"""Who failed is not left out: a bar with a failure of ours is not met, and others' failures make no ratio better."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from benchmarks.campaign import write_page
from benchmarks.finding import findings
from benchmarks.judged import Judged, judge_bars
from benchmarks.result import Entry, Race, Record
from benchmarks.store import write_records
from benchmarks.table import contestants_table, duration
from helpers.records import BOTH, entry, race, record

WRONG = "wrong numbers, not raced: y is off by 0.25"
SPEED, LIMIT = ">= 2.5x the fastest peer", "<= 1.5x the limit"


def broken(one: Record, name: str, *mallocs: str, why: str = WRONG) -> Record:
    """The record, where a contestant failed under these settings of malloc."""

    def failed(e: Entry, r: Race) -> Entry:
        return dataclasses.replace(e, seconds={}, failed=why) if e.name == name and r.malloc in mallocs else e

    races = [dataclasses.replace(r, entries=[failed(e, r) for e in r.entries]) for r in one.races]
    return dataclasses.replace(one, races=races, settings={"turns": 2, "modes": [BOTH, "copy"]})


def bar(records: list[Record], asked: str) -> Judged:
    return next(b for b in judge_bars(records) if b.asked == asked and b.cases)


def test_a_failure_of_ours_is_the_worst_case() -> None:
    good, large = record(0.4), record(0.4, tokens=8192)
    assert bar([good, large], SPEED).met
    for mallocs in (("default",), ("tuned",), ("default", "tuned")):
        bad = broken(large, "trimtab auto", *mallocs)
        (found,) = findings([bad])
        assert (found.speed_up, found.over_limit) == (0.0, math.inf)
        for asked in (SPEED, LIMIT):
            got = bar([good, bad], asked)
            assert (got.met, got.found, got.cases) == (False, None, 2)
            assert got.at == f"A, bf16, 8192 tokens, 1 thread, {BOTH}"
            assert got.failed == f"trimtab auto: {WRONG}"


def test_a_failure_without_anyone_to_compare_with_counts_as_well() -> None:
    """Nobody was timed at all: which modes there would have been the record still says."""
    bad = record(0.4)
    for name in ("trimtab auto", "grouped_mm", "eager", "dense bf16", "dense fp32", "copy"):
        bad = broken(bad, name, "default", "tuned", why="died: exit code 3")
    assert [(b.met, b.cases) for b in judge_bars([bad]) if b.asked in (SPEED, LIMIT) and b.cases] == [(False, 1)] * 2
    assert bad.in_vain
    assert not record().in_vain


def test_a_peer_that_failed_makes_no_ratio_better() -> None:
    """eager is nine times slower than grouped_mm: without grouped_mm the speed-up would be nine times larger."""
    for name, mallocs in (("grouped_mm", ("default", "tuned")), ("grouped_mm", ("tuned",)), ("eager", ("default",))):
        bad = broken(record(0.9), name, *mallocs)
        (found,) = findings([bad])
        assert found.speed_up is None
        got = bar([record(0.4, tokens=8192), bad], SPEED)
        assert (got.met, got.failed, got.cases) == (False, f"{name}: {WRONG}", 2)
        assert "2048 tokens" in got.at
        assert bar([bad], LIMIT).found == pytest.approx(2.25), "the limit was measured all the same"
    absent = broken(record(0.4), "eager", "default", "tuned", why="cannot be imported here: No module")
    assert bar([absent], SPEED).met, "who is not installed takes no part"


def test_a_limit_that_failed_makes_no_ratio_better() -> None:
    """dense bf16 is four times slower than dense fp32: with it alone the limit would be four times longer."""
    for name in ("dense fp32", "copy"):
        bad = broken(record(0.9), name, "tuned")
        (found,) = findings([bad])
        assert found.over_limit is None
        got = bar([bad], LIMIT)
        assert (got.met, got.failed) == (False, f"{name}: {WRONG}")


def test_a_mean_with_a_failure_is_not_met() -> None:
    entries = [entry("trimtab loop", "ours", 0.5), entry("grouped_mm", "peer", 1.5)]
    good = dataclasses.replace(record(), races=[Race(malloc="default", entries=entries)], memory={})
    asked = ">= 1.4x the fastest peer, geometric mean"
    assert bar([good], asked).found == pytest.approx(3.0)
    got = bar([good, broken(good, "trimtab loop", "default")], asked)
    assert (got.met, got.failed) == (False, f"trimtab loop: {WRONG}")


def test_a_mean_is_over_all_cases_alike_or_not() -> None:
    cases = []
    for tokens, threads, ours, limit in ((2048, 1, 0.5, 0.3), (2048, 2, 0.5, 0.3), (8192, 1, 0.25, 0.15)):
        entries = [entry("trimtab loop", "ours", ours), entry("grouped_mm", "peer", 1.5), entry("gemm", "limit", limit)]
        one = record(tokens=tokens, threads=threads)
        cases.append(dataclasses.replace(one, races=[Race(malloc="default", entries=entries)], memory={}))
    got = bar(cases, ">= 1.4x the fastest peer, geometric mean")
    assert (got.found, got.limit) == (pytest.approx((3 * 3 * 6) ** (1 / 3)), pytest.approx((5 * 5 * 10) ** (1 / 3)))
    assert (got.at, got.cases, got.met) == ("", 3, True)


def test_one_transport_that_fails_fails_the_case() -> None:
    entries = [entry(f"trimtab {name}", "ours", s) for name, s in (("alltoall", 0.4), ("shared_memory", 0.2))]
    races = [Race(malloc="default", entries=[*entries, entry("raw", "limit", 0.3)])]
    case = {"shape": [512, 256, 64, 8], "dtype": "bf16", "tokens": 8192, "ranks": 2, "workload": "balanced"}
    good = dataclasses.replace(record(), part="exchange", case=case, races=races, memory={})
    assert bar([good], "<= 1.25x the limit").found == pytest.approx(0.2 / 0.3), "the fastest stands for trimtab"
    got = bar([broken(good, "trimtab alltoall", "default")], "<= 1.25x the limit")
    assert (got.met, got.failed) == (False, f"trimtab alltoall: {WRONG}")


@pytest.mark.parametrize("group", ["balanced", "hot"])
def test_imbalance_with_a_failure_is_not_met(group: str) -> None:
    entries = [entry(f"trimtab auto @{g}", "ours", 1.0, group=g) for g in ("balanced", "hot")]
    even = dataclasses.replace(record(), races=[Race(malloc="default", entries=entries)], memory={})
    assert judge_bars([even])[-3].met
    got = judge_bars([broken(even, f"trimtab auto @{group}", "default")])[-3]
    assert (got.met, got.failed, got.cases) == (False, f"trimtab auto: {WRONG}", 1)


@pytest.mark.parametrize("who", ["trimtab auto", "grouped_mm"])
def test_memory_with_a_failure_is_not_met(who: str) -> None:
    good = record()
    bad = dataclasses.replace(good, memory=good.memory | {who: {"failed": "died"}})
    assert judge_bars([good])[-1].met
    for got in judge_bars([good, bad])[-2:]:
        assert (got.met, got.failed, got.cases) == (False, f"{who}: died", 2)


@pytest.mark.usefixtures("as_of_now")
def test_pages_and_tables_say_who_failed(tmp_path: Path) -> None:
    bad, peer = broken(record(0.4), "trimtab auto", "tuned"), broken(record(0.4), "grouped_mm", "tuned")
    weighed = dataclasses.replace(bad, memory=bad.memory | {"trimtab auto": {"failed": "died"}})
    rows = {row[1]: row for row in contestants_table(bad)[1] if row[0] == BOTH}
    assert rows["trimtab auto"][3:6] == ["", "failed", "failed"], "not the half of it that went well"
    assert {row[1]: row for row in contestants_table(peer)[1] if row[0] == BOTH}["trimtab auto"][4] == ""
    assert duration(math.inf) == "failed"
    out = tmp_path / "x.md"
    write_records([weighed, dataclasses.replace(peer, case=peer.case | {"tokens": 8192})], tmp_path / "one.json")
    assert write_page([tmp_path / "one.json"], out, tmp_path / "x.png")
    text = out.read_text()
    assert f"| **failed**: trimtab auto: {WRONG} |  | 2 | A, bf16, 2048 tokens, 1 thread, {BOTH} | **no** |" in text
    assert "| failed | grouped_mm | 1500 ms | 1200 ms | 3.75 | 0.00 | **failed** |" in text
    assert "| grouped_mm | 1500 ms |  | 3.75 |  | **failed** |" in text
    assert "| **failed**: died |" in text


def test_a_whole_race_is_not_needed_to_see_a_failure() -> None:
    """One setting of malloc, where ours failed and everybody else was timed."""
    bad = broken(dataclasses.replace(record(), races=[race("default", 0.4, 1.5, 0.4)]), "trimtab auto", "default")
    assert not bar([bad], SPEED).met
