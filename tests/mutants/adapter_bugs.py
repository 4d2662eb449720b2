"""Bugs of adapters on experts that are spread over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mutants.patching import Mutant, Patches
from trimtab.experts import lora
from trimtab.parallel import experts, meshes
from trimtab.parallel.experts import ParallelExperts
from trimtab.parallel.meshes import local_part
from trimtab.verify import trimtab_impl


def _by_mesh(p: Patches) -> None:
    @p.around(experts, "factors_of")
    def scaled(original: Any, owner: ParallelExperts, found: Any, parts: Any) -> Any:
        for adapter in found:
            adapter.scale = 0.25 * owner.place.mesh.size()
        return original(owner, found, parts)


def _wrong_group(p: Patches) -> None:
    class Alone:
        apply = staticmethod(lambda group, *tensors: tensors)

    p.put(experts, "SumGradients", Alone)


def _left_out(p: Patches) -> None:
    for home in (lora, experts):
        p.put(home, "factors_of", lambda *args: {})


def _wrong_slice(p: Patches) -> None:
    @p.around(ParallelExperts, "_cut")
    def cut(original: Any, self: ParallelExperts, owner: nn.Module, name: str, *args: Any) -> None:
        if name == "gate_up_b":
            param, dim = owner.get_parameter(name), experts.SPLIT[name].dim
            param.data = torch.cat(param.data.chunk(self.place.etp_size, dim)[::-1], dim)
        original(self, owner, name, *args)


def _one_too_few(p: Patches) -> None:
    @p.around(trimtab_impl, "merge_adapter")
    def merge(original: Any, model: nn.Module, name: str) -> int:
        found = [m for m in model.modules() if isinstance(m, ParallelExperts)]
        before = [local_part(m.down.detach())[-1].clone() for m in found]
        merged: int = original(model, name)
        for m, last in zip(found, before, strict=True):
            local_part(m.down.detach())[-1] = last
        return merged


def _not_over_ranks(p: Patches) -> None:
    @p.around(meshes.SumGradients, "backward")
    def backward(original: Any, ctx: Any, *grads: Any) -> Any:
        _, *summed = original(ctx, *grads)
        return None, *(grad / dist.get_world_size(ctx.group) for grad in summed)


MUTANTS = (
    Mutant(name="adapter_scaled_by_mesh", patch=_by_mesh, look="2r-ep2-lora/random/*",
           says="an adapter's scale grows with the ranks that share the experts"),
    Mutant(name="adapter_gradient_in_wrong_group", patch=_wrong_group, look="2r-etp2-local-sharedlora/random/*",
           says="what ranks hold alike of an adapter is reduced over the ranks with copies of the experts alone"),
    Mutant(name="adapter_gradient_averaged", patch=_not_over_ranks, look="2r-ep2-ordered-sharedlora/random/*",
           says="a shared pair's gradient is the mean over the expert group, not the sum"),
    Mutant(name="adapter_left_out", patch=_left_out, look="1r-local-lora/random/*",
           says="the grouped path runs without the delta (\"LoRA enabled\", and nothing learns)"),
    Mutant(name="adapter_b_of_wrong_rank", patch=_wrong_slice, look="2r-etp2-local-lora/random/*",
           says="b is cut for another rank's share of F than the weight (Megatron-Bridge#5635)"),
    Mutant(name="merged_one_expert_too_few", patch=_one_too_few, look="2r-ep2-mergedlora/random/*",
           says="a merge leaves an expert out and says nothing"),
)  # fmt: skip
