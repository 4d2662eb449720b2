"""Two MoE layers with residuals under a layout of ranks, against one process in float64.

    d     data-parallel rank, each with sequences of its own        loss of d = sum(h * dy); the mean over d counts
    tp    ranks that hold the same sequences, or positions of them

Legend: B batch, L positions, D model dim, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from comparing import relative_error
from trimtab import oracle
from trimtab.layer import MoEConfig
from trimtab.parallel.clip import clip_grad_norm_
from trimtab.parallel.ddp import ddp
from trimtab.parallel.fsdp import fully_shard_moe
from trimtab.parallel.plan import parallelize
from trimtab.parallel.replicas import check_replicated
from trimtab.parallel.style import ExpertParallel
from trimtab.routing.config import RouterConfig

E, D, F, K = 4, 8, 8, 2


@dataclass(frozen=True, kw_only=True)
class Layout:
    """W ranks as dense [dp, tp] and experts [edp, etp, ep]."""

    ep: int = 1
    etp: int = 1
    tp: int = 1
    tokens: str = "own"
    data: str = "none"
    transport: str = "alltoall"
    combine: str = "sum"
    bias: bool = False
    activation: str = "swiglu"


class Model(nn.Module):
    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        super().__init__()
        config = MoEConfig(
            dim=D, hidden=F, router=RouterConfig(num_experts=E, top_k=K, normalize=True), shared_hidden=6,
            bias=layout.bias, activation=layout.activation, dtype=dtype,
        )  # fmt: skip
        self.layers = nn.ModuleList(nn.ModuleDict({"moe": config.build()}) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = h + layer["moe"](h).y
        return h


def build(layout: Layout, dtype: torch.dtype, hot: bool) -> Model:
    torch.manual_seed(5)
    model = Model(layout, torch.float64)
    with torch.no_grad():
        for layer in model.layers:
            layer["moe"].router.weight[:, 0] *= 6 if hot else 1
    return model.to(dtype)


def truth_forward(model: Model, x: Tensor) -> Tensor:
    """The same layers by plain formulas and the oracle, every parameter in float64."""
    h = x.reshape(-1, D)
    activations = {"swiglu": oracle.swiglu, "clamped_swiglu": clamped}
    for layer in model.layers:
        moe = layer["moe"]
        p = (h @ moe.router.weight.T).softmax(-1)
        ids = p.topk(K, -1).indices
        w = p.gather(1, ids)
        e = moe.experts
        y = oracle.moe(
            h, ids, w / w.sum(-1, keepdim=True), e.up, e.down, up_bias_EI=e.up_bias, down_bias_ED=e.down_bias,
            activation=activations[moe.config.activation],
        )  # fmt: skip
        up, down = moe.shared.up, moe.shared.down
        act = activations[moe.config.activation]
        h = h + y + act(h @ weight(up).T) @ weight(down).T
    return h.view(x.shape)


def weight(module: Any) -> Tensor:
    found: Tensor = module.weight if isinstance(module, nn.Module) else module
    return found


def clamped(pre: Tensor) -> Tensor:
    """gpt-oss: interleaved, clamped at 7, alpha 1.702."""
    gate, up = pre[..., ::2].clamp(max=7), pre[..., 1::2].clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def data_of(d: int, micro: int, batch: int, length: int, case: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x, dy) [B, L, D] in float64, exact in `dtype`."""
    g = torch.Generator().manual_seed(100 * d + 10 * micro + batch + length)
    length = 0 if case == "cold" and d == 0 else length
    x, dy = (torch.randn(batch, length, D, generator=g, dtype=torch.float64) for _ in range(2))
    if case == "hot":
        x[..., 0] = 3
    return x.to(dtype).double(), dy.to(dtype).double()


