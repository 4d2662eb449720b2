"""`python -m benchmarks adapters`: a layer whose experts are frozen, with peft's adapters on all of them and without.

One forward and backward of a layer, rank 16 on both weights of every expert: trimtab in peft's clothes, and peft's own
path over transformers' "grouped_mm". *x limit* is the time over that of a step of frozen experts without adapters, by
trimtab; they hold the merged weights, so that all give the same output, and have no gradients of adapters. Those of x,
of routing weights and of adapters are judged by peft's own path.

Legend: T tokens, D model dim, F expert hidden dim, E experts, V random vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contestant import Contestant
from benchmarks.layer import rehearsed
from benchmarks.layer_builds import registered
from benchmarks.layer_case import LayerCase, LayerData, expert_weights
from benchmarks.layer_truth import compare, probe
from benchmarks.race import Judge
from benchmarks.subject import BOTH, Subject, Where
from benchmarks.task import Task

RANK = 16
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]
BOUND = 3e-2
"""peft rounds W + B A to bfloat16, trimtab neither product nor sum."""


def adapters_task(shape: tuple[int, int, int, int], *, tokens: int, dtype: str, threads: int) -> Task:
    """peft's own path comes first, by which the others are judged."""
    args = LayerCase.shaped(shape, tokens=tokens, dtype=dtype).as_args

    def made(name: str, role: Any, implementation: str, merged: bool = False) -> Contestant:
        given = args(implementation=implementation, merged=merged)
        return Contestant(name=name, role=role, build=f"{__name__}:build", args=given, threads=threads)

    contestants = [
        made("peft over grouped_mm", "peer", "grouped_mm"),
        made("trimtab, frozen experts", "limit", "trimtab", merged=True),
        made("trimtab under peft", "ours", "trimtab"),
    ]
    return Task(
        part="adapters",
        case={"shape": list(shape), "tokens": tokens, "dtype": dtype, "threads": threads},
        contestants=contestants,
        modes=[BOTH],
        weighed=[rehearsed(c) for c in contestants],
        make_judge=first_is_right,
    )


def first_is_right() -> Judge:
    """What a contestant reports must be what the first one reported under that name."""
    seen: list[list[dict[str, Tensor]]] = []

    def judge(contestant: Contestant, outcomes: list[dict[str, Tensor]]) -> str | None:
        seen.append(outcomes)
        true = seen[0][0]
        return compare(outcomes, [{name: true[name] for name in outcomes[0]}], BOUND)

    return judge


class Block(nn.Module):
    """What peft is given: experts under a name."""

    def __init__(self, case: LayerCase, implementation: str) -> None:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        super().__init__()
        config = Qwen3MoeConfig(hidden_size=case.dim, moe_intermediate_size=case.hidden, num_experts=case.num_experts)
        config._experts_implementation = implementation
        with torch.device("meta"):
            self.experts: Any = Qwen3MoeExperts(config)
        for name, weight in zip(("gate_up_proj", "down_proj"), expert_weights(case), strict=True):
            setattr(self.experts, name, nn.Parameter(weight))

    def forward(self, x_TD: Tensor, ids_TK: Tensor, w_TK: Tensor) -> Tensor:
        y_TD: Tensor = self.experts(x_TD, ids_TK, w_TK)
        return y_TD


def build(args: dict[str, Any], where: Where) -> Subject:
    """args: the case, `implementation`, and `merged`, whether adapters are merged into the weights."""
    from peft import LoraConfig, get_peft_model

    case, name = LayerCase.of(args), args["implementation"]
    block = Block(case, registered() if name == "trimtab" else name)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=[], target_parameters=TARGETS)
    model: Any = get_peft_model(block, config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                deep = parameter.shape[1] if "lora_A" in key else 16 * RANK
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * deep**-0.5)
    layer = model.merge_and_unload() if args["merged"] else model
    layer.requires_grad_(False) if args["merged"] else None
    pairs = {key: p for key, p in layer.named_parameters() if p.requires_grad}
    return stepped(layer, LayerData.of(case, where.rank), pairs)


def stepped(layer: nn.Module, data: LayerData, pairs: dict[str, Tensor]) -> Subject:
    """Forward and backward; judged are products with a few random vectors, which every element takes part in."""
    leaves = [data.x_TD, data.w_TK, *pairs.values()]

    def both() -> Sequence[Tensor]:
        y_TD = layer(data.x_TD, data.ids_TK, data.w_TK)
        return (y_TD.detach(), *torch.autograd.grad(y_TD, leaves, data.dy_TD))

    def outcome() -> dict[str, Tensor]:
        values = dict(zip(["y", "gradient of x", "gradient of w", *pairs], both(), strict=True))
        return {name: value.float() @ probe(value) for name, value in values.items()}

    return Subject(modes={BOTH: both}, outcome=outcome, judged=BOTH, held=sum(t.nbytes for t in leaves))
