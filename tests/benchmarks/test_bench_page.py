"""From raw times to the page: medians, limits, bars, tables; files that come back as they went."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import chart
from benchmarks.campaign import Campaign, write_page
from benchmarks.finding import findings
from benchmarks.judged import judge_bars
from benchmarks.result import Entry, Race, middle_half
from benchmarks.store import read_records, write_records
from benchmarks.table import as_markdown, as_text, contestants_table, duration, memory_table, title
from helpers.records import BOTH, MACHINE, NOW, entry, record
from trimtab.errors import InputError


def test_limits_and_ratios_of_known_medians() -> None:
    one = record().races[0]
    ours = one.entries[0]
    assert one.median(ours, BOTH) == 0.5
    assert one.bandwidth() == 200.0
    limit = one.limit("balanced", BOTH)
    assert (limit.seconds, limit.what) == (0.4, "dense fp32"), "40 bytes take 0.2 s: the faster dense GEMM is longer"
    slow = dataclasses.replace(one, fewest_bytes={"balanced": {BOTH: 100}})
    assert slow.limit("balanced", BOTH).seconds == 0.5, "the fewest bytes take longer than any GEMM"
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


def test_the_less_favourable_malloc_is_quoted() -> None:
    (found,) = findings([record()])
    assert found.peer_name == "grouped_mm"
    assert found.speed_ups == pytest.approx({"default": 3.0, "tuned": 1.2 / 0.55})
    assert found.speed_up == pytest.approx(1.2 / 0.55)
    assert found.over_limits == pytest.approx({"default": 1.25, "tuned": 0.55 / 0.45})
    assert found.over_limit == 1.25


def test_bars_take_the_worst_case() -> None:
    good, bad = record(0.4), record(0.9, tokens=8192)
    met = {(bar.where, bar.asked): bar for bar in judge_bars([good])}
    where = "bf16, forward+backward, 2,048 and 8,192 tokens, A and B"
    assert met[where, ">= 2.5x the fastest peer"].met
    assert met[where, ">= 2.5x the fastest peer"].found == pytest.approx(1.2 / 0.44)
    both = {(bar.where, bar.asked): bar for bar in judge_bars([good, bad])}
    speed, limit = both[where, ">= 2.5x the fastest peer"], both[where, "<= 1.5x the limit"]
    assert (speed.met, limit.met, speed.cases) == (False, False, 2)
    assert limit.found == pytest.approx(0.9 / 0.4)
    assert "8192 tokens" in limit.at
    assert (speed.limit, limit.limit) == (pytest.approx(1.2 / 0.45), None), "of the worse malloc"
    memory, without = judge_bars([good])[-2:]
    assert (memory.found, memory.met) == (0.6, True), "the worse of resident and tensors"
    assert without.found == pytest.approx(50 / 90), "10 bytes of gradients left out on both sides"
    fp32 = next(bar for bar in judge_bars([good]) if bar.where.startswith("fp32, any"))
    assert (fp32.found, fp32.met) == (None, False), "what was not measured is not met"


def test_the_worst_case_over_ranks_names_the_transport() -> None:
    over = record(ranks=2)
    entries = [entry("trimtab auto alltoall", "ours", 0.7), entry("trimtab auto shared_memory", "ours", 0.6)]
    raced = dataclasses.replace(over.races[0], entries=[*entries, *over.races[0].entries[1:]])
    bars = judge_bars([dataclasses.replace(over, races=[raced], memory={})])
    bar = next(bar for bar in bars if bar.where == "2 and 4 ranks, forward+backward, A and B")
    assert bar.found == pytest.approx(1.5 / 0.6)
    assert bar.at.endswith("2 ranks, forward+backward, shared_memory")


def test_imbalance_is_compared_within_a_race() -> None:
    names = {"balanced": 1.0, "zipf": 1.1, "hot": 1.3}
    entries = [entry(f"trimtab auto @{group}", "ours", s, group=group) for group, s in names.items()]
    uneven = dataclasses.replace(
        record(workloads=list(names)), races=[Race(malloc="default", entries=entries)], memory={}
    )  # fmt: skip
    found = judge_bars([uneven])[-3]
    assert found.found == pytest.approx(1.3)
    assert (found.met, found.cases) == (False, 2)
    assert found.at.startswith("hot")


def test_of_many_cases_the_picture_shows_some(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [record(tokens=tokens, in_place=in_place) for tokens in (256, 2048) for in_place in (False, True)]
    found = findings([*cases, record(ranks=2)])
    new_gradients = [found[0], found[2], found[4]]
    for most, shown in ((5, found), (4, new_gradients), (3, new_gradients), (2, new_gradients[:2]), (1, found[:3:2])):
        monkeypatch.setattr(chart, "MOST", most)
        assert chart.chosen(found) == shown
    assert chart.chosen(found[4:] * 2) == found[4:] * 2, "a picture of nothing helps nobody"
    piece = dataclasses.replace(cases[0], part="kernels", case={"shape": [8, 8, 2, 1], "dtype": "bf16"})
    pieces = findings([piece, piece])
    assert chart.chosen(pieces) == pieces, "which have neither ranks nor gradients in place"


@pytest.mark.usefixtures("as_of_now")
def test_the_page_has_every_number(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the chart is an extra")
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    write_records([record()], files[0])
    busy = dataclasses.replace(record(tokens=8192), machine=MACHINE | {"load_average": [9.0, 9.0, 9.0]})
    write_records([busy], files[1])
    write_page(files, tmp_path / "docs" / "benchmarks.md", tmp_path / "docs" / "benchmarks.png")
    text = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert (tmp_path / "docs" / "benchmarks.png").stat().st_size > 1000
    assert "![time over the limit](benchmarks.png)" in text
    row = next(line for line in text.splitlines() if line.startswith("| A, bf16, 2048 tokens, 1 thread | forward+"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2:] == [
        "auto", "500 ms", "550 ms", "grouped_mm", "1500 ms", "1200 ms", "3.00", "2.18", "**2.18**",
        "400 ms, dense fp32", "1.25", "1.22", "**1.25**",
    ]  # fmt: skip
    assert "2 cores of a processor (AVX512, without bf16 instructions)" in text
    assert "**1 of 2 cases began while others were using the cores.**" in text
    assert "| torchtitan | cannot be imported here: No module | 2: A, bf16" in text
    assert "layer on one rank: `grouped_mm`, `eager`. Of transformers' other" in text
    assert f"measured with the sources that this page was written from: 2 (digest `{NOW}` (layer))." in text
    memory = next(
        line for line in text.splitlines() if line.startswith("| A, bf16, 2048 tokens, 1 thread | trimtab auto | 0")
    )
    assert [c.strip() for c in memory.strip("|").split("|")][5:] == ["0.60", "0.40", "0.10, 0.10", "0.56", "0.33"]
    assert "benchmarks-gpu" not in text
    (tmp_path / "docs" / "benchmarks-gpu.md").write_text("measured there")
    assert write_page(files, tmp_path / "docs" / "benchmarks.md")
    assert "[benchmarks-gpu.md](benchmarks-gpu.md)" in (tmp_path / "docs" / "benchmarks.md").read_text()
    assert (tmp_path / "docs" / "benchmarks-gpu.md").read_text() == "measured there"
    assert "```sh\ntrimtab bench layer\n```" in text
    assert "not measured" in text


def test_files_come_back_as_they_went(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "one.json"
    write_records([record()], path)
    assert read_records([path]) == [record()]
    assert [p.name for p in path.parent.iterdir()] == ["one.json"]
    for text, message in (
        ("{", "not a file that"),
        ("[]", "not a file that"),
        (json.dumps({"trimtab_bench": 0, "records": []}), "format 0, expected 1"),
        (json.dumps({"trimtab_bench": 1, "records": [{"part": "layer"}]}), "not a file that"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message) as caught:
            read_records([path])
        assert "one.json" in str(caught.value)
    with pytest.raises(InputError, match="cannot be read"):
        read_records([tmp_path / "absent.json"])


def test_tables() -> None:
    header, rows = contestants_table(record())
    assert header == [
        "mode",
        "contestant",
        "default (middle half)",
        "tuned (middle half)",
        "speed-up",
        "x limit",
        "notes",
    ]
    assert rows[0] == [BOTH, "trimtab auto", "500 ms (500 ms..1000 ms)", "550 ms (550 ms..1100 ms)", "2.18", "1.25", ""]
    assert rows[-1][1] == "torchtitan"
    assert "cannot be imported" in rows[-1][-1]
    assert memory_table(record())[1][0] == ["trimtab auto", "0.0 MB", "0.0 MB", "0.0 MB", ""]
    assert as_markdown(["a", "b"], [["1", "x|y"]]) == "| a | b |\n| --- | --- |\n| 1 | x\\|y |"
    assert as_text(["name", "n"], [["x", "10"], ["yy", "9"]]).splitlines() == [
        "name   n",
        "----  --",
        "x     10",
        "yy     9",
    ]
    assert [duration(s) for s in (1.5, 0.0123456, 0.00099, 4.2e-7)] == ["1500 ms", "12.3 ms", "990 us", "0.42 us"]
    assert title(record()) == "layer  D,F,E,K 512,256,64,8  bf16  2048 tokens  1 thread  1 rank  balanced"


@pytest.mark.usefixtures("as_of_now")
def test_a_campaign_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, quick=True, only=["layer", "fp32", "tokens-256"])
    left = campaign.left()
    assert left
    assert all("fp32" in file.stem and file.parent == tmp_path for file in left)
    runs = campaign.run(lambda task: record(tokens=len(task.contestants)))
    next(runs)
    runs.close()
    assert len(campaign.left()) == len(left) - 1, "the first has its file"
    assert campaign.measured() == [next(iter(left))]
    assert read_records(campaign.measured())[0].part == "layer"
    out = tmp_path / "page.md"
    with pytest.raises(InputError, match="there are no results"):
        write_page([], out)
    assert not out.exists()
    every = Campaign(tmp_path, quick=False).left()
    assert len({file.name for file in every}) == len(every) > 50
