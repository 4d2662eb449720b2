"""What one process computes in float64: two MoE layers with residuals and balance losses, by plain formulas.

    h = h + moe(h)        loss of a data-parallel rank d = sum(h * dy); balance losses over all of them

Legend: B batch, L positions, D model dim, K experts per token, E experts, N = B * L tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from helpers.layer_case import truth
from trimtab.experts.lora import add_adapter, in_use, set_adapter
from trimtab.moe import MoEConfig
from trimtab.parallel.expert_parallel import ExpertParallel, parallelize
from trimtab.routing.config import RouterConfig

E, D, F, K, LAYERS = 4, 8, 8, 2, 2
COEFFICIENTS = {"aux": 0.5, "sequence_aux": 0.25, "global_aux": 1.0, "z": 0.125}


@dataclass(frozen=True, kw_only=True)
class Case:
    """How tokens fall. kind: plain; cold, d = 0 has none; hot, one expert gets nearly all.

    totals: micro-batches are parts of a step whose totals are known, and gradients are reduced in the last one only.
    masked: some tokens are not real. replayed: ids are given.
    """

    kind: str = "plain"
    micros: int = 1
    batch: int = 2
    length: int = 3
    totals: bool = False
    masked: bool = False
    replayed: bool = False


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One micro-batch of one d: x, dy [B, L, D] in float64, exact in float32; mask [B, L]; ids [B, L, K]."""

    x: Tensor
    dy: Tensor
    mask: Tensor | None
    ids: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Solved:
    """By micro-batch: losses, and by d: y, and the gradients of its own loss and of the balance losses. The same two
    for the parameters, of the sums over d. tokens and counts [E] of the step, the latter by router name."""

    y: list[list[Tensor]]
    losses: list[float]
    dx: list[list[tuple[Tensor, Tensor]]]
    grads: dict[str, tuple[Tensor, Tensor]]
    tokens: int
    counts: dict[str, Tensor]


class Model(nn.Module):
    """Gives back (h, sum of all balance losses)."""

    def __init__(self, dtype: torch.dtype, balance: bool = True, **config: Any) -> None:
        super().__init__()
        c = COEFFICIENTS if balance else dict.fromkeys(COEFFICIENTS, 0.0)
        router = RouterConfig(
            num_experts=E, top_k=K, normalize=True, aux_loss=c["aux"], sequence_aux_loss=c["sequence_aux"],
            global_aux_loss=c["global_aux"], z_loss=c["z"],
        )  # fmt: skip
        made = MoEConfig(**{"dim": D, "hidden": F, "router": router, "shared_hidden": 6, "dtype": dtype} | config)
        self.layers = nn.ModuleList(nn.ModuleDict({"moe": made.build()}) for _ in range(LAYERS))

    def forward(self, h: Tensor, mask: Tensor | None = None, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        losses = h.new_zeros(())
        for layer in self.layers:
            seen = h if mask is None else h.masked_fill(~mask[..., None], float("nan"))
            out = layer["moe"](seen, token_mask=mask, ids=ids)
            h, losses = h + out.y, losses + sum(out.losses.values())
        return h, losses


def build(dtype: torch.dtype, lora: bool = False, **config: Any) -> Model:
    """The same values for every layout, exact in float32. lora: an adapter of each expert, one that all share, and one
    that is idle; b is not where it begins, at zero."""
    torch.manual_seed(5)
    model = Model(torch.float32, **config)
    for name, shared in (("own", False), ("shared", True), ("idle", False)) if lora else ():
        for param in add_adapter(model, name, rank=3, shared=shared):
            param.data.normal_().mul_(0.25)
    if lora:
        set_adapter(model, "own", "shared")
    return model.to(dtype)


def spread(model: Any, pattern: str, etp: bool, **options: Any) -> Any:
    """The layers that match over all ranks, which share F where `etp`, else the experts."""
    ranks = dist.get_world_size()
    names = ("etp", "ep") if etp else ("ep",)
    mesh = init_device_mesh("cpu", (ranks, 1) if etp else (ranks,), mesh_dim_names=names)
    return parallelize(model, mesh, {pattern: ExpertParallel(etp="etp" if etp else None, **options)})


def adapted(experts: Any, name: str) -> Tensor:
    """A weight with what its active adapters add."""
    weight: Tensor = experts.get_parameter(name)
    for adapter in in_use(experts):
        a, b = (adapter.get_parameter(f"{name}_{kind}") for kind in "ab")
        weight = weight + adapter.scale * (b.flatten(1, -2) @ a).view(len(b), *weight.shape[1:])
    return weight


def data_of(case: Case, d: int, micro: int) -> Batch:
    g = torch.Generator().manual_seed(1000 * d + 100 * micro + 10 * case.batch + case.length)
    shape = (case.batch, 0 if case.kind == "cold" and d == 0 else case.length)
    x, dy = (torch.randn(*shape, D, generator=g) for _ in range(2))
    if case.kind == "hot":
        x *= 0.2
        x[..., 0] = 5
    mask = torch.rand(shape, generator=g) < 0.6 if case.masked else None
    ids = torch.rand(*shape, E, generator=g).argsort(-1)[..., :K] if case.replayed else None
    if ids is not None:
        ids = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.2, -1)
    return Batch(x=x.double(), dy=dy.double(), mask=mask, ids=ids)


