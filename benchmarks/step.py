"""`python -m benchmarks step`: a whole training step of a small Qwen3-MoE in transformers, the case that a user feels.

The model: 3 layers, D 1024, 16 heads, 64 experts of F 384, K 8, a vocabulary of 8,192, random weights from a seed.
The step: 4 x 512 tokens, forward with the loss, backward, fused AdamW. Contestants hold the same weights and tokens,
and differ in `experts_implementation` alone: "trimtab", and transformers' fastest for the CPU, "grouped_mm".

Legend: B sequences, L positions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.contestant import Contestant
from benchmarks.layer_builds import registered
from benchmarks.layer_truth import compare
from benchmarks.race import Judge
from benchmarks.subject import Subject, Where
from benchmarks.task import Task

STEP = "step"
BOUNDS = {"bf16": 2e-2, "fp32": 1e-3}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MODEL = {
    "num_hidden_layers": 3,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
    "vocab_size": 8192,
}
TINY = MODEL | {
    "hidden_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "vocab_size": 64,
}
"""To see that it runs."""


def step_task(
    *, batch: int = 4, length: int = 512, dtype: str = "bf16", threads: int = 2, against: str = "", tiny: bool = False,
    muon: bool = False,
) -> Task:  # fmt: skip
    """against: the `src` folder of another checkout of trimtab, which races as "trimtab before". muon: trimtab races
    against itself, with Muon in the place of AdamW."""
    args = {"batch": batch, "length": length, "dtype": dtype, "model": TINY if tiny else MODEL}

    def made(name: str, role: Any, experts: str, source: str = "") -> Contestant:
        build = f"{__name__}:build"
        return Contestant(
            name=name, role=role, build=build, args=args | {"experts": experts}, threads=threads, source=source
        )

    contestants = [made("transformers, grouped_mm", "peer", "grouped_mm"), made("trimtab", "ours", "trimtab")]
    if muon:
        contestants = [made("trimtab, AdamW", "peer", "trimtab")]
        args = args | {"muon": True}
        contestants.append(made("trimtab, Muon", "ours", "trimtab"))
    if against:
        contestants.append(made("trimtab before", "ours", "trimtab", against))
    return Task(
        part="step",
        case={"tokens": batch * length, "dtype": dtype, "threads": threads},
        contestants=contestants,  # the stock one is asked first, for it says what is right
        modes=[STEP],
        make_judge=lambda: first_is_right(BOUNDS[dtype]),
    )


def sizes(tiny: bool) -> dict[str, Any]:
    """To see that it runs, or those of a task."""
    return {"batch": 1, "length": 8, "tiny": True} if tiny else {}


def build(args: dict[str, Any], where: Where) -> Subject:
    """args: model, experts, batch, length, dtype, and muon."""
    return stepped(made(args), args)


def made(args: dict[str, Any]) -> Any:
    """The model, the same for all but its experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    experts = registered() if args["experts"] == "trimtab" else args["experts"]
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**args["model"], experts_implementation=experts, dtype=DTYPES[args["dtype"]])
    model: Any = Qwen3MoeForCausalLM(config).to(DTYPES[args["dtype"]])
    used = model.model.layers[0].mlp.experts.config._experts_implementation
    assert used == experts, used
    return model


def stepped(model: Any, args: dict[str, Any]) -> Subject:
    """Training steps of what the model trains."""
    model.train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer: torch.optim.Optimizer
    if args.get("muon"):
        from trimtab.optim import Muon

        optimizer = Muon(model, lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-4, fused=True)  # the default is many times slower
    torch.manual_seed(1)
    ids_BL = torch.randint(args["model"]["vocab_size"], (args["batch"], args["length"]))

    def loss_and_gradients() -> tuple[Tensor, float, float]:
        start = time.perf_counter()
        loss: Tensor = model(input_ids=ids_BL, labels=ids_BL, use_cache=False).loss
        middle = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), middle - start, time.perf_counter() - middle

    def outcome() -> dict[str, Tensor]:
        loss, _, _ = loss_and_gradients()
        found = {"first loss": loss.float().reshape(1)}
        for name, parameter in trained.items():
            assert parameter.grad is not None
            found[f"norm of the gradient of {name}"] = parameter.grad.float().norm().reshape(1)
        optimizer.zero_grad()
        return found

    def step() -> Mapping[str, float]:
        _, forward, backward = loss_and_gradients()
        start = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        return {"forward": forward, "backward": backward, "optimizer": time.perf_counter() - start}

    return Subject(modes={STEP: step}, outcome=outcome)


def first_is_right(bound: float) -> Judge:
    """What each gives must be what the first contestant that was asked gave."""
    seen: list[list[dict[str, Tensor]]] = []

    def judge(contestant: Contestant, outcomes: list[dict[str, Tensor]]) -> str | None:
        seen.append(outcomes)
        return compare(outcomes, seen[0], bound)

    return judge
