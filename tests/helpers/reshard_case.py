"""A MoE layer with everything that has state, trained for a step under one layout and loaded under others.

Whole values are taken by torch alone, which shares no code with what is tested.

Legend: B batch, L positions, D model dim, E experts, F expert hidden dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.comparing import full_value
from helpers.optim_ranks import by_trimtab
from trimtab.checkpoint import load, save
from trimtab.checkpoint.save_load import Loaded
from trimtab.errors import ConfigError
from trimtab.moe import MoEConfig
from trimtab.parallel.grad_norm import clip_grad_norm_
from trimtab.parallel.meshes import local_part
from trimtab.routing.balance import routers, update_bias
from trimtab.routing.config import RouterConfig
from trimtab.routing.losses import LossGroups

E, D, F = 4, 8, 8
Whole = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """W ranks as experts [edp, etp, ep], and how the rest is replicated: ddp, fsdp or hsdp (2 replicas)."""

    data: str
    ep: int = 1
    etp: int = 1
    activation: str = "swiglu"

    @property
    def name(self) -> str:
        return f"{self.data} ep={self.ep} etp={self.etp}"

    def spread(self, model: nn.Module) -> nn.Module:
        """The calls that a user makes."""
        return by_trimtab(self.data, self.ep, self.etp)(model)


class Model(nn.Module):
    """A layer with an expert bias, a router that draws numbers, biased experts, shared experts and a plain buffer."""

    def __init__(self, experts: int = E, activation: str = "swiglu") -> None:
        super().__init__()
        router = RouterConfig(num_experts=experts, top_k=2, bias=True, bias_rate=0.1, jitter=0.1, global_aux_loss=0.01)
        config = MoEConfig(
            dim=D, hidden=F, router=router, bias=True, shared_hidden=6, shared_gate=True, activation=activation
        )
        self.layers = nn.ModuleList(nn.ModuleDict({"moe": config.build()}) for _ in range(1))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = h + layer["moe"](h).y
        return h


class Run:
    """A model under a layout, with its optimizer."""

    def __init__(self, layout: Layout, seed: int) -> None:
        torch.manual_seed(seed)
        self.model: Any = Model(activation=layout.activation)
        with torch.no_grad():
            self.model.seen += seed
        self.runner = layout.spread(self.model)
        for router in routers(self.model).values():
            router.groups = LossGroups(batch=dist.group.WORLD)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.01 * seed
        )

    def step(self, number: int) -> None:
        """One optimizer step on data of this rank's own."""
        g = torch.Generator().manual_seed(10 * number + dist.get_rank())
        y = self.runner(torch.randn(2, 5, D, generator=g))
        (y * torch.randn(y.shape, generator=g)).sum().backward()
        clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        update_bias(self.model, dist.group.WORLD)

    @torch.no_grad()
    def poison(self) -> None:
        """NaN everywhere, so that what is not loaded shows."""
        for slots in [self.model.state_dict(), *self.optimizer.state.values()]:
            for tensor in slots.values():
                local_part(tensor).fill_(torch.nan)
        for router in routers(self.model).values():
            router._loads.fill_(7)
            router._counts.fill_(7)

    def whole(self) -> Whole:
        """Every parameter, buffer and optimizer state, whole; sums of loads; options of each parameter's group."""
        found = {name: _whole(t) for name, t in self.model.state_dict().items()}
        names = {param: name for name, param in self.model.named_parameters()}
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                name = names[param]
                found |= {f"{name} {slot}": _whole(t) for slot, t in self.optimizer.state[param].items()}
                found[f"{name} options"] = torch.tensor([group["lr"], group["weight_decay"], *group["betas"]])
        for name, router in routers(self.model).items():
            loads, found[f"{name} counts"] = router._loads.clone(), router._counts.clone()
            dist.all_reduce(loads)
            found[f"{name} loads"] = loads
        return found


def _whole(tensor: Tensor) -> Tensor:
    return full_value(tensor).detach().clone()


def differing(one: Whole, two: Whole) -> list[str]:
    """What is not equal bit for bit."""
    assert one.keys() == two.keys()
    return [f"{name} {one[name]} {two[name]}" for name in one if not torch.equal(one[name], two[name])]


def save_all(root: Path, layouts: list[Layout]) -> None:
    """Train under each layout, save in the middle of a step, and keep the whole values beside it."""
    for layout in layouts:
        run = Run(layout, seed=1)
        run.step(1)
        with torch.no_grad():
            run.runner(torch.randn(1, 3 + dist.get_rank(), D))  # loads of a step that has not ended
        rank = dist.get_rank()
        folder = save(root / layout.name, run.model, run.optimizer, step=2, extra={"a": [1]}, rank_extra=rank).parent
        torch.save({"whole": run.whole(), "noise": torch.rand(4)}, folder / f"rank-{rank}.pt")
        if goes_on_exactly(layout):
            run.step(2)
            torch.save(run.whole(), folder / f"later-{rank}.pt")


def load_all(root: Path, saved: list[Layout], layouts: list[Layout]) -> dict[str, list[str]]:
    """What differs, for every pair of layouts; where they are the same, after one more step, too."""
    wrong: dict[str, list[str]] = {}
    for new in layouts:
        run = Run(new, seed=2)
        for old in saved:
            go_on = old == new and goes_on_exactly(new)
            wrong[f"{old.name} -> {new.name}, {dist.get_world_size()} ranks"] = compare(run, root / old.name, go_on)
    return wrong


def refuse_together(root: Path) -> str:
    """What every rank raises where one rank's optimizer holds a local part that looks like a whole tensor."""
    run = Run(Layout(data="ddp", ep=2), seed=1)
    run.step(1)
    if dist.get_rank() == 1:
        state = run.optimizer.state[run.model.layers[0]["moe"].experts.gate_up]
        state["exp_avg"] = state["exp_avg"].to_local()
    try:
        save(root, run.model, run.optimizer, step=1)
    except ConfigError as error:
        return str(error)
    return "nothing"


def goes_on_exactly(layout: Layout) -> bool:
    """DDP sorts its buckets anew after its first backward, and with them the order of sums over three ranks or more."""
    return layout.data != "ddp" or dist.get_world_size() < 3


def compare(run: Run, folder: Path, go_on: bool) -> list[str]:
    """What differs between a run that is loaded from `folder` and the one that was saved there."""
    run.poison()
    loaded: Loaded = load(folder, run.model, run.optimizer)
    noise = torch.rand(4)
    saved = torch.load(folder / "rank-0.pt")
    wrong = differing(saved["whole"], run.whole())
    assert loaded.index.extra == {"a": [1]}
    assert loaded.index.experts["layers.0.moe.experts"]["gate_up"] == [E, 2, F, D]
    if loaded.own is not None:
        assert loaded.own["extra"] == dist.get_rank()
        before = torch.load(folder / f"rank-{dist.get_rank()}.pt")["noise"]
        loaded.restore_random()
        wrong += [] if torch.equal(noise, before) and torch.equal(torch.rand(4), before) else ["random numbers"]
    if go_on and loaded.own is not None:
        run.step(2)
        wrong += [f"later: {w}" for w in differing(torch.load(folder / "later-0.pt"), run.whole())]
    return wrong