def solve(case: Case, dp: int, **config: Any) -> Solved:
    model = build(torch.float32, **config).double()
    batches = [[data_of(case, d, micro) for d in range(dp)] for micro in range(case.micros)]
    xs = [[b.x.clone().requires_grad_() for b in step] for step in batches]
    runs = [[_forward(model, x, b) for x, b in zip(*both, strict=True)] for both in zip(xs, batches, strict=True)]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and ".idle." not in name}
    routers = [f"layers.{i}.moe.router" for i in range(LAYERS)]
    counts = [[_counts(run.ids[i] for run in step) for step in runs] for i in range(LAYERS)]
    tokens = [sum(int(run.real.sum()) for run in step) for step in runs]
    balance, values = torch.zeros((), dtype=torch.float64), []
    for m, step in enumerate(runs):
        loss = torch.zeros((), dtype=torch.float64)
        for i in range(LAYERS):
            of_step = sum(counts[i]) if case.totals else sum(counts[i][: m + 1])
            loss = loss + _balance(step, i, counts[i][m], of_step, sum(tokens) if case.totals else tokens[m])
        values.append(float(loss.detach()))
        balance = balance + loss
    own = sum((run.y * b.dy).sum() for s, t in zip(runs, batches, strict=True) for run, b in zip(s, t, strict=True))
    leaves = [*(x for step in xs for x in step), *trained.values()]
    every: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(own, leaves, retain_graph=True, **every)
    second = torch.autograd.grad(balance, leaves, **every) if balance.requires_grad else [g * 0 for g in first]
    pairs = list(zip(first, second, strict=True))
    return Solved(
        y=[[run.y.detach() for run in step] for step in runs], losses=values,
        dx=[[pairs.pop(0) for _ in step] for step in xs], grads=dict(zip(trained, pairs, strict=True)),
        tokens=sum(tokens), counts={name: sum(counts[i]).long() for i, name in enumerate(routers)},
    )  # fmt: skip


@dataclass
class _Run:
    y: Tensor
    real: Tensor
    logits: list[Tensor]
    ids: list[Tensor]


def _forward(model: Model, x: Tensor, b: Batch) -> _Run:
    real = torch.ones(x.shape[:2], dtype=torch.bool) if b.mask is None else b.mask
    run, h, real_T = _Run(y=x, real=real, logits=[], ids=[]), x.reshape(-1, D), real.flatten()
    for moe in (layer["moe"] for layer in model.layers):
        logits = h @ moe.router.weight.T
        ids = (logits.topk(K, -1).indices if b.ids is None else b.ids.reshape(-1, K)).masked_fill(~real_T[:, None], -1)
        whole = {f"experts.{name}": adapted(moe.experts, name) for name in moe.experts.adaptable}
        params = dict(moe.named_parameters()) | whole
        run.logits.append(logits)
        run.ids.append(ids)
        h = h + truth(moe, params, h.masked_fill(~real_T[:, None], 0), ids, real_T)
    run.y = h.view(x.shape)
    return run


def _counts(ids: Any) -> Tensor:
    return torch.stack([torch.bincount(i[i >= 0], minlength=E).double() for i in ids]).sum(0)


def _share(counts: Tensor) -> Tensor:
    return counts / counts.sum().clamp(min=1)


def _balance(step: list[_Run], i: int, counts: Tensor, of_step: Tensor, tokens: int) -> Tensor:
    """The four losses of one layer in one micro-batch, coefficients included."""
    c, total = COEFFICIENTS, torch.zeros((), dtype=torch.float64)
    for run in step:
        p = run.logits[i].softmax(-1) * run.real.reshape(-1, 1)
        batch, length = run.real.shape
        total = total + c["aux"] * E * (_share(counts) * p).sum() + c["global_aux"] * E * (_share(of_step) * p).sum()
        lse = run.logits[i].exp().sum(-1).log()
        total = total + c["z"] * (lse.square() * run.real.reshape(-1)).sum()
        for b in range(batch):
            here = slice(b * length, (b + 1) * length)
            total = total + c["sequence_aux"] * E * (_share(_counts([run.ids[i][here]])) * p[here]).sum()
    return total / max(tokens, 1)
