"""Codes of experts over ranks: each reads its own experts, and what is saved is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers.distributed import DistributedConfig

import trimtab.integrations.transformers
from trimtab.integrations.transformers.quantized import quantize_matrices

from .ep_ranks import full, quiet


def load(folder: str, ep: int, fsdp: int = 2, **more: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype="float32",
        experts_implementation="trimtab",
        distributed_config=DistributedConfig(ep_size=ep, fsdp_size=fsdp, ep_implementation="trimtab"),
        **more,
    )


def read_and_save(folder: str, kind: str, given: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, list[int]], int]:
    """All tensors of a model at ep 2, put together, saved and read again; the sizes of this rank's codes; how many
    matrices it encoded."""
    quiet()
    trimtab.integrations.transformers.register()
    count = count_quantized()
    model = load(folder, 2, **given)
    mine = {key: list(local(value).shape) for key, value in model.state_dict().items() if value.dtype is torch.uint8}
    whole = {key: full(value) for key, value in model.state_dict().items()}
    saved = Path(folder, f"saved-{kind}")
    model.save_pretrained(saved, is_main_process=dist.get_rank() == 0)
    dist.barrier()
    for ep in (1, 2):
        again = load(str(saved), ep).state_dict()
        assert again.keys() == whole.keys()
        for key, value in again.items():
            assert torch.equal(full(value), whole[key]), (ep, key)
    return whole, mine, count[0]


def local(value: Any) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def count_quantized() -> list[int]:
    """Counts from now on the matrices that this process quantizes."""
    from trimtab.integrations.transformers import quantized
    from trimtab.integrations.transformers.quantized import conversion

    count = [0]

    def counting(value: Tensor, name: str, *, transposed: bool = False) -> tuple[Tensor, Tensor]:
        count[0] += value.numel() // (value.shape[-1] * value.shape[-2])
        return quantize_matrices(value, name, transposed=transposed)

    for module in (quantized, conversion):
        module.quantize_matrices = counting  # type: ignore[attr-defined]
    return count
