"""Balance of transformers' own routers on badly skewed tiny models: how even the loads get, and what the loss does.

A Mixtral and a Qwen3-MoE of two layers (8 experts, 2 per token, 512 tokens a step) learn the bytes of Python's
argparse; in each layer two experts begin with router weights that win nearly every token. The same model, data and
seed by each way. One thread, about two seconds a run:

    python -m benchmarks.balance_families [--families mixtral qwen3_moe] [--seeds 0 1 2] [--micro-batches 1]

With several micro-batches: the auxiliary loss with the loads of the step so far and, behind `LoadBalancer.first_pass`,
of the whole step; and how far the first one's gradient is from the second one's, which is that of one batch.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from trimtab.integrations.transformers import LoadBalancer
from trimtab.integrations.transformers.routers.find import find_routers
from trimtab.routing.balance import max_vio

WAYS: dict[str, dict[str, Any]] = {
    "none": {"bias": None},
    "aux loss": {"bias": None, "aux_loss": 0.1},
    "sign": {"bias": "sign", "rate": 0.01, "add_bias": True},
    "quantile": {"bias": "quantile", "add_bias": True},
}
CUT: dict[str, dict[str, Any]] = {
    "aux loss": {"bias": None, "aux_loss": 0.1},
    "aux loss, first pass": {"bias": None, "aux_loss": 0.1},
}
SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts_per_tok": 2, "max_position_embeddings": 64, "initializer_range": 0.1,
    "use_cache": False,
}  # fmt: skip
CONFIGS = {
    "mixtral": lambda: MixtralConfig(num_local_experts=8, intermediate_size=32, **SIZES),
    "qwen3_moe": lambda: Qwen3MoeConfig(num_experts=8, moe_intermediate_size=32, norm_topk_prob=True, **SIZES),
}


def skewed(family: str, seed: int) -> Any:
    """A model whose tokens have much in common, which two experts of each layer like."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]())
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(2).add_(0.5)
        for place in find_routers(model):
            place.module.weight[:2] += 0.05
    return model


def text() -> Tensor:
    """What is learned, as bytes."""
    source = " ".join(inspect.getsource(argparse).split())
    return torch.frombuffer(bytearray(source.encode()), dtype=torch.uint8).long()


def train(family: str, way: str, steps: int = 200, seed: int = 0, micro: int = 1) -> tuple[list[float], list[float]]:
    """(cross-entropy per byte in nats, max_vio of the worst layer) of every step of `micro` micro-batches."""
    model = skewed(family, seed)
    balance = LoadBalancer(model, **(WAYS | CUT)[way])
    balance.micro_batches = micro
    bytes_N = text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    drawn = torch.Generator().manual_seed(seed)
    losses, worst = [], []
    for _ in range(steps):
        starts = torch.randint(len(bytes_N) - 32, (16,), generator=drawn)
        parts = torch.chunk(bytes_N[starts[:, None] + torch.arange(32)], micro)
        if "first pass" in way:
            with balance.first_pass():
                for ids in parts:
                    model(input_ids=ids)
        loss = torch.zeros(())
        for ids in parts:
            one = model(input_ids=ids, labels=ids).loss / micro
            one.backward()
            loss += one.detach()
        optimizer.step()
        optimizer.zero_grad()
        worst.append(max(max_vio(loads) for loads in balance.step().values()))
        losses.append(loss.item())
    return losses, worst


def gradient_error(family: str, micro: int, batches: int = 20) -> float:
    """|g - whole| / |whole| of the auxiliary loss's gradient g in the routers, where f are the loads so far; the mean
    over batches of a model that has not been trained."""
    model = skewed(family, 0)
    balance = LoadBalancer(model, bias=None, aux_loss=0.1)
    gates = [place.module.weight for place in find_routers(model)]
    bytes_N, drawn = text(), torch.Generator().manual_seed(0)

    def gradient(parts: tuple[Tensor, ...]) -> Tensor:
        model.zero_grad()
        balance.micro_batches = len(parts)
        for ids in parts:
            (model(input_ids=ids).logits.sum() * 0).backward()
        balance.step()
        return torch.cat([gate.grad.flatten() for gate in gates])

    errors = []
    for _ in range(batches):
        ids = bytes_N[torch.randint(len(bytes_N) - 32, (16, 1), generator=drawn) + torch.arange(32)]
        whole = gradient((ids,))
        errors.append(float((gradient(torch.chunk(ids, micro)) - whole).norm() / whole.norm()))
    return statistics.mean(errors)


def main() -> None:
    """Print one table for each family and seed."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--families", nargs="+", choices=tuple(CONFIGS), default=tuple(CONFIGS))
    options.add_argument("--seeds", nargs="+", type=int, default=[0])
    options.add_argument("--micro-batches", type=int, default=1, help="that a step is cut into: 1, 2, 4, 8 or 16")
    given = options.parse_args()
    micro = given.micro_batches
    torch.set_num_threads(1)
    print("| family | seed | way | max_vio 1-20 | 41-60 | 181-200 | steps from 101 at or above 0.5 | loss 181-200 |")
    print("|---|---|---|---|---|---|---|---|")
    for family in given.families:
        for seed in given.seeds:
            for way in WAYS if micro == 1 else CUT:
                losses, vio = train(family, way, 200, seed, micro)
                means = [statistics.mean(vio[a:b]) for a, b in ((0, 20), (40, 60), (180, 200))]
                over = sum(value >= 0.5 for value in vio[100:])
                print(f"| {family} | {seed} | {way} | {means[0]:.2f} | {means[1]:.2f} | {means[2]:.2f} | {over} | "
                      f"{statistics.mean(losses[180:]):.3f} |", flush=True)  # fmt: skip
    if micro > 1:
        for family in given.families:
            print(f"{family}: loads so far, gradient of the loss off by {gradient_error(family, micro):.1%}")


if __name__ == "__main__":
    main()
