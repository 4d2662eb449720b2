"""A training step of adapters on frozen experts: the model of `benchmarks.step`, rank 16 on both stacks of every layer.

Its experts' weights are of values that NF4 holds exactly, so that all contestants compute one function and are judged
by peft over `grouped_mm`, norm by norm of the gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import step
from benchmarks.adapters import RANK, TARGETS
from benchmarks.contestant import Contestant
from benchmarks.frozen_ktransformers import put_adapted
from benchmarks.quantized import UNIT
from benchmarks.step import first_is_right
from benchmarks.subject import Subject, Where
from benchmarks.task import Task

KTRANSFORMERS = "peft over KTransformers"
BOUND = 5e-2
"""peft rounds W + B A to bfloat16."""


def adapters_step_task(*, batch: int = 4, length: int = 512, threads: int, tiny: bool = False) -> Task:
    args = {"batch": batch, "length": length, "dtype": "bf16", "model": step.TINY if tiny else step.MODEL}

    def made(name: str, role: Any, experts: str, form: str = "") -> Contestant:
        given = args | {"experts": experts, "form": form}
        return Contestant(name=name, role=role, build=f"{__name__}:build", args=given, threads=threads)

    return Task(
        part="frozen",
        case={"dtype": "a step of adapters", "tokens": batch * length, "threads": threads},
        contestants=[
            made("peft over grouped_mm", "peer", "grouped_mm"),
            made(KTRANSFORMERS, "peer", "grouped_mm", KTRANSFORMERS),
            made("trimtab, plain", "ours", "trimtab"),
            made("trimtab, packed", "ours", "trimtab", "packed"),
            made("trimtab, nf4", "ours", "trimtab", "nf4"),
        ],
        modes=[step.STEP],
        make_judge=lambda: first_is_right(BOUND),
    )


def build(args: dict[str, Any], where: Where) -> Subject:
    """args: of `benchmarks.step`, and `form`, of the frozen experts."""
    from peft import LoraConfig, get_peft_model

    from trimtab.integrations.transformers import quantize_experts

    model = step.made(args)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(tuple(TARGETS)):
                weight.copy_(torch.randint(-1, 2, weight.shape, generator=generator, dtype=torch.int8) * UNIT)
    if args["form"] not in ("", KTRANSFORMERS):
        model = quantize_experts(model, args["form"])
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=[], target_parameters=TARGETS)
    adapted: Any = get_peft_model(model, config)
    with torch.no_grad():
        for name, factor in adapted.named_parameters():
            if "lora_B" in name:  # zeros would give A no gradients
                factor.copy_(torch.randn(factor.shape, generator=generator) * 0.01)
    if args["form"] == KTRANSFORMERS:
        put_adapted(adapted, tokens=args["batch"] * args["length"], rank=RANK, alpha=2 * RANK)
    return step.stepped(adapted, args)
