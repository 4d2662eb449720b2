"""Two layers with replicated experts, of every kind that experts come in and run in every way, over meshes of ranks.

The truth is one process with the same layers over all ranks' tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import trimtab
from helpers.comparing import full_value, relative_error
from helpers.ranks import packed, unpacked
from helpers.recompute_case import perturbed

E, D, F = 4, 64, 128
TOKENS = ((7, 5), (0, 9), (4, 0), (6, 6))
"""Of each rank, in each micro-batch."""
WAYS = ("", "recompute", "reentrant", "rounded", "compiled")
"""rounded: recomputed while the router of one rank would decide otherwise."""


class Blocks(nn.Module):
    """Most tokens go to the experts of the first rank."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        router = trimtab.RouterConfig(num_experts=E, top_k=2, score="sigmoid", bias=True)
        moe = trimtab.MoEConfig(**{"dim": D, "hidden": F, "router": router, "dtype": torch.float64} | config)
        self.layers = nn.ModuleList(moe.build(layer=f"layers.{i}") for i in range(2))
        with torch.no_grad():
            for layer in self.layers:
                layer.router.weight[3] = layer.router.weight[2]  # a tie, for "rounded"
                layer.router.expert_bias[0] = 1.0
        self.way = ""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:

            def block(h: Tensor, layer: nn.Module = layer) -> Tensor:
                y: Tensor = layer(h).y
                return h + torch.tanh(y)

            if self.way in ("recompute", "rounded"):
                x = checkpoint(block, x, use_reentrant=False, context_fn=trimtab.replay_in_recompute)
            elif self.way == "reentrant":
                x = checkpoint(block, x, use_reentrant=True)
            else:
                x = block(x)
        return x


def plain(model: Blocks) -> None:
    pass


def frozen(model: Blocks) -> None:
    for layer in model.layers:
        for param in layer.experts.parameters():
            param.requires_grad_(False)


def down_alone(model: Blocks) -> None:
    frozen(model)
    for layer in model.layers:
        layer.experts.down.requires_grad_(True)


def adapted(model: Blocks) -> None:
    """Adapters of each expert, of all, and an idle one."""
    g = torch.Generator().manual_seed(2)
    for name, shared in (("own", False), ("shared", True), ("idle", False)):
        for param in trimtab.add_adapter(model, name, rank=3, shared=shared):
            with torch.no_grad():
                param.copy_(torch.randn(param.shape, generator=g, dtype=torch.float64) / 16)
    trimtab.set_adapter(model, "own", "shared")


def coded(model: Blocks) -> None:
    for layer in model.layers:
        layer.experts.quantize_("nf4")


def coded_and_adapted(model: Blocks) -> None:
    coded(model)
    adapted(model)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """config: of the layers. change: what is done to the model before it is spread."""

    config: tuple[tuple[str, Any], ...] = ()
    change: Callable[[Blocks], None] = plain

    def build(self) -> Blocks:
        model = Blocks(**dict(self.config))
        self.change(model)
        return model


KINDS = {
    "plain": Kind(), "biased": Kind(config=(("bias", True), ("activation", "clamped_swiglu"))),
    "latent, no gate": Kind(config=(("latent_dim", 64), ("activation", "relu_squared"), ("shared_hidden", 32))),
    "frozen": Kind(change=frozen), "down alone": Kind(change=down_alone), "adapted": Kind(change=adapted),
    "nf4": Kind(config=(("bias", True),), change=coded), "nf4, adapted": Kind(change=coded_and_adapted),
}  # fmt: skip


def rows(rank: int, batch: int) -> Tensor:
    g = torch.Generator().manual_seed(10 * rank + batch)
    return torch.randn(TOKENS[rank][batch], D, dtype=torch.float64, generator=g).requires_grad_()


