"""From raw times to the pages: medians, limits, ratios, tables; files that come back as they went."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import campaign
from benchmarks.campaign import Campaign
from benchmarks.page import campaign_page
from benchmarks.result import Entry, Race, Record, middle_half
from benchmarks.table import contestants_table
from benchmarks.task import read_record, write, write_record
from helpers.fakes import BOTH, record
from trimtab.errors import ConfigError, InputError

WRONG = "wrong numbers, not raced: y is off by 0.25"


def broken(one: Record, name: str, *mallocs: str, why: str = WRONG) -> Record:
    """The record, where a contestant failed under these settings of malloc."""

    def failed(e: Entry, r: Race) -> Entry:
        return dataclasses.replace(e, seconds={}, failed=why) if e.name == name and r.malloc in mallocs else e

    races = [dataclasses.replace(r, entries=[failed(e, r) for e in r.entries]) for r in one.races]
    return dataclasses.replace(one, races=races)


def row_of(page: str, start: str) -> list[str]:
    (row,) = [line for line in page.splitlines() if line.startswith(start)]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_limits_and_ratios_of_known_medians() -> None:
    one = record().races[0]
    ours = one.entries[0]
    assert one.median(ours, BOTH) == 0.5
    assert one.bandwidth() == 200.0
    limit = one.limit("balanced", BOTH)
    assert limit is not None
    assert (limit.seconds, limit.what) == (0.4, "dense fp32"), "40 bytes take 0.2 s: the faster dense GEMM is longer"
    slow = dataclasses.replace(one, fewest_bytes={"balanced": {BOTH: 100}}).limit("balanced", BOTH)
    assert slow is not None
    assert slow.seconds == 0.5, "the fewest bytes take longer than any GEMM"
    assert one.speed_up(ours, BOTH) == 3.0
    assert one.over_limit(ours, BOTH) == 1.25
    assert one.limit("balanced", "forward") is None, "nobody was timed there"
    assert middle_half([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)
    assert middle_half([7.0]) == (7.0, 7.0)


def test_ratios_are_taken_turn_by_turn() -> None:
    """On a machine that is now fast, now slow the medians of two contestants may come from different times."""
    own = Entry(name="trimtab auto", role="ours", seconds={BOTH: [[1.0], [1.0], [2.0]]})
    peer = Entry(name="grouped_mm", role="peer", seconds={BOTH: [[3.0], [7.0], [6.0, 6.0, 99.0]]})
    copy = Entry(name="copy", role="bandwidth", facts={"bytes": 100}, seconds={"copy": [[0.5], [0.5], [1.0]]})
    dense = Entry(name="dense", role="limit", seconds={BOTH: [[0.5], [0.25], [1.0]]})
    slower = Entry(name="eager", role="peer", seconds={BOTH: [[4.0], [4.0], [8.0]]})
    one = Race(malloc="default", entries=[own, peer, copy, dense, slower], fewest_bytes={"": {BOTH: 40}})
    assert one.times(peer, BOTH, own) == 3.0, "of 3, 7 and 3"
    assert one.speed_up(own, BOTH) == 3.0
    assert one.over_limit(own, BOTH) == 2.0, "of 2, 4 and 2; the copy of 40 bytes is the shorter limit"
    moved = dataclasses.replace(one, fewest_bytes={"": {BOTH: 200}})
    assert moved.over_limit(own, BOTH) == 1.0, "of 200 bytes at 200 a second, then 100"


def test_a_peer_or_a_limit_that_failed_makes_no_ratio_better() -> None:
    """eager is nine times slower than grouped_mm: without grouped_mm the speed-up would be nine times larger."""
    for name in ("grouped_mm", "eager"):
        one = broken(record(), name, "default").races[0]
        assert one.speed_up(one.entries[0], BOTH) is None
    absent = broken(record(), "eager", "default", why="cannot be imported here: No module").races[0]
    assert absent.speed_up(absent.entries[0], BOTH) == 3.0, "who is not installed takes no part"
    for name in ("dense fp32", "copy"):
        one = broken(record(), name, "default").races[0]
        assert one.over_limit(one.entries[0], BOTH) is None


def test_the_page_has_every_number() -> None:
    busy = record(tokens=8192)
    busy.settings["others"] = 0.25
    text = campaign_page([record(), busy])
    assert row_of(text, "| A, bf16, 2048 tokens, 1 thread | forward+")[2:] == [
        "auto", "500 ms", "550 ms", "grouped_mm", "1500 ms", "1200 ms", "3.00", "2.18", "**2.18**",
        "400 ms, dense fp32", "1.25", "1.22", "**1.25**",
    ]  # fmt: skip
    assert "2 cores of a processor (AVX512, without bf16 instructions)" in text
    assert "Revision: `0123456789ab`." in text
    assert "**In 1 of 2 cases other programs took more than 5% of the cores' time, up to 25%.**" in text
    assert "| batched_mm | cannot be imported here: No module | 2: A, bf16" in text
    assert "| A, bf16, 2048 tokens, 1 thread | trimtab auto | 0.0 MB |" in text
    assert "```sh\npython -m benchmarks layer\n```" in text


def test_pages_and_tables_say_who_failed() -> None:
    bad, peer = broken(record(), "trimtab auto", "tuned"), broken(record(), "grouped_mm", "tuned")
    header, rows = contestants_table(bad)
    at = header.index("speed-up")
    assert next(row for row in rows if row[1] == "trimtab auto")[at] == "failed", "not the half of it that went well"
    assert rows[-2][1:4] == ["trimtab auto", "", f"failed: {WRONG}"]
    start = "| A, bf16, 2048 tokens, 1 thread | forward+"
    assert row_of(campaign_page([bad]), start)[-1] == "**failed**"
    assert row_of(campaign_page([peer]), start)[8:11] == ["3.00", "", ""], "half a comparison is not quoted"
    weighed = dataclasses.replace(bad, memory={"trimtab auto": {"failed": "died"}})
    assert "| trimtab auto | died |" in campaign_page([weighed])


def test_files_come_back_as_they_went(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "one.json"
    write_record(record(), path)
    assert read_record(path) == record()
    for text in ("{", "[]", '{"part": "layer"}'):
        path.write_text(text)
        with pytest.raises(InputError, match=r"one\.json: not a file that"):
            read_record(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_record(tmp_path / "absent.json")
    with pytest.raises(InputError, match="cannot be written"):
        write(path / "below", "")


def test_a_campaign_goes_on_where_it_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "revision", lambda: "0123456789ab")
    quick = Campaign(tmp_path, quick=True, only=["layer", "bf16", "ranks-1"])
    left = quick.left()
    assert len(left) > 2
    runs = quick.run(lambda task: record(tokens=len(task.contestants)))
    next(runs)
    runs.close()
    assert len(quick.left()) == len(left) - 1, "the first has its file"
    assert [one.part for one in quick.measured()] == ["layer"]
    monkeypatch.setattr(campaign, "revision", lambda: "another")
    other = Campaign(tmp_path, quick=True, only=["layer", "bf16", "ranks-1"])
    assert list(other.left()) == list(left), "what another revision measured is measured anew"
    assert not other.measured()
    every = Campaign(tmp_path, quick=False).left()
    assert len({file.name for file in every}) == len(every) > 40
    with pytest.raises(ConfigError, match="--only zzz: no case has all these words in its name, such as layer"):
        Campaign(tmp_path, quick=True, only=["zzz"])
