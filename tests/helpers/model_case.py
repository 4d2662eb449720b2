"""A family of transformers on a mesh of ranks, how its tokens fall, and a run of it on one rank or in one process.

A pattern decides each data-parallel rank's batch and, where it forces them, the experts of each of its slots, as a
function of (data-parallel rank, layer) alone. So one process can repeat what every rank did.

Legend: T tokens of a call, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trimtab.integrations.transformers import LoadBalancer
from trimtab.integrations.transformers.routers.find import find_routers
from trimtab.integrations.transformers.routers.observe import Observed, record, replay
from trimtab.routing.observers import Loads
from trimtab.routing.replay import Decisions

from .families import Batch, experts_modules, forward, sample_batch
from .peft_case import adapt


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Sizes of the parallel dimensions, by transformers' names for them. Without any it is one process."""

    ep: int = 1
    fsdp: int = 1
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

    def __str__(self) -> str:
        return f"ep{self.ep}-fsdp{self.fsdp}-tp{self.tp}-replicate{self.replicate}"


SIZES = {"crowded": (4, 32), "few": (1, 2)}
"""(batch, length) of every data-parallel rank, where it is not (2, 12)."""
UNEVEN = ((2, 12), (3, 7), (1, 5), (2, 9))

PATTERNS = ("natural", "uneven", "balanced", "cold", "hot", "own")
"""natural: where the router sends them      uneven: the same, no two ranks' batches alike
balanced: as many to each expert         cold: nothing to one rank
hot: every slot to one expert            own: every slot of a rank to its own experts

And where it is asked for
few: natural, of two tokens              crowded: balanced, with rows enough for every expert
told: the routers replay experts that are drawn
"""

BALANCE: dict[str, dict[str, Any]] = {
    "own": {"rate": 0.05, "aux_loss": 0.5},
    "sign": {"rate": 0.05, "add_bias": True, "aux_loss": 0.5, "z_loss": 0.05},
    "quantile": {"bias": "quantile", "add_bias": True},
}
"""Options of a `LoadBalancer`: a bias of the checkpoint and of one's own, both rules, both losses."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model on one mesh, run once for each pattern.

    experts, exchange: the names of the two halves in transformers' registries.
    steps: microbatches whose gradients accumulate. unsynced: reduce them after the last one only.
    frozen: part of the names of parameters that need no gradient. recompute: gradient checkpointing.
    lora: peft's adapters on all experts, which are then all that is trained; "attention" too.
    codes: what the experts are quantized to while they are read; "" for weights.
    balance: of `BALANCE`: two optimizer steps over padded batches instead of patterns. first_pass: before each.
    ddp: the ranks hold the whole model.
    """

    family: str
    mesh: Mesh = Mesh()
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
    autocast: bool = False
    balance: str = ""
    first_pass: bool = False
    ddp: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one pattern left on one rank: values and full gradients by name, and the experts of each slot."""

    values: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    routing: dict[str, Tensor]


def batches(case: Case, model: Any, pattern: str, data_rank: int) -> list[Batch]:
    """The microbatches of a data-parallel rank."""
    batch, length = UNEVEN[data_rank] if pattern == "uneven" else SIZES.get(pattern, (2, 12))
    seeds = [1000 * case.seed + 10 * data_rank + step for step in range(case.steps)]
    return [sample_batch(model, batch, length, seed, padded=bool(case.balance)) for seed in seeds]


def forced_ids(pattern: str, ids_TK: Tensor, mesh: Mesh, num_experts: int, data_rank: int, layer: int) -> Tensor:
    """The experts of each slot under a pattern: [T, K], distinct within a token except under "hot"."""
    if pattern in ("natural", "uneven", "few", "told"):
        return ids_TK
    if pattern == "hot":
        return torch.full_like(ids_TK, (3 * layer + 1) % num_experts)
    tokens, top_k = ids_TK.shape
    if pattern in ("balanced", "crowded"):
        return (torch.arange(ids_TK.numel()).view_as(ids_TK) + layer + data_rank) % num_experts
    generator = torch.Generator().manual_seed(100 * data_rank + layer)
    score_TE = torch.rand(tokens, num_experts, generator=generator)
    owner_E = torch.arange(num_experts) // (num_experts // mesh.ep)
    home = data_rank * mesh.tp % mesh.ep
    banned_E = {"cold": owner_E == mesh.ep - 1, "own": owner_E != home}[pattern]
    return score_TE.masked_fill(banned_E, -1.0).topk(top_k).indices.to(ids_TK)


class Router:
    """Hooks on a model's experts modules: forces the experts of each slot, and remembers them. ep: ranks that its
    experts are spread over."""

    def __init__(self, model: nn.Module, mesh: Mesh, ep: int) -> None:
        self.mesh = mesh
        self.pattern, self.data_rank = "natural", 0
        self.seen: dict[str, Tensor] = {}
        self.calls = 0
        for layer, (name, module) in enumerate(experts_modules(model).items()):
            experts = int(module.num_experts) * ep  # type: ignore[call-overload]
            module.register_forward_pre_hook(self._hook(name, layer, experts))

    def _hook(self, name: str, layer: int, experts: int) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
        def force(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden, ids, weights = args
            ids = forced_ids(self.pattern, ids, self.mesh, experts, self.data_rank, layer)
            self.seen[name] = ids.clone()
            self.calls += 1
            return hidden, ids, weights

        return force


def prepare(case: Case, model: Any) -> None:
    """Gives the model its adapters, and takes the gradient from the parameters that the case names."""
    if case.lora:
        adapt(model, target_modules=["q_proj"] if case.lora == "attention" else [])
    for name, parameter in model.named_parameters():
        if case.frozen and case.frozen in name:
            parameter.requires_grad_(False)
    if case.recompute:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": case.recompute == "reentrant"})
        model.enable_input_require_grads()


def drawn(model: Any, batch: Batch, seed: int) -> Decisions:
    """Distinct experts for each token; the second position of a sequence is left to the router."""
    places, generator = find_routers(model), torch.Generator().manual_seed(seed)
    E = places[0].num_experts
    ids = torch.rand(*batch["input_ids"].shape, len(places), E, generator=generator).argsort(-1)
    ids = ids[..., : places[0].top_k].clone()
    ids[:, 1] = -1
    return Decisions(ids=ids, num_experts=E, layers=tuple(place.name for place in places))


def run(case: Case, model: Any, router: Router, pattern: str, data_rank: int, parts: int) -> dict[str, Tensor]:
    """Forward and backward of a data-parallel rank's micro-batches, each with one of `parts` of the mean loss."""
    router.pattern, router.data_rank, router.seen = pattern, data_rank, {}
    outputs, losses = [], []
    work = batches(case, model, pattern, data_rank)
    for step, batch in enumerate(work):
        if case.unsynced:
            model.set_requires_gradient_sync(step == len(work) - 1)
        with ExitStack() as around:
            if pattern == "told":
                given = drawn(model, batch, 100 * data_rank + step)
                recording = around.enter_context(record(model))
                around.enter_context(replay(model, given))
            around.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=case.autocast))
            output, loss = forward(model, batch)
        (loss / parts).backward()
        if pattern == "told":
            assert {len(calls) for calls in recording.calls.values()} == {1}, "each forward is recorded once"
            ids = recording.decisions().ids
            assert torch.equal(ids, torch.where(given.ids < 0, ids, given.ids))
        outputs.append(output.detach())
        losses.append(loss.detach())
    for name, module in experts_modules(model).items():
        if case.experts.startswith("trimtab") and name in router.seen:  # no token comes to ernie's for another modality
            trained = [p for p in module.parameters() if p.requires_grad]
            assert all(p.grad is not None and p.grad.shape == p.shape for p in trained), f"{name}: no whole gradient"
    return {"output": torch.stack(outputs), "loss": torch.stack(losses)}