def backward(model: nn.Module, rank: int, batch: int, scale: float = 1.0) -> dict[str, Tensor]:
    x = rows(rank, batch)
    y = model(x)
    (scale * y.square().sum()).backward()
    assert x.grad is not None
    return {f"y{batch}": y.detach(), f"dx{batch}": x.grad / scale}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_value(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


Truth = tuple[list[dict[str, Tensor]], dict[str, Tensor]]


def truths_of(kinds: Iterable[str], ranks: int, divisor: float = 1.0) -> bytes:
    """By kind."""
    return packed({name: truth(KINDS[name], ranks, divisor) for name in kinds})


def truth(kind: Kind, ranks: int, divisor: float) -> Truth:
    """What is a rank's own, and the gradients of all ranks' two micro-batches."""
    model = kind.build()
    own = [backward(model, r, 0, 1 / divisor) | backward(model, r, 1, 1 / divisor) for r in range(ranks)]
    return own, gradients(model)


def spread(kind: Kind, mesh: Any, **options: Any) -> Blocks:
    model = kind.build()
    style = trimtab.ExpertParallel(replicate_experts=0.0, copy_cost=0, **options)
    trimtab.parallelize(model, mesh, {"layers.*": style})
    return model


def off(found: dict[str, Tensor], wanted: dict[str, Tensor], where: str) -> dict[str, float]:
    """ "rounded" leaves what moved the weights."""
    assert found.keys() == wanted.keys(), (where, found.keys() ^ wanted.keys())
    errors = {f"{where}: {name}": relative_error(found[name], value) for name, value in wanted.items()}
    bound = 1e-7 if where.endswith("rounded") else 1e-12
    return {name: error for name, error in errors.items() if not error <= bound}


def step(model: Any, scale: float = 1.0) -> dict[str, Tensor]:
    """Two micro-batches of this rank; replicas were made."""
    rank = dist.get_rank()
    if model.way != "rounded" or rank:
        own = backward(model, rank, 0, scale) | backward(model, rank, 1, scale)
    else:
        with perturbed() as log:
            own = backward(model, rank, 0, scale) | backward(model, rank, 1, scale)
        assert log == [False, False, True, True] * 2
    reports = [layer.dispatcher.replicated for layer in model.layers]
    assert all(report.replicas_P.any() for report in reports)
    return own


def on_two_ranks(truths: bytes, ways: Sequence[str]) -> dict[str, float]:
    """EP: every kind, in these ways; and the outputs alone."""
    mesh, rank, bad = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",)), dist.get_rank(), {}
    solved: dict[str, Truth] = unpacked(truths)
    for name, (own, whole) in solved.items():
        for way in ways:
            if way == "reentrant" and name == "frozen":
                continue  # a block's input must want a gradient there
            model = spread(KINDS[name], mesh, transport="shared_memory" if way else "alltoall")
            model.way = "" if way == "compiled" else way
            for layer in model.layers if way == "compiled" else ():
                layer.compile(backend="aot_eager", dynamic=True)
            bad |= off(step(model), own[rank], f"{name} {way}")
            for param in (p for n, p in model.named_parameters() if ".experts." not in n and p.grad is not None):
                dist.all_reduce(param.grad)
            bad |= off(gradients(model), whole, f"{name} {way}")
            model.way = ""
            with torch.inference_mode() if way else torch.no_grad():
                y = {f"y{i}": model(rows(rank, i)) for i in range(2)}
            bad |= off(y, {n: t for n, t in own[rank].items() if n in y}, f"{name} {way}, no gradients")
    return bad


def on_four_ranks(truths: bytes) -> dict[str, float]:
    """EP x expert TP, and EP x FSDP2 with recompute inside its units."""
    rank, bad = dist.get_rank(), {}
    split = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp"))
    solved: dict[str, Truth] = unpacked(truths)
    for name, (own, whole) in solved.items():
        model = spread(KINDS[name], split, etp="etp")
        model.way = "recompute"
        bad |= off(step(model, 0.25), own[rank], f"{name}, etp")
        for param in (p for n, p in model.named_parameters() if ".experts." not in n and p.grad is not None):
            dist.all_reduce(param.grad)
        bad |= off(gradients(model), whole, f"{name}, etp")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    for name in (name for name in solved if name != "frozen"):
        own, whole = solved[name]
        model = spread(KINDS[name], mesh["ep"])
        model.way = "recompute"
        sharded: Any = trimtab.fully_shard_moe(model, flat, mesh["edp"], blocks=["layers.*"])
        bad |= off(step(sharded), own[rank], f"{name}, fsdp")
        bad |= off(gradients(sharded), whole, f"{name}, fsdp")
    return bad
