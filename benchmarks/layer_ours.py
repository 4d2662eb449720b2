"""trimtab's experts layer as a contestant: `ExpertMLP`, behind a `Dispatcher` where there are several ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.layer_case import DTYPES, FAMILIES, LayerCase, LayerData, expert_biases, expert_weights
from benchmarks.layer_step import layer_subject
from benchmarks.subject import Subject, Where
from trimtab.autocast import narrowed
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.transports import TRANSPORTS
from trimtab.experts.module import ExpertMLP


def _apart(up: Tensor, case: LayerCase) -> Tensor:
    """The case's [E, 2F, …] as [E, 2, F, …]. gpt-oss's gate and up alternate."""
    if FAMILIES[case.family] == "clamped_swiglu":
        return up.unflatten(1, (-1, 2)).transpose(1, 2)
    return up.unflatten(1, (2, -1))


def _together(gate_up: Tensor, case: LayerCase) -> Tensor:
    """The way back."""
    if FAMILIES[case.family] == "clamped_swiglu":
        gate_up = gate_up.transpose(1, 2)
    return gate_up.flatten(1, 2)


def build(args: dict[str, Any], where: Where) -> Subject:
    """args: the case, `kernels`, and `transport` where there are ranks."""
    case = LayerCase.of(args)
    (up, down), biases = expert_weights(case, where.rank), expert_biases(case)
    experts = ExpertMLP(
        up.shape[0], case.dim, case.hidden, dtype=case.torch_dtype, kernels=args["kernels"],
        activation=FAMILIES[case.family], bias=biases is not None,
        main_grad="accumulate" if case.in_place else "off",
    )  # fmt: skip
    with torch.no_grad():
        experts.gate_up.copy_(_apart(up, case))
        experts.down.copy_(down)
        if biases is not None:
            experts.gate_up_bias.copy_(_apart(biases[0], case))
            experts.down_bias.copy_(biases[1])
    if case.in_place:
        for param in (experts.gate_up, experts.down):
            param.main_grad = torch.zeros_like(param)  # type: ignore[attr-defined]
    facts = {"kernels": experts.kernels.on(torch.device("cpu"), DTYPES[case.products]).name}

    def gradients() -> list[Any]:
        up, down = (getattr(p, "main_grad" if case.in_place else "grad") for p in (experts.gate_up, experts.down))
        if biases is None:
            return [_together(up, case), down]
        return [_together(up, case), down, _together(experts.gate_up_bias.grad, case), experts.down_bias.grad]

    def alone(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        y: Tensor = experts(x, ids, w)
        return y

    data, params = LayerData.of(case, where.rank), list(experts.parameters())
    if where.ranks == 1:
        return layer_subject(alone, data, params, gradients, autocast=case.autocast, facts=facts)
    assert dist.group.WORLD is not None
    transport = TRANSPORTS[args["transport"]](dist.group.WORLD)
    dispatcher = Dispatcher(case.num_experts, transport, layer="bench")

    def spread(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        rows = dispatcher.dispatch(narrowed(x, experts), ids, w)
        out = experts(rows.x_MD, rows.ids_MK, rows.weights_MK, num_slots=rows.num_slots)
        return dispatcher.combine(out, rows).to(x.dtype)

    facts |= {"transport": args["transport"]}
    return layer_subject(spread, data, params, gradients, autocast=case.autocast, facts=facts)
