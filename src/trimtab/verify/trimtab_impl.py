"""trimtab's own layer, laid out by trimtab's own `parallelize`, as a user would."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from trimtab.errors import InputError
from trimtab.experts.lora import add_adapter, merge_adapter
from trimtab.moe import MoE, MoEConfig
from trimtab.optim import Muon
from trimtab.parallel.ddp import ddp, reduce_main_grads
from trimtab.parallel.expert_parallel import ExpertParallel, parallelize
from trimtab.parallel.fsdp import fully_shard_moe
from trimtab.parallel.meshes import local_part
from trimtab.routing.config import RouterConfig
from trimtab.routing.recompute import replay_in_recompute
from trimtab.verify.implementation import Outcome, Place, Share, Subject, gradients_of, over_all_ranks, short_name
from trimtab.verify.patterns import Pattern
from trimtab.verify.topologies import Topology
from trimtab.verify.truth import ADAMW, BALANCE, DOCUMENTS, RANK, SCALE, LayerWeights, Sizes

SHORT = {"router.weight": "router", "experts.gate_up": "up", "experts.down": "down"} | {
    f"experts.adapters.{name}.{weight}{short}_{kind}": f"{name}.{short}_{kind}"
    for name in ("one", "idle")
    for weight, short in (("gate_", "up"), ("", "down"))
    for kind in "ab"
}


REPLICATED: dict[str, dict[str, Any]] = {
    "none": {},
    "replicas": {"replicate_experts": 0.0, "copy_cost": 0},
    "autoreplicas": {"replicate_experts": "auto", "copy_cost": 2},
}  # fmt: skip
"""Options of `ExpertParallel`, by the topology's word."""


AGAIN: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "none": lambda layer, h: layer(h),
    "recomputed": partial(checkpoint, use_reentrant=False, context_fn=replay_in_recompute),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "rerouted": partial(checkpoint, use_reentrant=False),
    "compiled": lambda layer, h: layer(h),
}
"""How a layer is called, by the topology's word."""


Named = tuple[str, nn.Parameter]
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW),
    "muon": lambda model: Muon(model, ns_dtype=torch.float64, **ADAMW),
}
"""By the topology's word."""


