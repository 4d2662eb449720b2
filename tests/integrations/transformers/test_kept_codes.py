"""Official FP8 and MXFP4 checkpoints whose experts stay codes: they decode to what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config, Mxfp4Config

from helpers.coded_checkpoints import loss_and_gradients, same_adapters_on, save_official, tiny
from trimtab.checkpoint.state import is_transformers_experts
from trimtab.errors import ConfigError
from trimtab.integrations.transformers import QuantizedExpertsConfig, quantize_experts
from trimtab.integrations.transformers.quantized import MARK
from trimtab.integrations.transformers.quantized.prequantized import prequantized_format

pytestmark = pytest.mark.usefixtures("registered", "one_thread")
FORMAT = {"fp8": "fp8", "ue8m0": "fp8", "fp4": "mxfp4", "mxfp4": "mxfp4"}


def load(folder: Path, experts: str = "trimtab", **more: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation=experts, **more)


def whole(folder: Path, kind: str, **more: Any) -> Any:
    config = Mxfp4Config(dequantize=True) if kind == "mxfp4" else FineGrainedFP8Config(dequantize=True)
    return load(folder, quantization_config=config, **more)


def marks(model: Any) -> set[Any]:
    return {getattr(module, MARK, None) for module in model.modules() if is_transformers_experts(module)}


def same(some: Any, other: Any) -> None:
    a, b = some.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(value, b[key]) and value.dtype is b[key].dtype for key, value in a.items())


@pytest.mark.parametrize("kind", list(FORMAT))
def test_codes_are_kept_run_saved_read_again_and_taken_out(kind: str, tmp_path: Path) -> None:
    folder = save_official(tmp_path / "official", kind)
    kept, truth = load(folder, dtype="float32"), whole(folder, kind, dtype="float32")
    assert marks(kept) == {(FORMAT[kind], torch.float32)}
    assert prequantized_format(transformers.AutoConfig.from_pretrained(folder)) == FORMAT[kind]
    loss, got = loss_and_gradients(kept)
    wanted_loss, want = loss_and_gradients(truth)
    assert abs(loss - wanted_loss) <= 1e-5
    assert got.keys() == {key for key in want if not key.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    for key, value in got.items():
        assert (value - want[key]).norm() <= 2e-5 * want[key].norm() + 1e-9, key

    kept.save_pretrained(tmp_path / "saved")
    same(load(tmp_path / "saved", dtype="float32"), kept)
    assert prequantized_format(transformers.AutoConfig.from_pretrained(tmp_path / "saved")) == FORMAT[kind]
    if kind == "mxfp4":  # the rest was never coded: the file is gpt-oss's again
        was, now = load_file(folder / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
        assert was.keys() == now.keys()
        assert all(torch.equal(t, now[key].to(t.dtype)) for key, t in was.items())
    same(kept.dequantize(), truth)
    kept.save_pretrained(tmp_path / "plain")
    same(load(tmp_path / "plain", dtype="float32"), truth)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_adapters_on_kept_codes(kind: str, tmp_path: Path) -> None:
    folder = save_official(tmp_path, kind)
    same_adapters_on(load(folder, dtype="float32"), whole(folder, kind, dtype="float32"))


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_another_implementation_gets_what_transformers_gives(kind: str, tmp_path: Path) -> None:
    folder = save_official(tmp_path, kind)
    same(load(folder, "grouped_mm"), whole(folder, kind))


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_experts_that_a_checkpoint_left_alone_stay_weights(kind: str, tmp_path: Path) -> None:
    folder = save_official(tmp_path / "official", kind, plain="model.layers.1.mlp.experts")
    kept, truth = load(folder), whole(folder, kind)
    assert marks(kept) == {(FORMAT[kind], torch.bfloat16), None}
    kept.save_pretrained(tmp_path / "saved")
    same(load(tmp_path / "saved"), kept)
    same(kept.dequantize(), truth)


def test_refused_before_anything_is_read(tmp_path: Path) -> None:
    straddling = save_official(tmp_path / "straddling", "fp8")
    for file in straddling.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:64])  # no tensor can be read
    config = straddling / "config.json"
    says = json.loads(config.read_text())
    for change, sentence in (
        ({"moe_intermediate_size": 192}, "straddle gate and up.*192 each: load it with"),
        ({"quantization_config": says["quantization_config"] | {"weight_block_size": [64, 128]}}, r"has \[64, 128\]"),
    ):
        config.write_text(json.dumps(says | change))
        with pytest.raises(ConfigError, match=sentence):
            load(straddling, dtype="bfloat16")


def lose(folder: Path, *ends: str) -> Path:
    """Take the tensors with these ends of names out of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    left = {name: t for name, t in tensors.items() if not name.endswith(ends)}
    assert len(left) < len(tensors)
    save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("kind", "ends"),
    [
        ("fp8", ["3.down_proj.weight_scale_inv"]),
        ("fp4", [f"{e}.down_proj.weight" for e in range(4)]),
        ("mxfp4", ["down_proj_scales"]),
        ("mxfp4", ["down_proj_blocks"]),
        ("nf4", ["down_proj_scales"]),
        ("weights", [f"{e}.down_proj.weight" for e in range(4)]),
    ],
)
def test_what_a_checkpoint_lacks_of_codes_is_an_error(kind: str, ends: list[str], tmp_path: Path) -> None:
    """A warning of MISSING, as transformers gives it, would be followed by numbers of chance."""
    if kind in ("nf4", "weights"):
        model = tiny("qwen3_moe")
        (quantize_experts(model) if kind == "nf4" else model).save_pretrained(tmp_path)
    else:
        save_official(tmp_path, kind)
    given = {"quantization_config": QuantizedExpertsConfig("nf4")} if kind == "weights" else {}
    with pytest.raises(
        ConfigError, match=r"pairs of codes and scales, for model\.layers\.0\.mlp\.experts\.down_proj.*fetch all of its"
    ):
        load(lose(tmp_path, *ends), dtype="float32", **given)
