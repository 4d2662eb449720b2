"""What each of two ranks runs: a model under expert parallelism, one step of training, and a checkpoint of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trimtab.checkpoint import save
from trimtab.convert.layouts import LAYOUTS
from trimtab.parallel.expert_parallel import ExpertParallel, parallelize

from .convert_case import build, logits
from .ep_ranks import full, quiet

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
    quiet()
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
    return {name: full(tensor).clone() for name, tensor in model.state_dict().items()}, found