def meshes(layout: Layout) -> tuple[DeviceMesh, DeviceMesh]:
    ranks = torch.arange(dist.get_world_size())
    edp, dp = len(ranks) // (layout.ep * layout.etp), len(ranks) // layout.tp
    experts = DeviceMesh("cpu", ranks.view(edp, layout.etp, layout.ep), mesh_dim_names=("edp", "etp", "ep"))
    if layout.data == "hsdp":
        dense = ranks.view(2, dp // 2, layout.tp)
        return DeviceMesh("cpu", dense, mesh_dim_names=("replicate", "shard", "tp")), experts
    return DeviceMesh("cpu", ranks.view(dp, layout.tp), mesh_dim_names=("dp", "tp")), experts


def spread(model: Model, layout: Layout, dense: DeviceMesh, experts: DeviceMesh) -> nn.Module:
    """The calls that a user makes."""
    style = ExpertParallel(
        transport=layout.transport, tokens=layout.tokens, combine=layout.combine,  # type: ignore[arg-type]
        tp_mesh=dense["tp"] if layout.tokens != "own" else None, etp="etp" if layout.etp > 1 else None,
    )  # fmt: skip
    parallelize(model, experts["etp", "ep"] if layout.etp > 1 else experts["ep"], {"layers.*.moe": style})
    if layout.data == "fsdp":
        return fully_shard_moe(model, dense["dp"], experts["edp"], blocks=["layers.*.moe"])
    if layout.data == "hsdp":
        return fully_shard_moe(model, dense["replicate", "shard"], experts["edp"])
    return ddp(model, dense["dp"], experts["edp"]) if layout.data == "ddp" else model


def full_gradients(model: nn.Module, layout: Layout, dense: DeviceMesh, experts: DeviceMesh) -> dict[str, Tensor]:
    """Whole gradients of the mean loss. Without data parallelism they are reduced by hand here."""
    found = {}
    for name, param in model.named_parameters():
        grad, name = param.grad, name.removeprefix("module.")
        assert grad is not None, name
        if layout.data == "none":
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            group = (experts["edp"] if ".experts." in name else dense["dp"]).get_group()
            dist.all_reduce(local, group=group)
            local /= dense["dp"].size()
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def run_layouts(layouts: list[Layout], cases: list[tuple[str, int, int, int]]) -> dict[str, float]:
    """Largest relative error of anything, by layout, case and tensor. Cases: (kind, micro-batches, B, L)."""
    errors: dict[str, float] = {}
    for layout in layouts:
        dense, experts = meshes(layout)
        for case in cases:
            for name, error in run_case(layout, case, dense, experts).items():
                errors[f"{layout} {case} {name}"] = error
    return errors


def run_case(
    layout: Layout, case: tuple[str, int, int, int], dense: DeviceMesh, experts: DeviceMesh
) -> dict[str, float]:
    kind, micros, batch, length = case
    dtype, rank = torch.float32, dist.get_rank()
    d, t, dp = rank // layout.tp, rank % layout.tp, dist.get_world_size() // layout.tp
    truth = build(layout, dtype, kind == "hot").double()
    model = build(layout, dtype, kind == "hot")
    runner, errors, total = spread(model, layout, dense, experts), {}, torch.zeros((), dtype=torch.float64)
    for micro in range(micros):
        for other in range(dp):
            x, dy = data_of(other, micro, batch, length, kind, dtype)
            x.requires_grad_()
            y = truth_forward(truth, x)
            total = total + (y * dy).sum() / dp
            if other != d:
                continue
            cuts = uneven(x.shape[1], layout.tp)
            here = slice(cuts[t], cuts[t + 1]) if layout.tokens == "sharded" else slice(None)
            ours = x.detach()[:, here].to(dtype).requires_grad_()
            if layout.data in ("fsdp", "hsdp") and kind == "nosync":
                runner.set_requires_gradient_sync(micro == micros - 1)  # type: ignore[operator]
            out = runner(ours)
            out.backward(dy[:, here].to(dtype))
            (dx,) = torch.autograd.grad((y * dy).sum(), x, retain_graph=True)
            errors[f"y{micro}"] = relative_error(out, y[:, here])
            assert ours.grad is not None
            errors[f"dx{micro}"] = relative_error(ours.grad, dx[:, here])
    total.backward()
    for name, grad in full_gradients(runner, layout, dense, experts).items():
        true = truth.get_parameter(name).grad
        errors[f"d {name}"] = relative_error(grad, torch.zeros_like(grad) if true is None else true)
    norm = clip_grad_norm_(runner, 0.5)
    want = torch.nn.utils.clip_grad_norm_(truth.parameters(), 0.5)
    errors["norm"] = relative_error(norm, want)
    errors["clipped"] = relative_error(clip_grad_norm_(runner, 1e9), want.clamp(max=0.5))
    check_replicated(runner)
    return errors


def uneven(length: int, ranks: int) -> tuple[int, ...]:
    """Cuts with a first shard of one position, an empty second one where there are three, the rest in the last."""
    inner = [min(1, length)] * (ranks - 1)
    return (0, *inner, length)