def balance(case: Case, model: Any, rank: int | None) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """Two optimizer steps over the same padded batches under a `LoadBalancer`: all that both show, and the gradients
    of the second. rank: of the data-parallel ranks; None for one process with the batches of all as one, and behind a
    first pass micro-batches are one as well."""
    by_rank = [batches(case, model, "natural", r) for r in range(case.mesh.data_ranks)]
    whole = [{key: torch.cat([one[key] for one in micro]) for key in micro[0]} for micro in zip(*by_rank, strict=True)]
    if rank is None and case.first_pass:
        whole = [{key: torch.cat([batch[key] for batch in whole]) for key in whole[0]}]
    work, shares = (whole, 1) if rank is None else (by_rank[rank], len(by_rank))
    slots = 2 * sum(int(batch["attention_mask"].sum()) for batch in whole)
    targets = sum(int((batch["labels"][:, 1:] >= 0).sum()) for batch in whole)
    balancer, loads = LoadBalancer(model.train(), **BALANCE[case.balance]), Loads()
    Observed(model, loads)
    balancer.micro_batches = len(work)
    runner = DistributedDataParallel(model) if case.ddp and rank is not None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    values: dict[str, Tensor] = {}
    for step in range(2):
        model.zero_grad()
        inputs = [{key: value for key, value in batch.items() if key != "labels"} for batch in work]
        if case.first_pass and rank is not None:
            with balancer.first_pass():
                for given in inputs:
                    runner(**given)
        for given, batch in zip(inputs, work, strict=True):
            logits, labels = runner(**given).logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
            (F.cross_entropy(logits, labels, reduction="sum") * shares / targets).backward()
        grads = {name: p.grad if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        counted = torch.cat([*loads.take().values()])
        if rank is not None:
            dist.all_reduce(counted)
        found = balancer.step()
        assert {int(load.sum()) for load in found.values()} == {slots}, "each token is counted once, padding never"
        biases = {name: b.clone() for name, b in model.named_buffers() if name.endswith("bias")}
        assert step or all(bias.any() for bias in biases.values())
        seen = {"counted": counted} | found | balancer.losses | biases
        values |= {f"{name} of step {step}": value for name, value in seen.items()}
    return values, grads
