"""`trimtab convert` from the shell: what it prints, what it writes, one line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.convert_case import build, logits
from trimtab.checkpoint import save
from trimtab.cli.main import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run: two checkpoints with optimizer state."""
    model = build("qwen3_moe")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    root = tmp_path_factory.mktemp("run")
    for step in (5, 10):
        model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
        save(root / "checkpoints", model, optimizer, step=step)
    return root


def test_to_safetensors_and_back(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(trained / "checkpoints"), str(tmp_path / "hf"), "--to", "safetensors"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("25 tensors, ")
    assert printed[1] == "2 layers of experts: gate_up_proj [4, 32, 16], down_proj [4, 16, 16]"
    assert printed[2].startswith("left behind: optimizer state, ")
    source, written = printed[3].split(), printed[4].split()
    assert [source[0], written[0]] == ["source", "written"]
    assert source[1].startswith("sha256:")
    assert "every tensor's hash is the source's" in printed[5]
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "dcp"), "--to", "dcp", "--layout", "qwen3_moe"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("layout qwen3_moe")
    assert f"source   {written[1]}, as its record says" in printed
    assert (tmp_path / "dcp" / "step-00000000" / "trimtab.json").is_file()


def test_what_is_opened_is_the_last_step(trained: Path, tmp_path: Path) -> None:
    found = {}
    for step, src in ((10, trained / "checkpoints"), (5, trained / "checkpoints" / "step-00000005")):
        assert (
            main(["convert", str(src), str(tmp_path / str(step)), "--to", "safetensors", "--shard-size", "1e-5"]) == 0
        )
        assert len(list((tmp_path / str(step)).glob("model-*.safetensors"))) > 2
        found[step] = logits(AutoModelForCausalLM.from_pretrained(tmp_path / str(step)))
    assert not torch.equal(found[5], found[10])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{run}", "{new}"], "the following arguments are required: --to"),
        (["{run}", "{new}", "--to", "gguf"], "--to gguf: not one of safetensors, dcp"),
        (["{run}", "{new}", "--to", "dcp"], "holds dcp already"),
        (["{run}", "{run}", "--to", "safetensors"], "not empty"),
        (["{new}", "{new}", "--to", "safetensors"], "no such folder"),
        (["{run}", "{new}", "--to", "safetensors", "--layout", "other"], "--layout other: not one of transformers"),
        (["{run}", "{new}", "--to", "safetensors", "--shard-size", "0"], "--shard-size must be more than 0"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], words: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [a.format(run=trained / "checkpoints", new=tmp_path / "new") for a in arguments]
    try:
        code = main(["convert", *filled])
    except SystemExit as stop:
        code = int(stop.code or 0)
    error = capsys.readouterr().err
    assert code == 2
    assert words in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "new").exists()
