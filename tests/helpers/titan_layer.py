"""torchtitan's MoE as its models build and spread it, on Gloo, with its own dispatcher or ours.

Legend: T tokens of a rank, D model dim, F hidden dim, E experts, K experts per token.
"""
# torchtitan is not installed where types are checked.

from __future__ import annotations

import contextlib
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
import torchtitan.distributed.parallel_dims as parallel_dims
from spmd_types.checker import typecheck
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.config.override import derive
from torchtitan.distributed.spmd_types import set_current_spmd_mesh, set_spmd_meshes
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.config_utils import make_moe_config, make_routed_experts_config, make_router_config
from torchtitan.models.common.moe_sharding import set_moe_sharding_config

from trimtab.integrations.torchtitan import RoutedExperts, TokenDispatcher

D, F, E, K = 16, 16, 8, 3


def config(dispatcher: str, ep: int) -> Any:
    """A layer's configuration; ours is set where a user sets it, and nothing else differs. "replicated": hot experts
    are copied besides, until no rank computes more than the mean."""
    router = make_router_config(
        dim=D, num_experts=E, gate_param_init={"weight": nn.init.zeros_}, top_k=K, score_func="softmax"
    )
    routed = make_routed_experts_config(
        dim=D, hidden_dim=F, num_experts=E, top_k=K, param_init={}, comm_backend="standard"
    )
    if dispatcher != "theirs":
        combine = "sum" if dispatcher == "replicated" else dispatcher
        routed.token_dispatcher = TokenDispatcher.Config(num_experts=E, top_k=K, combine=combine)
    if dispatcher == "replicated":
        routed = derive(routed, RoutedExperts.Config, replicate_experts=0.0)
    cfg = make_moe_config(num_experts=E, router=router, routed_experts=routed)
    layout = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
    set_moe_sharding_config(cfg, enable_ep=ep > 1, enable_sp=True, expert_param_layout=layout)
    return cfg


def plain(value: Tensor) -> Tensor:
    """A local tensor that has arrived: their redistributions are asynchronous."""
    return (value.to_local() if isinstance(value, DTensor) else value) + 0


def step(
    dispatcher: str, tp: int, ep: int, backend: str, *, checked: bool = False, tokens: int = 6
) -> dict[str, Tensor]:
    """One forward and backward on this rank, with sequence parallelism over tp: output and gradients, whole.

    tokens: T of each rank, of the flattened batch. checked: with spmd_types' type checker on.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parallel_dims.device_type = "cpu"  # taken for "cuda" where there is no accelerator
    set_spmd_backend(backend)
    dims = parallel_dims.ParallelDims(
        dp_replicate=1, dp_shard=ranks // tp, cp=1, tp=tp, pp=1, ep=ep, world_size=ranks, spmd_backend=backend
    )
    cfg = config(dispatcher, ep)
    moe = cfg.build()
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in moe.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.3)
        for buffer in moe.buffers():
            buffer.zero_()
    moe.parallelize(dims)
    x_all, dy_all = (torch.randn(tokens * ranks, D, generator=g) for _ in range(2))
    given = cfg.sharding_config.in_src_shardings
    wanted, layout = next(iter(given.items()))  # "x_BLD" as of torchtitan 0.3, "x_TD" before
    mine = (1, tokens, D) if wanted == "x_BLD" else (tokens, D)
    x, dy = (t[rank * tokens : (rank + 1) * tokens].clone().view(mine) for t in (x_all, dy_all))
    x.requires_grad_()
    with contextlib.ExitStack() as around:
        if backend == "spmd_types":
            dense = dims._global_meshes["spmd_dense_for_fwdbwd"]
            set_spmd_meshes(dense_mesh=dense, sparse_mesh=dims._global_meshes.get("spmd_sparse_for_fwdbwd"))
            around.enter_context(set_current_spmd_mesh(dense))
        if checked:
            around.enter_context(typecheck(local=False))
            spmd.assert_type(x, layout.axis_types, layout.partition_spec)
        y = moe(x)
        with spmd.no_typecheck():
            (y.to_local() if isinstance(y, DTensor) else y).backward(dy)
    grads = {name: plain(p.grad) for name, p in moe.named_parameters()}
    assert x.grad is not None
    y_TD, dx_TD = plain(y.detach()).reshape(tokens, D), plain(x.grad).reshape(tokens, D)
    found = {"y": y_TD, "dx": dx_TD, "loads": plain(moe.tokens_per_expert_E)} | grads
    if dispatcher == "replicated":
        report = moe.routed_experts.token_dispatcher.exchange.dispatcher.replicated
        found |= {"computed": report.loads_after_P, "replicas": report.replicas_P}
    return found
