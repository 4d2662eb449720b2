"""What a conversion and a merge hold in memory: less than a layer's experts and a little, whatever the model holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

from helpers.convert_case import assert_same, build, tensors_of
from helpers.memory import MB, peak_of
from helpers.peft_case import fill
from helpers.ranks import run_ranks
from trimtab.convert.convert import convert
from trimtab.convert.merge import merge

E, D, F, LAYERS = 16, 512, 1024, 4
LAYER = 3 * E * D * F * 4
STACKS = ["experts.gate_up_proj", "experts.down_proj"]


def make(folder: Path) -> None:
    """A model of 384 MiB of experts and an adapter of it, and a small one."""
    build("qwen3_moe").save_pretrained(folder / "small")
    model = build("qwen3_moe", experts=E, hidden_size=D, moe_intermediate_size=F, num_hidden_layers=LAYERS)
    model.save_pretrained(folder / "base")
    made = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], target_parameters=STACKS))
    fill(made)
    made.save_pretrained(folder / "adapter")
    made.merge_and_unload().save_pretrained(folder / "merged")


def peaks(folder: Path) -> dict[str, int]:
    torch.set_num_threads(1)
    held = {}
    for base in ("small", "base"):  # the first loads the code
        at = folder / f"of-{base}"
        for layout in ("transformers", "qwen3_moe"):
            there, back = at / layout, at / f"{layout}-back"
            held[f"{layout} to dcp"] = peak_of(lambda: convert(folder / base, there, to="dcp", layout=layout))  # noqa: B023
            held[f"{layout} to safetensors"] = peak_of(lambda: convert(there, back, to="safetensors"))  # noqa: B023
    for source in (folder / "base", folder / "of-base" / "transformers"):
        into = folder / f"merged-{source.name}"
        held[f"merge of {source.name}"] = peak_of(lambda: merge(source, folder / "adapter", into))  # noqa: B023
    return held


@pytest.mark.usefixtures("one_thread")
def test_a_conversion_and_a_merge_hold_less_than_a_layers_experts_and_a_little(tmp_path: Path) -> None:
    run_ranks(make, 1, tmp_path, deadline=120)
    (held,) = run_ranks(peaks, 1, tmp_path, deadline=300)
    assert len(held) == 6
    assert max(held.values()) < LAYER + 64 * MB < LAYERS * LAYER / 2, held
    original, merged = tensors_of(tmp_path / "base"), tensors_of(tmp_path / "merged")
    for layout in ("transformers", "qwen3_moe"):
        assert_same(original, tensors_of(tmp_path / "of-base" / f"{layout}-back"))
    for source in ("base", "transformers"):
        assert_same(merged, tensors_of(tmp_path / f"merged-{source}"))
