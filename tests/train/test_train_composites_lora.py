"""Adapters of a composite model's text part act on the whole model; those that peft would not find are refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.composites import ALL, FAMILIES, RENAMED, load_whole, save_composite, train_composite
from trimtab.cli.main import main
from trimtab.errors import ConfigError

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.xdist_group("train_composites_lora")


@pytest.mark.parametrize("family", [family for family in FAMILIES if RENAMED.get(family) != ALL])
def test_adapters_over_codes_act_on_the_whole_model(family: str, text: Path, tmp_path: Path) -> None:
    """By peft over transformers' whole model, as merged/ and as `trimtab convert --merge` writes it."""
    base, out = save_composite(family, tmp_path / "base"), tmp_path / "run"
    targets = "attention" if family in RENAMED else ALL
    train_composite(base, text, out, lora=2, lora_targets=targets, quantize="nf4", merge=True, optim=None, lr=0.01)
    ids, whole = torch.arange(100, 112)[None], load_whole(base).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # peft's, of keys that are missing
        before = whole(input_ids=ids).logits
        adapted = peft.PeftModel.from_pretrained(whole, out / "final").eval()
        found, wanted = (model(input_ids=ids).logits for model in (adapted, load_whole(out / "merged").eval()))
    assert (before - wanted).abs().max() > 0.05
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
    inside = {id(p) for p in whole.get_decoder().parameters()}
    assert all(id(p) in inside for name, p in adapted.named_parameters() if ".lora_" in name)
    command = ["convert", base, tmp_path / "converted", "--to", "safetensors", "--merge", out / "final"]
    assert main([str(each) for each in command]) == 0
    ours, theirs, old = (load_file(f / "model.safetensors") for f in (tmp_path / "converted", out / "merged", base))
    assert ours.keys() == theirs.keys() == old.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    assert json.loads((out / "final/adapter_config.json").read_text())["base_model_name_or_path"] == str(base)


@pytest.mark.parametrize(("family", "targets"), RENAMED.items())
def test_adapters_that_peft_would_not_find_are_refused(family: str, targets: str, text: Path, tmp_path: Path) -> None:
    base = save_composite(family, tmp_path / "base")
    with pytest.raises(ConfigError, match=r"--lora: of adapters of \w+ peft renames those of model\.language_model\."):
        train_composite(base, text, tmp_path / "run", lora=2, lora_targets=targets)
    assert not (tmp_path / "run").exists()
