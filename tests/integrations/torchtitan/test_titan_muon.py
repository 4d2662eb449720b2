"""Muon on torchtitan's models under their own parallelization: each matrix against float64 Newton-Schulz of its own."""
# torchtitan is not installed where types are checked.

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helpers.optim_ranks import Matrices, worst_error
from helpers.ranks import run_ranks
from trimtab.errors import ConfigError
from trimtab.optim.exchange import cuts_of

pytest.importorskip("torchtitan.models.common.moe", reason="torchtitan is not a dependency and is not installed")
NO_MUON = ("tok_embeddings.weight", "lm_head.weight", "router.gate.weight")


def theirs(family: str, backend: str, tp: int, ep: int) -> tuple[Any, dict[str, Matrices]]:
    """The last layer of a model of theirs, in float64 over all ranks, and its matrices."""
    import torchtitan.distributed.parallel_dims as parallel_dims
    from torchtitan import config as of_titan
    from torchtitan.distributed.utils import set_spmd_backend

    ranks, short, name = dist.get_world_size(), family.replace("_", ""), "debugmodel" + "_moe" * (family == "qwen3")
    parallel_dims.device_type = "cpu"  # taken for "cuda" where there is no accelerator
    set_spmd_backend(backend)
    home, sharding = (importlib.import_module(f"torchtitan.models.{family}{part}") for part in ("", ".sharding"))
    config: Any = getattr(home, f"{short}_configs")[name](attn_backend="flex", moe_comm_backend="standard")
    config.layers = config.layers[-1:]
    experts = config.layers[0].moe.routed_experts.inner_experts
    experts.num_experts, experts.hidden_dim = 4, 48
    getattr(sharding, f"set_{family}_sharding_config")(config, enable_sp=True, enable_ep=ep > 1)
    model = config.build().to(torch.float64)
    for param in model.parameters():  # so small that no rounding hides an update
        nn.init.normal_(param, std=1e-3, generator=torch.Generator().manual_seed(0))
    truth = {name: matrices_of(name, p, model) for name, p in model.named_parameters()}
    dims = parallel_dims.ParallelDims(
        dp_replicate=1, dp_shard=ranks // tp, cp=1, tp=tp, pp=1, ep=ep, world_size=ranks, spmd_backend=backend
    )
    lay_out = getattr(importlib.import_module(f"{home.__name__}.parallelize"), f"parallelize_{short}")
    degrees = of_titan.ParallelismConfig(tensor_parallel_degree=tp, expert_parallel_degree=ep, spmd_backend=backend)
    if backend == "spmd_types":  # whose FSDP wants a newer PyTorch
        model.parallelize(dims)
    else:
        model = lay_out(
            model, parallel_dims=dims, training=of_titan.TrainingConfig(), parallelism=degrees,
            compile_config=of_titan.CompileConfig(), ac_config=None, dump_folder="",
        )  # fmt: skip
    return model, {name: matrices for name, matrices in truth.items() if matrices}


def matrices_of(name: str, param: Any, model: Any) -> Matrices:
    """As their layers take pre-activations apart."""
    where, attention = torch.arange(param.numel()).view(param.shape), next(iter(model.layers.values())).attention
    if name.endswith(NO_MUON) or param.ndim == 1 or "_bias_" in name:
        return []
    if "mlp1" in name:
        return [part for expert in where for part in (expert[::2], expert[1::2])]
    if "wkv_a" in name:
        return list(where.split([attention.kv_lora_rank, attention.qk_rope_head_dim]))
    if "wkv_b" in name:
        sizes = [attention.qk_nope_head_dim, attention.v_head_dim]
    elif "wqkv" in name:
        own = attention.qkv_linear
        sizes = [own.heads_per_kv * own.head_dim, own.head_dim, own.head_dim]
    else:
        return list(where) if where.ndim == 3 else [where]
    return [part.flatten(0, 1) for part in where.view(-1, sum(sizes), where.shape[1]).split(sizes, dim=1)]


def error_of(family: str, backend: str, tp: int, ep: int) -> float:
    model, truth = theirs(family, backend, tp, ep)
    return worst_error(model, truth, steps=1, ns_dtype=torch.float64)


@pytest.mark.parametrize(
    ("family", "ranks", "backend", "tp", "ep"),
    [("deepseek_v3", 2, "partial_dtensor", 1, 2), ("deepseek_v3", 4, "full_dtensor", 2, 2),
     ("qwen3", 2, "partial_dtensor", 2, 1), ("gpt_oss", 2, "full_dtensor", 2, 1)],
)  # fmt: skip
def test_each_matrix_of_their_model_is_orthogonalized_alone(
    family: str, ranks: int, backend: str, tp: int, ep: int
) -> None:
    assert max(run_ranks(error_of, ranks, family, backend, tp, ep, deadline=120.0)) <= 1e-12


def refused() -> str:
    model, _ = theirs("deepseek_v3", "spmd_types", 2, 1)
    (experts,) = (param for name, param in model.named_parameters() if name.endswith("w1_EFD"))
    with pytest.raises(ConfigError) as error:
        cuts_of("w1_EFD", experts)
    return str(error.value)


def test_shares_that_are_no_dtensors_are_refused_by_name() -> None:
    assert run_ranks(refused, 2)[0].startswith("w1_EFD is a share, by spmd_types, and no DTensor")
