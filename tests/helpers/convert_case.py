"""Small models of equal dims, folders of them, ways to spoil one; and models that two ranks train and save."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trimtab.checkpoint import save
from trimtab.convert.layouts import LAYOUTS
from trimtab.parallel.expert_parallel import ExpertParallel, parallelize

from .comparing import full_value
from .families import model_class
from .family_config import EXPERTS, tiny_config
from .model_ranks import begin

Tensors = dict[str, Tensor]
FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3")
WIDTH = 16


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


def tensors_of(folder: Path) -> Tensors:
    """All that a folder of transformers holds, read by safetensors alone."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


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


Answer = tuple[dict[str, Tensor], Tensor]
"""Whole tensors by name, and the logits of fixed tokens."""


def swapped(name: str, model: Any) -> Any:
    """The model with a `trimtab.MoE` of its own weights in the place of each MoE block, which passes y on."""
    layout = LAYOUTS[name]
    config = dataclasses.replace(layout.config(model.config), dtype=model.dtype)
    for index, layer in enumerate(model.model.layers):
        state = layer.mlp.state_dict()
        block = config.build(f"layers.{index}")
        block.load_state_dict({n: t for part in layout.parts for n, t in part.to_ours("", {}, state).items()})
        block.register_forward_hook(lambda _, args, out: out.y)
        layer.mlp = block.eval()
    return model


def run(folder: str) -> dict[str, Answer]:
    """Train and save transformers' own model and those with our layer; what is in them, for each."""
    begin()
    answers = {"transformers": _transformers(Path(folder))}
    for name in ("qwen3_moe", "mixtral", "deepseek_v3"):
        answers[name] = _ours(name, Path(folder))
    return answers


def _transformers(folder: Path) -> Answer:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import trimtab.integrations.transformers

    trimtab.integrations.transformers.register()
    if dist.get_rank() == 0:
        build("qwen3_moe").save_pretrained(folder / "init")
    dist.barrier()
    config = DistributedConfig(ep_size=2, fsdp_size=2, ep_implementation="trimtab")
    model = AutoModelForCausalLM.from_pretrained(
        folder / "init", experts_implementation="trimtab", distributed_config=config
    )
    return _train_and_save(model, folder / "transformers")


def _ours(name: str, folder: Path) -> Answer:
    model = swapped(name, build(name))
    mesh: DeviceMesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    parallelize(model, mesh, {"model.layers.*.mlp": ExpertParallel()})
    return _train_and_save(model, folder / name)


def _train_and_save(model: nn.Module, root: Path) -> Answer:
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(3))  # the same on both ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    save(root, model, optimizer, step=1)
    found = logits(model)
    return {name: full_value(tensor).clone() for name, tensor in model.state_dict().items()}, found
