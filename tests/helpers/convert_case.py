"""Small models whose dims are equal on purpose, folders of them, and ways to spoil a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .families import model_class
from .family_config import tiny_config

Tensors = dict[str, Tensor]
FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3")
WIDTH = 16
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def build(name: str, *, seed: int = 0, experts: int = 4, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A model of two layers with D = F, every tensor of it random."""
    cls = model_class(name)
    fields = cls.config_class.__dataclass_fields__
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "moe_intermediate_size": WIDTH}
    sizes |= dict.fromkeys(EXPERTS, experts)
    config = tiny_config(cls.config_class, name, **({k: v for k, v in sizes.items() if k in fields} | more))
    model = cls._from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in state_of(model).values():
            if tensor.is_floating_point():
                tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return model.eval()


def state_of(model: nn.Module) -> Tensors:
    """Parameters and persistent buffers."""
    return dict(model.state_dict())


def logits(model: Any) -> Tensor:
    """Of fixed tokens."""
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        found: Tensor = model(input_ids=ids).logits
    return found


def assert_same(wanted: Tensors, got: Tensors) -> None:
    """Names, dtypes, shapes and bits."""
    assert sorted(wanted) == sorted(got)
    for name, tensor in wanted.items():
        assert (tensor.dtype, tensor.shape) == (got[name].dtype, got[name].shape), name
        assert torch.equal(tensor, got[name]), name


def spoil(folder: Path, change: Callable[[Tensors], None], **config: Any) -> None:
    """Rewrite the folder's tensors, and fields of its configuration."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    rewrite_config(folder, **config)


def rewrite_config(folder: Path, **fields: Any) -> None:
    """Change fields of config.json; None removes one."""
    path = folder / "config.json"
    kept = {k: v for k, v in (json.loads(path.read_text()) | fields).items() if v is not None}
    path.write_text(json.dumps(kept))
