"""What an expert-parallel run is: a family on a mesh of ranks, and how the tokens fall.

A pattern decides each data-parallel rank's batch and, where it forces them, the experts of each of its slots, as a
function of (data-parallel rank, layer) alone. So one process can repeat what every rank did.

Legend: T tokens of a call, K experts per token, E experts, e experts per rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .families import Batch, experts_modules, sample_batch
from .peft_case import adapt


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the parallel dimensions, by transformers' names for them."""

    ep: int
    fsdp: int
    tp: int = 1
    replicate: int = 1

    @property
    def ranks(self) -> int:
        return self.replicate * self.fsdp * self.tp

    @property
    def data_ranks(self) -> int:
        return self.replicate * self.fsdp

    def data_rank(self, rank: int) -> int:
        """Which batch a rank works on: the ranks of a TP group share one."""
        return rank // self.tp

    def home(self, data_rank: int) -> int:
        """Place in its expert group of (the first rank of) a data-parallel rank."""
        return data_rank * self.tp % self.ep

    def __str__(self) -> str:
        return f"ep{self.ep}-fsdp{self.fsdp}-tp{self.tp}-replicate{self.replicate}"


EVEN = (2, 12)
LARGE = (4, 32)
UNEVEN = ((2, 12), (3, 7), (1, 5), (2, 9))
"""(batch, length) of each data-parallel rank."""

PATTERNS = ("natural", "uneven", "balanced", "cold", "hot", "own")
"""natural: where the router sends them      uneven: the same, no two ranks' batches alike
balanced: as many to each expert         cold: nothing to one rank
hot: every slot to one expert            own: every slot of a rank to its own experts

And "crowded", where it is asked for: balanced, with rows enough for every expert.
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model on one mesh, run once for each pattern.

    experts, exchange: the names of the two halves in transformers' registries.
    steps: microbatches whose gradients accumulate. unsynced: reduce them after the last one only.
    frozen: part of the names of parameters that need no gradient. recompute: gradient checkpointing.
    lora: peft's adapters on all experts, which are then all that is trained; "attention" too.
    codes: what the experts are quantized to while they are read; "" for weights.
    """

    family: str
    mesh: Mesh
    dtype: torch.dtype = torch.float32
    seed: int = 0
    patterns: tuple[str, ...] = PATTERNS
    experts: str = "trimtab"
    exchange: str = "trimtab"
    steps: int = 1
    unsynced: bool = False
    frozen: str = ""
    recompute: str = ""
    lora: str = ""
    codes: str = ""

    def __str__(self) -> str:
        way = f"{self.steps} steps{self.unsynced * ' unsynced'} frozen={self.frozen!r} recompute={self.recompute!r}"
        way += f" lora={self.lora!r} codes={self.codes!r}"
        return f"{self.family} {self.mesh} {self.exchange}+{self.experts} {str(self.dtype)[6:]} seed {self.seed} {way}"


def batches(case: Case, model: Any, pattern: str, data_rank: int) -> list[Batch]:
    """The microbatches of a data-parallel rank."""
    batch, length = {"uneven": UNEVEN[data_rank], "crowded": LARGE}.get(pattern, EVEN)
    seeds = [1000 * case.seed + 10 * data_rank + step for step in range(case.steps)]
    return [sample_batch(model, batch, length, seed) for seed in seeds]


def forced_ids(pattern: str, ids_TK: Tensor, mesh: Mesh, num_experts: int, data_rank: int, layer: int) -> Tensor:
    """The experts of each slot under a pattern: [T, K], distinct within a token except under "hot"."""
    if pattern in ("natural", "uneven"):
        return ids_TK
    if pattern == "hot":
        return torch.full_like(ids_TK, (3 * layer + 1) % num_experts)
    tokens, top_k = ids_TK.shape
    if pattern in ("balanced", "crowded"):
        return (torch.arange(ids_TK.numel()).view_as(ids_TK) + layer + data_rank) % num_experts
    generator = torch.Generator().manual_seed(100 * data_rank + layer)
    score_TE = torch.rand(tokens, num_experts, generator=generator)
    owner_E = torch.arange(num_experts) // (num_experts // mesh.ep)
    banned_E = {"cold": owner_E == mesh.ep - 1, "own": owner_E != mesh.home(data_rank)}[pattern]
    return score_TE.masked_fill(banned_E, -1.0).topk(top_k).indices.to(ids_TK)


class Router:
    """Hooks on a model's experts modules: forces the experts of each slot, and remembers them."""

    def __init__(self, model: nn.Module, mesh: Mesh, num_experts: dict[str, int]) -> None:
        self.mesh = mesh
        self.num_experts = num_experts
        self.pattern, self.data_rank = "natural", 0
        self.seen: dict[str, Tensor] = {}
        self.calls = 0
        for layer, (name, module) in enumerate(experts_modules(model).items()):
            module.register_forward_pre_hook(self._hook(name, layer))

    def _hook(self, name: str, layer: int) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
        def force(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden, ids, weights = args
            ids = forced_ids(self.pattern, ids, self.mesh, self.num_experts[name], self.data_rank, layer)
            self.seen[name] = ids.clone()
            self.calls += 1
            return hidden, ids, weights

        return force


def freeze(case: Case, model: nn.Module) -> None:
    """Takes the gradient from the parameters that the case names, and gives the model its adapters."""
    if case.lora:
        adapt(model, target_modules=["q_proj"] if case.lora == "attention" else [])
    for name, parameter in model.named_parameters():
        if case.frozen and case.frozen in name:
            parameter.requires_grad_(False)