class Impl:
    """trimtab, which can be asked for everything that the machine has."""

    name = "trimtab"
    refusal: type[Exception] = InputError

    def lacks(self, topology: Topology, pattern: Pattern) -> str | None:
        local = os.environ.get("LOCAL_WORLD_SIZE")  # torchrun tells, other ranks are local
        alone = local is None or (local == os.environ.get("WORLD_SIZE") and not torch.cuda.is_available())
        far = topology.transport == "shared_memory" and not alone
        return "shared memory is for the ranks of one host without a GPU" if far else None

    def build(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> Subject:
        return Layers(place, sizes, weights)


class Stack(nn.Module):
    """MoE layers with a residual in between; gives back (y, loads by layer, balance losses)."""

    def __init__(self, sizes: Sizes, t: Topology, device: torch.device) -> None:
        super().__init__()
        balance = BALANCE if t.cp > 1 or t.packed != "none" else 0.0
        router = RouterConfig(
            num_experts=sizes.num_experts, top_k=sizes.top_k, normalize=False, sequence_aux_loss=balance
        )
        config = MoEConfig(
            dim=sizes.dim, hidden=sizes.hidden, router=router, combine=t.combine, dtype=sizes.dtype, device=device,
            main_grad="accumulate" if t.sink == "maingrad" else "off", delay_wgrad=t.later == "delayed",
        )  # fmt: skip
        self.rerun, self.cut = t.rerun, max(t.cp, t.tp) > 1
        self.moes: list[MoE] = [config.build(layer=f"layers.{i}") for i in range(sizes.layers)]
        self.layers = nn.ModuleList(self.moes)

    def forward(
        self, h: Tensor, mask: Tensor | None, ids: Tensor | None, documents: Tensor | None
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        y, loads, losses = h, [], []
        given = {"token_mask": mask, "ids": ids, "sequence_ids": documents}
        most = DOCUMENTS if self.cut and documents is not None else None
        for i, moe in enumerate(self.moes):
            h = h + y if i else h

            def layer(h: Tensor, moe: MoE = moe) -> tuple[Tensor, ...]:
                y, found, load, _ = moe(h, **given, num_sequences=most)
                return y, load, *found.values()

            y, load, *found = AGAIN[self.rerun](layer, h)
            loads.append(load)
            losses += found
        return y, loads, losses


@torch.no_grad()
def _fill(moe: MoE, values: dict[str, Tensor]) -> None:
    """Give the layer's parameters values by their short names."""
    for name, short in SHORT.items():
        if short in values:
            param = moe.get_parameter(name)
            param.copy_(values[short].view_as(param))


class Layers:
    """One topology's stack."""

    def __init__(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights]) -> None:
        t, self.place = place.topology, place
        stack = Stack(sizes, t, place.device)
        for moe, w in zip(stack.moes, weights, strict=True):
            up, down = w.raw or (w.up_EID, w.down_EDF)
            _fill(moe, {"router": w.router_ED, "up": up, "down": down})
            if sizes.codes != "none":
                moe.experts.quantize_(sizes.codes)
            for name, param in moe.experts.named_parameters():
                param.requires_grad_(param.requires_grad and name.removeprefix("gate_") in w.trained)
        for name in weights[0].adapters:
            add_adapter(stack, name, rank=RANK, alpha=RANK * SCALE, shared=sizes.adapter == "sharedlora")
        for moe, w in zip(stack.moes, weights, strict=True):
            _fill(moe, {f"{name}.{own}": value for name, held in w.adapters.items() for own, value in held.items()})
        style = ExpertParallel(
            transport="alltoall" if t.transport == "local" else t.transport, tokens=t.tokens, combine=t.combine,
            tp_mesh=place.dense["tp"] if t.tp > 1 else None, cp_mesh=place.cp, etp="etp" if t.etp > 1 else None,
            **REPLICATED[t.replicas],
        )  # fmt: skip
        parallelize(stack, place.experts["etp", "ep"] if t.etp > 1 else place.experts["ep"], {"layers.*": style})
        if sizes.adapter == "mergedlora":
            merge_adapter(stack, "one")
            for moe in stack.moes:
                moe.experts.requires_grad_(True)
        for moe in stack.moes if t.rerun == "compiled" else ():
            moe.compile(backend="aot_eager", dynamic=True)
        self.moes: list[MoE] = stack.moes
        experts = [p for moe in stack.moes for p in moe.experts.parameters(recurse=False) if p.requires_grad]
        self.fused = experts if t.sink == "maingrad" else []
        self.model: Any = stack
        if t.data == "fsdp":
            self.model = fully_shard_moe(stack, place.dense["dp"], place.experts["edp"])
        elif t.data == "hsdp":
            self.model = fully_shard_moe(stack, place.dense["outer", "shard"], place.experts["edp"])
        elif t.data == "ddp":
            self.model = ddp(stack, place.dense["dp"], place.experts["edp"])

    def step(self, share: Share) -> Outcome:
        self.model.zero_grad()
        for param in self.fused:
            param.main_grad = torch.zeros_like(param)  # type: ignore[attr-defined]
            param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        x = share.x_BlD.clone().requires_grad_()
        y, loads, losses = self.model(x, share.mask_Bl, share.ids_BlK, share.documents_Bl)
        torch.autograd.backward((y, *losses), (share.dy_BlD, *map(torch.ones_like, losses)))
        assert x.grad is not None
        for moe in reversed(self.moes):
            moe.experts.backward_dw()
        self._take_main_grads()
        params = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad or p.grad is not None]
        grads = gradients_of(params, self.place, SHORT)
        grads = {name: g.flatten(1, 2) if g is not None and g.ndim == 4 else g for name, g in grads.items()}
        loads = [over_all_ranks(load, self.place) for load in loads]
        done = [report for moe in self.moes if (report := moe.dispatcher.replicated) is not None]
        return Outcome(
            y=y, dx=x.grad, grads=grads, loads=loads, copied=[report.replicas_P for report in done],
            slots=[report.loads_after_P for report in done],
            updated=updated(self.model, params, self.place.topology.optimizer, SHORT),
        )  # fmt: skip

    def _take_main_grads(self) -> None:
        """`main_grad` where gradients are looked for; what autograd put there besides is no gradient."""
        if self.fused and self.place.topology.data == "ddp":
            assert all(param.grad is None for param in self.fused)
            reduce_main_grads(self.model, self.place.dense["dp"], self.place.experts["edp"])
        for param in self.fused:
            assert param.grad_added_to_main_grad  # type: ignore[attr-defined]
            param.grad = param.main_grad  # type: ignore[attr-defined]


@torch.no_grad()
def updated(model: nn.Module, params: Sequence[Named], optimizer: str, short: dict[str, str]) -> dict[str, Tensor]:
    """Parameters behind the steps that `truth.updated` takes, which are then taken back. Collective."""
    if optimizer == "none":
        return {}
    before, stepper = [local_part(p).clone() for _, p in params], OPTIMIZERS[optimizer](model)
    for _ in range(2):
        for _, param in params:
            param.grad = torch.mul(1 + param.detach(), param.grad)  # type: ignore[arg-type]
        stepper.step()
    whole = {name: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for name, p in params}
    for (_, param), values in zip(params, before, strict=True):
        local_part(param).copy_(values)
    return {short_name(name, short): p.flatten(1, 2) if p.ndim == 4 else p for name, p in whole.items()}
