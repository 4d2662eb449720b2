"""`python -m benchmarks megatron`: an MoE layer of Megatron-Core over 2 ranks, router, exchange and experts.

Contestants hold the same weights and tokens: Megatron's own layer with its alltoall dispatcher and SequentialMLP; the
same spec after `trimtab.megatron.use(spec)`; with `experts=False`, our exchange before Megatron's SequentialMLP; and
Megatron's exchange before its TEGroupedMLP with trimtab's linears. The router is Megatron's own with random weights,
softmax over the chosen, in float32. Output and gradients of each must be those of Megatron's own. Megatron needs CUDA
even where it computes nothing there: for all contestants alike tests/helpers/megatron_cpu.py stands in for it, and
Megatron's small compiled functions run eagerly.

Legend: T tokens of a rank, D model dim, F expert hidden dim, e experts of a rank.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.contestant import Contestant, Role
from benchmarks.exchange import DIRECT
from benchmarks.layer_case import LayerCase, LayerData, expert_weights
from benchmarks.layer_truth import BOUNDS, probe
from benchmarks.step import first_is_right
from benchmarks.subject import BOTH, FORWARD, Subject, Where
from benchmarks.task import Task
from trimtab.errors import ConfigError

RANKS = 2
BEFORE, LINEARS = "Megatron", "linears"
HELPERS = Path(__file__).parents[1] / "tests"


def megatron_task(
    shape: tuple[int, int, int, int], *, tokens: int, dtype: str, transports: Sequence[str] = DIRECT
) -> Task:
    """tokens: of each rank. transports: ours; the first one before SequentialMLP as well.

    Raises ConfigError where Megatron-Core is not installed.
    """
    case = LayerCase.shaped(shape, tokens=tokens, dtype=dtype, ranks=RANKS)

    def made(name: str, role: Role, **args: Any) -> Contestant:
        build = f"{__name__}:build"
        return Contestant(name=name, role=role, build=build, args=case.as_args(**args), ranks=RANKS)

    contestants = [made(f"Megatron-Core {_version()}, alltoall, SequentialMLP", "peer", kind=BEFORE)]
    contestants += [made(f"trimtab, {each}", "ours", kind="pair", transport=each) for each in transports]
    contestants.append(made("trimtab's exchange, SequentialMLP", "ours", kind="dispatcher", transport=transports[0]))
    contestants.append(made("alltoall, TEGroupedMLP with trimtab's linears", "ours", kind=LINEARS))
    return Task(
        part="megatron",
        case={"shape": list(shape), "dtype": dtype, "tokens": tokens, "threads": 1, "ranks": RANKS},
        contestants=contestants,  # Megatron's own is asked first, for it says what is right
        modes=[FORWARD, BOTH],
        make_judge=lambda: first_is_right(BOUNDS[dtype]),
    )


def _version() -> str:
    found = find_spec("megatron.core") if find_spec("megatron") else None
    if found is None or found.origin is None:
        raise ConfigError("the megatron case needs megatron-core; nothing was measured")
    return str(runpy.run_path(str(Path(found.origin).with_name("package_info.py")))["__version__"])


def build(args: dict[str, Any], where: Where) -> Subject:
    """args: the case, `kind`, and `transport` for ours. Megatron's groups are there until the process ends."""
    sys.path.insert(0, str(HELPERS))
    from helpers import megatron_cpu

    stack = ExitStack()
    for thing, name, instead in megatron_cpu.stand_ins():
        stack.enter_context(patch.object(thing, name, instead, create=True))
    stack.enter_context(megatron_cpu.model_parallel(ep=where.ranks))
    case = LayerCase.of(args)
    layer = _layer(case, args, megatron_cpu)
    up, down = _filled(layer, case, where.rank)
    data = LayerData.of(case, where.rank)
    x_T1D = data.x_TD.detach()[:, None].requires_grad_()
    leaves = [x_T1D, layer.router.weight, *up, *down]

    def forward() -> None:
        with torch.no_grad():
            layer(x_T1D)

    def both() -> Sequence[Tensor]:
        y_T1D, _ = layer(x_T1D)
        return (y_T1D.detach(), *torch.autograd.grad(y_T1D, leaves, data.dy_TD[:, None]))

    def outcome() -> dict[str, Tensor]:
        y, dx, router, *rest = both()
        stacked = [_joined(rest[: len(up)]), _joined(rest[len(up) :])]
        names = ("y", "input gradient", "router gradient", "gate and up gradient", "down gradient")
        return {name: t.float() @ probe(t) for name, t in zip(names, (y, dx, router, *stacked), strict=True)}

    stack.pop_all()
    return Subject(modes={FORWARD: forward, BOTH: both}, outcome=outcome, judged=BOTH)


def _layer(case: LayerCase, args: dict[str, Any], cpu: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from trimtab.integrations.megatron import use
    from trimtab.integrations.megatron.linears import grouped_mlp

    config = cpu.megatron.core.transformer.TransformerConfig(
        num_layers=1, hidden_size=case.dim, num_attention_heads=1, num_moe_experts=case.num_experts,
        moe_router_topk=case.top_k, moe_ffn_hidden_size=case.hidden, moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall", moe_router_dtype="fp32", add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, expert_model_parallel_size=case.ranks, use_cpu_initialization=True,
        perform_initialization=False, params_dtype=case.torch_dtype, bf16=case.dtype == "bf16",
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=case.num_experts, moe_grouped_gemm=False)
    if args["kind"] not in (BEFORE, LINEARS):
        spec = use(spec, experts=args["kind"] == "pair", transport=args["transport"])
    mlp = spec.submodules.mlp
    if args["kind"] == LINEARS:
        mlp = _with_experts(mlp, grouped_mlp())
    layer = cpu.built(mlp, config=config)
    layer.set_layer_number(1)
    return layer


def _with_experts(mlp: Any, experts: Any) -> Any:
    """The spec of a layer with other experts, in the form of this Megatron."""
    if hasattr(mlp, "submodules"):
        return replace(mlp, submodules=replace(mlp.submodules, experts=experts))
    mlp.keywords["submodules"] = replace(mlp.keywords["submodules"], experts=experts)
    return mlp


def _filled(layer: Any, case: LayerCase, rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters of fc1 and of fc2, with the case's values."""
    found = []
    with torch.no_grad():
        router = torch.randn(layer.router.weight.shape, generator=torch.Generator().manual_seed(1))
        layer.router.weight.copy_(router * case.dim**-0.5)
        for name, values in zip(("linear_fc1", "linear_fc2"), expert_weights(case, rank), strict=True):
            of = getattr(layer.experts, "local_experts", [layer.experts])
            params = [param for expert in of for param in expert.get_submodule(name).parameters()]
            for param, value in zip(params, values if len(params) > 1 else [values], strict=True):
                param.copy_(value)
            found.append(params)
    return found[0], found[1]


def _joined(each: Sequence[Tensor]) -> Tensor:
    """[e, .., ..] of one parameter, or of one each."""
    return torch.stack(list(each)) if len(each) > 1 else each[0]
