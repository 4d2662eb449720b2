"""Megatron's experts and ours as one small model in Megatron's DDP and optimizer, over 4 ranks, at any parallelism.

Legend: E experts, H hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.megatron_cpu import cuda_stood_in, megatron, model_parallel, process_groups_config, spec_utils
from trimtab.integrations.megatron.experts import Experts
from trimtab.integrations.megatron.linears import grouped_mlp

E, H, HIDDEN = 4, 6, 8
KINDS = ("SequentialMLP", "TEGroupedMLP", "Experts", "Experts weight{i}")
PLACES = {"EP1": (1, 1), "EP2": (2, 1), "EP4": (4, 1), "EP2xETP2": (2, 2), "ETP4": (1, 4)}
"""Expert and expert tensor parallelism, over 4 ranks."""


class FusedAdam(torch.optim.Optimizer):
    """In place of Apex's and TransformerEngine's, which count steps in the group: Megatron's distributed optimizer
    cannot load the state of torch's. Each operation rounds, so that results do not depend on how elements lie."""

    def __init__(self, params: Any, lr: float, betas: Any, eps: float, **options: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for param in [param for param in group["params"] if param.grad is not None]:
                state, grad = self.state[param], param.grad.float()
                for name, decay, value in (("exp_avg", first, grad), ("exp_avg_sq", second, grad * grad)):
                    before = state[name] if name in state else torch.zeros_like(value)
                    state[name] = before * decay + value * (1 - decay)
                mean = state["exp_avg"] / (1 - first ** group["step"])
                size = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt()
                param.copy_(param - group["lr"] * (mean / (size + group["eps"])))


@contextlib.contextmanager
def fused_adam() -> Iterator[None]:
    """Megatron finds it where it looks for Apex's."""
    optimizer = megatron.core.optimizer
    found = {"Adam": FusedAdam, "HAVE_APEX_OR_TE": True, "USING_APEX_OPTIMIZER": True, "USING_PYTORCH_OPTIMIZER": False}
    with contextlib.ExitStack() as stack:
        for module in (optimizer, optimizer.distrib_optimizer):
            for name in [name for name in found if hasattr(module, name)]:
                stack.enter_context(patch.object(module, name, found[name]))
        yield


@contextlib.contextmanager
def beside_megatron() -> Iterator[None]:
    """On a rank without parallelism as yet."""
    with cuda_stood_in(), fused_adam():
        yield


def model_of(
    kind: str, place: str, *, gated: bool = True, bias: bool = False, frozen: bool = False, bf16: bool = False,
    by_cpu: bool = True,
) -> Any:  # fmt: skip
    """Experts beside a parameter that every rank has. by_cpu: drawn there, and not as on a device."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    ep, etp = PLACES[place]
    config = megatron.core.transformer.TransformerConfig(
        num_layers=1, hidden_size=H, num_attention_heads=1, num_moe_experts=E, moe_ffn_hidden_size=HIDDEN,
        add_bias_linear=bias, gated_linear_unit=gated, activation_func=F.silu if gated else F.gelu,
        use_cpu_initialization=by_cpu, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
        moe_token_dispatcher_type="alltoall", bf16=bf16, params_dtype=torch.bfloat16 if bf16 else torch.float32,
    )  # fmt: skip
    groups = process_groups_config.ProcessGroupCollection.use_mpu_process_groups()
    of_layer = get_moe_module_spec(use_te=False, num_experts=E, moe_grouped_gemm=False)
    theirs = (getattr(of_layer, "submodules", None) or of_layer.keywords["submodules"]).experts
    each = spec_utils.ModuleSpec(module=Experts, params={"single_parameter": False})
    specs = {"SequentialMLP": theirs, "TEGroupedMLP": grouped_mlp(), "Experts": Experts, "Experts weight{i}": each}
    spec = specs[kind]  # from 0.18 on Megatron's own are what is called
    build = partial(spec_utils.build_module, spec) if isinstance(spec, spec_utils.ModuleSpec) else spec
    experts = build(E // ep, config, pg_collection=groups)
    model = megatron.core.transformer.module.MegatronModule(config)
    model.experts, model.dense = experts, nn.Linear(H, 256, bias=False)  # each rank of the optimizer has some of it
    experts.requires_grad_(not frozen)
    return model.to(config.params_dtype)


def wholes(bias: bool, gated: bool, seed: int) -> dict[str, Tensor]:
    """One value for each element of each expert: the same everywhere."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    halves = 2 if gated else 1
    found = {"linear_fc1.weight": draw(E, halves * HIDDEN, H), "linear_fc2.weight": draw(E, H, HIDDEN)}
    if bias:
        found |= {"linear_fc1.bias": draw(E, halves * HIDDEN), "linear_fc2.bias": draw(E, H)}
    return found


def mine(model: Any, place: str, whole: Any) -> list[tuple[str, Tensor, Tensor]]:
    """Each parameter of the experts, by the key of `wholes`, with what is its part of tensors like `wholes`."""
    ep, etp = PLACES[place]
    state, experts, pairs = megatron.core.parallel_state, model.experts, []
    first, part = state.get_expert_model_parallel_rank() * (E // ep), state.get_expert_tensor_parallel_rank()
    for name, param in experts.named_parameters():
        key, which = whole_of(name)
        full = whole[key][[first + i for i in (range(E // ep) if which is None else [which])]]
        if key.startswith("linear_fc1"):
            halves = full.chunk(2 if model.config.gated_linear_unit else 1, 1)
            full = torch.cat([half.chunk(etp, 1)[part] for half in halves], 1)
        elif key.endswith("weight"):
            full = full.chunk(etp, 2)[part]
        pairs.append((key, param, full if full.shape == param.shape else full[0]))
    return pairs


def trained(model: Any, place: str, distributed: bool, seeds: Sequence[int]) -> tuple[Any, Any]:
    """The model in Megatron's DDP, and its optimizer behind a step for each seed of gradients."""
    core = megatron.core
    ddp = core.distributed.DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    wrapped = core.distributed.DistributedDataParallel(model.config, ddp, model)
    options = core.optimizer.OptimizerConfig(
        optimizer="adam", lr=0.01, clip_grad=0.0, use_distributed_optimizer=distributed,
        bf16=model.config.bf16, params_dtype=model.config.params_dtype,
    )  # fmt: skip
    optimizer = core.optimizer.get_megatron_optimizer(options, [wrapped], use_gloo_process_groups=False)
    for seed in seeds:
        step(wrapped, optimizer, place, seed)
    return wrapped, optimizer


def step(wrapped: Any, optimizer: Any, place: str, seed: int) -> None:
    model, (ep, etp) = wrapped.module, PLACES[place]
    wrapped.zero_grad_buffer()
    gradients = wholes(model.config.add_bias_linear, model.config.gated_linear_unit, seed)
    for _, param, gradient in mine(model, place, gradients):
        if param.requires_grad:
            param.main_grad.copy_(gradient * ep * etp)  # it becomes the mean over all ranks
    model.dense.weight.main_grad.fill_(1.0)
    wrapped.finish_grad_sync()
    optimizer.step()


def model_parallel_at(place: str) -> Any:
    ep, etp = PLACES[place]
    return model_parallel(ep=ep, etp=etp)


def assembled(model: Any, place: str, values: Callable[[Any], Tensor] = lambda param: param) -> dict[str, Tensor]:
    """The whole of what each parameter has, itself by default, from all ranks, on every rank."""
    index = {
        k: torch.arange(v.numel()).view(v.shape)
        for k, v in wholes(model.config.add_bias_linear, model.config.gated_linear_unit, 0).items()
    }
    pieces = [(key, ids, values(param).detach()) for key, param, ids in mine(model, place, index)]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pieces)
    found = {k: torch.full(v.shape, torch.nan, dtype=pieces[0][2].dtype) for k, v in index.items()}
    for key, ids, part in (piece for one in everyone for piece in one):
        found[key].view(-1)[ids.reshape(-1)] = part.reshape(-1)
    assert not any(v.isnan().any() for v in found.values())
    return found


def whole_of(name: str) -> tuple[str, int | None]:
    """The key of `wholes` for a parameter's name, and which local expert's it is, None for all."""
    words = name.split(".")
    if words[0] == "local_experts":
        return ".".join(words[2:]), int(words[1])
    key = name.rstrip("0123456789")
    return key, int(name.removeprefix(key)) if key != name else None
