"""Each part from end to end on a tiny case. Contestants are forked; of another checkout they are started, as ever."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import contestant
from benchmarks.__main__ import main
from helpers.forked_race import PROCESSES

QUICK = ["--turns", "1", "--seconds", "0.01", "--malloc", "default"]
TINY = ["--shape", "32,16,4,2", "--tokens", "16", *QUICK]
MODES = {"forward", "forward+backward"}


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestant, "subprocess", PROCESSES)


def bench(tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """(exit code, the record)."""
    code = main([*options, "--json", str(tmp_path / "found")])
    (path,) = (tmp_path / "found").iterdir()
    return code, json.loads(path.read_text())


def timed(record: dict[str, Any]) -> dict[str, set[str]]:
    """Contestant -> modes with at least one positive time."""
    entries = record["races"][0]["entries"]
    return {e["name"]: {m for m, turns in e["seconds"].items() if turns[0][0] > 0} for e in entries}


ALONE = ["--shape", "64,32,4,2", "--tokens", "16", "--dtype", "fp32", *QUICK]
PARTS: list[tuple[str, list[str], tuple[str, ...], set[str], str]] = [
    ("exchange", [*TINY, "--transports", "alltoall", "--workloads", "source_ragged", "--peers", "all_to_all"],
     ("trimtab alltoall", "all_to_all", "raw all-to-all + copy"), MODES, ""),
    ("step", [*QUICK, "--tiny", "--threads", "1"], ("transformers, grouped_mm", "trimtab"),
     {"step", "forward", "backward", "optimizer"}, "| backward | trimtab |"),
    ("replay", ALONE, ("trimtab",), {"turns", "alone", "recorded", "recorded, counted", "told"}, "| x alone |"),
    ("quantized", ["--shape", "64,64,4,2", "--tokens", "16", *QUICK],
     ("bf16 weights", "nf4", "int8", "fp8", "mxfp4"), MODES, ""),
    ("overhead", QUICK, ("transformers, grouped_mm", "trimtab in transformers", "trimtab's MoE"),
     {*MODES, "no_grad"}, ""),
]  # fmt: skip
"""A part, its options, whom it times in what, and what its page says."""


@pytest.mark.parametrize(("part", "options", "names", "modes", "says"), PARTS, ids=[part for part, *_ in PARTS])
def test_parts(
    part: str, options: list[str], names: tuple[str, ...], modes: set[str], says: str, tmp_path: Path
) -> None:
    page = ["--out", str(tmp_path / "page.md")] if part != "exchange" else []
    code, found = bench(tmp_path, part, *options, *page)
    assert code == 0
    assert {name: what for name, what in timed(found).items() if name != "copy"} == dict.fromkeys(names, modes)
    assert not page or says in (tmp_path / "page.md").read_text()


def test_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*TINY, "--dtype", "fp32", "--workloads", "hot", "--peers", "grouped_mm", "--memory"]
    code, found = bench(tmp_path, "layer", *options)
    assert code == 0
    assert timed(found) == {**dict.fromkeys(("trimtab auto", "grouped_mm", "dense fp32"), MODES), "copy": {"copy"}}
    assert found["races"][0]["fewest_bytes"]["hot"]["forward"] > 0
    assert found["memory"]["trimtab auto"]["tensors"] > 0
    assert found["command"] == " ".join(["python -m benchmarks layer", *options]), "without the machine's paths"
    assert "x limit" in capsys.readouterr().out


def test_a_layer_of_another_checkout_over_ranks(tmp_path: Path) -> None:
    options = [*TINY, "--dtype", "fp32", "--ranks", "2", "--transports", "alltoall"]
    code, found = bench(tmp_path, "layer", *options, "--against", str(Path(__file__).parents[2] / "src"))
    assert code == 0
    names = {name for name, modes in timed(found).items() if modes == MODES}
    assert names >= {"trimtab auto alltoall", "before alltoall"}


def test_imbalance(tmp_path: Path) -> None:
    page = tmp_path / "imbalance.md"
    code, found = bench(tmp_path, "imbalance", *TINY, "--workloads", "hot_rank", "balanced", "--transports",
                        "shared_memory", "--replicate-experts", "auto", "0",
                        "--copy-cost", "1", "--out", str(page))  # fmt: skip
    names = ("plain shared_memory", "replicated auto shared_memory", "replicated 0.0 shared_memory", "all_to_all")
    assert code == 0
    assert timed(found) == {name: {"hot_rank", "balanced"} for name in names}
    rows = [line for line in page.read_text().splitlines() if line.startswith(("| hot_rank", "| balanced"))]
    assert [row.split("|")[3:7] for row in rows] == [
        [" auto ", " 64 0 ", " 32 32 ", " 1 "], [" 0.0 ", " 64 0 ", " 32 32 ", " 1 "],
        [" auto ", " 32 32 ", " 32 32 ", " 0 "], [" 0.0 ", " 32 32 ", " 32 32 ", " 0 "],
    ]  # fmt: skip


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
def test_adapters(tmp_path: Path) -> None:
    page = tmp_path / "adapters.md"
    code, found = bench(tmp_path, "adapters", *ALONE, "--out", str(page))
    names = ("peft over grouped_mm", "trimtab, frozen experts", "trimtab under peft")
    assert code == 0
    assert timed(found) == {name: {"forward+backward"} for name in names}
    held = [found["memory"][name]["gradients"] for name in names]
    assert held[0] == held[2] > held[1], "of adapters"
    assert "trimtab under peft" in page.read_text()


def test_optimizer(tmp_path: Path) -> None:
    page = tmp_path / "optimizer.md"
    sizes = ["--adamw", "2,32,64", "--newton-schulz", "2,32,64"]
    assert main(["optimizer", *sizes, *QUICK, "--out", str(page)]) == 0
    assert all(name in page.read_text() for name in ("AdamW, fused", "rule adamw", "trimtab, plain", "trimtab, gram"))


@pytest.mark.megatron_full
def test_megatron(tmp_path: Path) -> None:
    if find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    places = ["--dtype", "fp32", "--out", str(tmp_path / "megatron.md")]
    code, found = bench(tmp_path, "megatron", *TINY, *places)
    assert code == 0
    assert len(timed(found)) == 5
    assert all(modes == MODES for modes in timed(found).values())
    assert "# A layer of Megatron-Core" in (tmp_path / "megatron.md").read_text()


def test_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, results = tmp_path / "layers.md", tmp_path / "results"
    common = ["all", "--quick", "--only", "exchange", *QUICK, "--out", str(out), "--results", str(results)]
    assert main(common) == 0
    assert "## Dispatch and combine" in out.read_text()
    capsys.readouterr()
    assert main([*common, "--list"]) == 0
    assert capsys.readouterr().out.strip() == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("layer --peers all_to_all", "peer 'all_to_all' does not race on 1 rank(s)"),
        ("layer --ranks 3", "64 experts do not divide over 3 ranks"),
        ("layer --turns 0", "--turns must be at least 1"),
        ("layer --seconds nan", "--seconds and --patience more than 0, and numbers"),
        ("layer --threads 100000", "--threads 100000: this process has "),
        ("exchange --ranks 1", "at least 2 ranks"),
        ("exchange --peers eager", "peer 'eager' has no exchange to race"),
        ("all --only zzz --list", "--only zzz: no case has all these words in its name"),
    ],
)
def test_what_cannot_be_raced_is_refused(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, so it would run in full")
def test_without_a_device_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu"]) == 2
    assert "nothing was measured" in capsys.readouterr().err
