"""Layouts as values: what they say of each family, that a wrong one is refused, and our layer in a model's blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from helpers.convert_case import assert_same, build, logits, state_of, swapped
from helpers.convert_case import run as train_on_ranks
from helpers.ranks import run_ranks
from trimtab.checkpoint import load, read_tensors, save
from trimtab.convert.convert import convert
from trimtab.convert.layouts import LAYOUTS, BlockLayout, Part, blocks_of, prove
from trimtab.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")


def block_of(name: str, **config: Any) -> tuple[nn.Module, Any]:
    model = build(name, **config)
    return next(iter(blocks_of(model, LAYOUTS[name]).values())), model.config


@pytest.mark.parametrize(
    ("name", "config"),
    [
        *((name, {}) for name in LAYOUTS),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("deepseek_v3", {"routed_scaling_factor": 1.7, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
        ("mixtral", {"hidden_act": "gelu"}),
    ],
)
def test_our_layer_computes_what_the_block_does(name: str, config: dict[str, Any]) -> None:
    block, config_of = block_of(name, **config)
    assert prove(LAYOUTS[name], block, config_of) <= 1e-6


def bent(layout: BlockLayout, ours: str, bend: Callable[[Tensor], Tensor]) -> BlockLayout:
    """The layout with one of our tensors made otherwise."""

    class Bent(Part):
        def to_ours(self, prefix: str, dtypes: Any, tensors: Any) -> dict[str, Tensor]:
            made = super().to_ours(prefix, dtypes, tensors)
            return {name: bend(tensor) if self.ours == ours else tensor for name, tensor in made.items()}

    return dataclasses.replace(layout, parts=tuple(Bent(**vars(part)) for part in layout.parts))


def turned(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2)


WRONG: dict[str, tuple[str, Any]] = {
    "down transposed": ("qwen3_moe", lambda x: bent(x, "experts.down", turned)),
    "up transposed": ("mixtral", lambda x: bent(x, "experts.gate_up", turned)),
    "router transposed": ("qwen3_moe", lambda x: bent(x, "router.weight", turned)),
    "shared gate and up swapped": (
        "deepseek_v3", lambda x: bent(x, "shared.up.weight", lambda t: t.roll(t.shape[0] // 2, 0)),
    ),
    "gate and up swapped": ("olmoe", lambda x: bent(x, "experts.gate_up", lambda t: t.flip(1))),
    "normalised after top-k": (
        "deepseek_v3",
        lambda x: dataclasses.replace(
            x, router=lambda c: dataclasses.replace(x.router(c), normalize=not c.norm_topk_prob)
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_layout_fails_its_proof_though_shapes_fit(case: str) -> None:
    name, wrong = WRONG[case]
    block, config = block_of(name, experts=8)
    with pytest.raises(ConfigError, match=r"differ by|size mismatch"):
        prove(wrong(LAYOUTS[name]), block, config)


def test_a_layout_of_another_family() -> None:
    for name, other in (("deepseek_v3", "qwen3_moe"), ("qwen3_moe", "qwen2_moe")):
        with pytest.raises(ConfigError, match="is this a"):
            blocks_of(build(other), LAYOUTS[name])
    for name, other in (("qwen3_moe", "mixtral"), ("olmoe", "qwen3_moe")):  # of the same names, built otherwise
        with pytest.raises(ConfigError, match="is this a"):
            prove(LAYOUTS[name], *block_of(other, experts=8))
    with pytest.raises(ConfigError, match="has no activation"):
        LAYOUTS["mixtral"].config(build("mixtral", hidden_act="relu").config)


def test_jitter_of_the_experts_tokens_is_not_taken_over_in_silence() -> None:
    with pytest.warns(UserWarning, match=r"router_jitter_noise=0\.1: in training the router's tokens alone"):
        assert LAYOUTS["mixtral"].config(build("mixtral", router_jitter_noise=0.1).config).router.jitter == 0.1


BOTH = [*((name, torch.float32) for name in sorted(LAYOUTS)), ("deepseek_v3", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), BOTH)
def test_there_and_back_through_our_layer(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = build(name, dtype=dtype)
    model.save_pretrained(tmp_path / "hf")
    done = convert(tmp_path / "hf", tmp_path / "dcp", to="dcp", layout=name)
    ours = swapped(name, build(name, seed=1, dtype=dtype))
    load(tmp_path / "dcp", ours)  # names, shapes and dtypes are those of a model of our layers
    if dtype == torch.float32:
        difference = (logits(model) - logits(ours)).abs().max()
        assert difference <= 1e-5 * logits(model).abs().max()
    with pytest.raises(ConfigError, match=f"was written in the layout {name}"):
        convert(tmp_path / "dcp", tmp_path / "wrong", to="safetensors", layout="transformers")
    again = convert(tmp_path / "dcp", tmp_path / "again", to="safetensors")  # the record says which layout it is
    assert again.record.layout == name
    assert again.record.source_hash == done.record.hash
    assert (
        again.record.hash == done.record.source_hash or dtype != torch.float32
    )  # our routers are float32 at least, and stay so
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=dtype)
    got = state_of(opened)
    assert_same({n: tensor.to(got[n].dtype) for n, tensor in state_of(model).items()}, got)


def test_a_checkpoint_of_our_layers_needs_its_layout_named(tmp_path: Path) -> None:
    model = swapped("qwen3_moe", build("qwen3_moe"))
    save(tmp_path / "run", model, step=1)
    with pytest.raises(ConfigError, match=r"is trimtab.MoE's; name the layout: --layout qwen3_moe"):
        convert(tmp_path / "run", tmp_path / "hf", to="safetensors")
    assert convert(tmp_path / "run", tmp_path / "hf", to="safetensors", layout="qwen3_moe").record.layout == "qwen3_moe"


def test_two_expert_parallel_ranks_to_plain_transformers(tmp_path: Path) -> None:
    """Trained and saved at ep=2, converted, opened without trimtab: the same weights to the bit, the same logits."""
    every = run_ranks(train_on_ranks, 2, str(tmp_path), deadline=240)
    for case, (state, wanted) in every[0].items():
        named = None if case == "transformers" else case
        done = convert(tmp_path / case, tmp_path / f"{case}-hf", to="safetensors", layout=named)
        assert done.optimizer[0]
        stored = read_tensors(tmp_path / case / "step-00000001")
        assert_same(state, {n.removeprefix("model."): t for n, t in stored.items() if n.startswith("model.")})
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / f"{case}-hf")
        if named is None:
            assert_same(state, state_of(opened))
        else:
            back = swapped(case, opened)
            assert_same(state, state_of(back))
            opened = AutoModelForCausalLM.from_pretrained(tmp_path / f"{case}-hf")
        assert (logits(opened) - wanted).abs().max() <= 2e-6 * wanted.abs().max(), case
