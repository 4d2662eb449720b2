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
        experts.up.copy_(up)
        experts.down.copy_(down)
        for own, bias in zip((experts.up_bias, experts.down_bias), biases or (), strict=False):
            own.copy_(bias)  # type: ignore[union-attr]
    if case.in_place:
        for param in (experts.up, experts.down):
            param.main_grad = torch.zeros_like(param)  # type: ignore[attr-defined]
    facts = {"kernels": experts.kernels.on(torch.device("cpu"), DTYPES[case.products]).name}

    def gradients() -> list[Any]:
        weights = [getattr(p, "main_grad" if case.in_place else "grad") for p in (experts.up, experts.down)]
        return weights + [bias.grad for bias in (experts.up_bias, experts.down_bias) if bias is not None]

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
