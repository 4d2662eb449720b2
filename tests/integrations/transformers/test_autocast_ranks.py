"""transformers' experts over two ranks under autocast, as one process has them: tokens travel in its dtype."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import trimtab.integrations.transformers
from helpers.parity import difference, scale
from helpers.ranks import run_ranks
from trimtab.dispatch.route import Dispatched

D, E, K = 16, 4, 2


def experts(first: int, count: int, implementation: str) -> Any:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=D, moe_intermediate_size=8, num_experts=count)
    config._experts_implementation = implementation
    module = Qwen3MoeExperts(config)
    g = torch.Generator().manual_seed(0)
    for name, p in list(module.named_parameters()):
        every = torch.randn(E, *p.shape[1:], generator=g)
        setattr(module, name, nn.Parameter(every[first : first + count].clone()))
    return module


def tokens(rank: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(rank)
    x, ids = torch.randn(count, D, generator=g), torch.randint(0, E, (count, K), generator=g)
    return x.requires_grad_(), ids, torch.rand(count, K, generator=g).requires_grad_()


def run(layer: Any, module: nn.Module, given: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(*given)
    if y.requires_grad:  # without tokens, transformers' loop gives what has no graph
        (y * torch.linspace(-1, 1, D)).sum().backward()
    x, _, w = given
    found = {"y": y.detach(), "dx": x.grad, "dw": w.grad} | {n: p.grad for n, p in module.named_parameters()}
    return {name: t for name, t in found.items() if t is not None}


def over_ranks() -> None:
    from transformers.distributed.expert_parallel import EPImplementationInterface

    trimtab.integrations.transformers.register()
    rank, e = dist.get_rank(), E // 2
    meshes = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "tp"))
    for count, other in ((9, 5), (0, 4)):
        counts = (count, other) if rank == 0 else (other, count)
        for implementation, sent_as in (("trimtab", torch.bfloat16), ("grouped_mm", torch.float32)):
            module = experts(rank * e, e, implementation)
            module._is_expert_parallel = True
            layer = dict(EPImplementationInterface().items())["trimtab"](module, meshes["ep"], meshes["tp"])
            seen: list[torch.dtype] = []

            def note(rows: Dispatched, layer: Any = layer, seen: list[torch.dtype] = seen) -> Tensor:
                seen.append(rows.x_MD.dtype)
                return type(layer)._run_experts(layer, rows)

            layer._run_experts = note
            ours = run(layer, module, tokens(rank, counts[0]))
            whole = experts(0, E, "eager")
            true = run(whole, whole, tokens(rank, counts[0]))
            for name, p in whole.named_parameters():
                total = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(total)
                true[name] = total[rank * e : rank * e + e]
            assert seen == [sent_as]
            for name, value in true.items():
                assert ours[name].dtype == torch.float32, name
                assert difference(ours[name], value) <= 2**-5 * scale(value), (implementation, name)


def test_tokens_travel_in_its_dtype_to_experts_that_multiply_in_it() -> None:
    run_ranks(over_ranks, 2, deadline=200.0)
