"""Checkpoints as DeepSeek (FP8 in blocks, FP4 experts) and gpt-oss (MXFP4) publish them, tiny and of random codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.peft_case import adapt
from trimtab.integrations.transformers import register

Outcome = tuple[Tensor, dict[str, Tensor]]


def tiny(family: str, dim: int = 64, hidden: int = 64, **more: object) -> Any:
    register()
    sizes = {
        "vocab_size": 64, "hidden_size": dim, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": dim // 2,
        "num_key_value_heads": 2, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": hidden, "intermediate_size": hidden, "experts_implementation": "trimtab",
    }  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **(sizes | more)))


def save_official(folder: Path, kind: str, plain: str = "nothing", **more: object) -> Path:
    """kind: "fp8", "ue8m0" (FP8 whose scales are exponents), "fp4" (beside FP8) or "mxfp4". plain: the module that is
    left in bfloat16. more: of the configuration."""
    model = tiny("gpt_oss" if kind == "mxfp4" else "qwen3_moe", 256, 128, **more)
    model.to(torch.bfloat16).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors: dict[str, Tensor] = {}
    for name, t in load_file(file).items():
        tensors |= {name: t} if name.startswith(plain) else _coded(name, t, kind)
    save_file(tensors, file, metadata={"format": "pt"})
    says = json.loads((folder / "config.json").read_text())
    says["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [plain]}
    if kind != "mxfp4":
        says["quantization_config"] = {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "scale_fmt": "float" if kind == "fp8" else "ue8m0", "expert_dtype": "fp4" if kind == "fp4" else "fp8",
            "modules_to_not_convert": [plain],
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(says))
    return folder


def _coded(name: str, t: Tensor, kind: str) -> dict[str, Tensor]:
    if kind == "mxfp4":
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: t}
        e, ins, outs = t.shape
        blocks = torch.randint(0, 256, (e, outs, ins // 32, 16), dtype=torch.uint8)
        return {
            f"{name}_blocks": blocks,
            f"{name}_scales": torch.randint(118, 124, blocks.shape[:3], dtype=torch.uint8),
        }
    if t.dim() != 2 or "proj" not in name:
        return {name: t}
    outs, ins = t.shape
    if kind == "fp4" and ".experts." in name:
        exponents = torch.randint(118, 124, (outs, ins // 32), dtype=torch.uint8).view(torch.float8_e8m0fnu)
        return {name: torch.randint(-128, 128, (outs, ins // 2), dtype=torch.int8), f"{name}_scale_inv": exponents}
    grid = (outs // 128, ins // 128)
    scales = torch.rand(grid) * 1e-3 if kind == "fp8" else torch.randint(114, 119, grid, dtype=torch.uint8)
    codes = (torch.randn(outs, ins) * 40).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scales if kind == "fp8" else scales.view(torch.float8_e8m0fnu)}


def loss_and_gradients(model: Any) -> Outcome:
    ids = torch.arange(24).view(2, 12) * 7 % 64
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same_adapters_on(*bases: Any) -> None:
    """peft's adapters of the experts of two models: the same loss, and the same gradients."""
    found = [loss_and_gradients(adapt(base)) for base in bases]
    same_gradients(*found)
    assert len(found[0][1]) == 8


def same_gradients(some: Outcome, other: Outcome) -> None:
    """Within what float32 rounds."""
    (loss, got), (truth, want) = some, other
    assert abs(loss - truth) <= 1e-5
    assert got.keys() == want.keys()
    for key, value in got.items():
        assert (value - want[key]).norm() <= 2e-5 * want[key].norm() + 1e-9, key
