"""Plans that match nothing or twice are refused; a router that drifted is named."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from helpers.layout_truth import Model
from helpers.ranks import run_ranks
from trimtab.dispatch import host_memory
from trimtab.errors import BackendError, ConfigError, DesyncError, PhaseTimeout
from trimtab.guard.guard import Guard
from trimtab.moe import MoE, MoEConfig, MoEOutput
from trimtab.parallel.check_replicated import check_replicated
from trimtab.parallel.ddp import ddp
from trimtab.parallel.expert_parallel import ExpertParallel, matches, parallelize
from trimtab.parallel.moe import join_data_parallel
from trimtab.routing.balance import update_bias
from trimtab.routing.config import RouterConfig
from trimtab.routing.port import Routing
from trimtab.routing.router import Router


class Doubled(MoE):
    """A layer whose own forward would be lost."""

    def forward(self, x: torch.Tensor, **kwargs: Any) -> MoEOutput:
        out = super().forward(x, **kwargs)
        return out._replace(y=2 * out.y)


class OfMyOwn(torch.nn.Module):
    """A router that knows nothing of groups."""

    def __init__(self, inside: Router) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Routing:
        made: Routing = self.inside(x, **kwargs)
        return made

    def losses(self, routing: Routing) -> dict[str, torch.Tensor]:
        return self.inside.losses(routing)


def snapshot(model: torch.nn.Module) -> list[object]:
    """What the modules are and refer to, and how often each tensor was written."""
    found: list[object] = []
    for module in model.modules():
        inside = [module.dispatcher] if isinstance(module, MoE) else []
        for key, value in (item for of in (module, *inside) for item in vars(of).items()):
            held = list(map(id, value.values())) if isinstance(value, dict) else []
            found.append((type(module), key, id(value), held))
        found += [tensor._version for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))]
    return found


def refused_whole_on_rank() -> dict[str, tuple[str, str, bool]]:
    """What cannot be spread, tried through `parallelize` and through the style alone."""
    mesh = init_device_mesh("cpu", (2,))
    split = init_device_mesh("cpu", (2, 1), mesh_dim_names=("etp", "ep"))
    said = {}

    def build(hidden: int = 8, experts: int = 4, **options: Any) -> MoE:
        return MoEConfig(dim=8, hidden=hidden, router=RouterConfig(num_experts=experts, top_k=1), **options).build()

    def attempt(name: str, style: ExpertParallel, on: DeviceMesh, *layers: MoE, alone: bool = True) -> None:
        model = torch.nn.ModuleList(layers)
        before = snapshot(model)
        for way, run in (
            ("plan", lambda: parallelize(model, on, {"*": style})),
            ("style", lambda: parallelize_module(layers[-1], on, style)),
        )[: 2 if alone else 1]:
            try:
                run()
                said[f"{name}, {way}"] = ("nothing", "", True)
            except (ConfigError, BackendError) as error:
                said[f"{name}, {way}"] = (type(error).__name__, error.message, before == snapshot(model))
        for layer in layers:
            layer(torch.randn(3, 8, requires_grad=True)).y.sum().backward()

    attempt("experts", ExpertParallel(), mesh, build(), build(experts=3))
    attempt("hidden", ExpertParallel(etp="etp"), split, build(), build(hidden=9))
    attempt("mesh", ExpertParallel(etp="tp"), split, build(), build())
    tied, together = (build(), build()), (build(), build())
    tied[1].experts.down = tied[0].experts.down
    together[1].experts = together[0].experts
    attempt("tied", ExpertParallel(), mesh, *tied, alone=False)
    attempt("together", ExpertParallel(), mesh, *together, alone=False)
    attempt("before", ExpertParallel(), mesh, build(), parallelize(build(), mesh, {"": ExpertParallel()}))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "reserve", Mock(side_effect=OSError(27, "File too large")))
        attempt("transport", ExpertParallel(transport="shared_memory"), mesh, build(), build(bias=True))
    return said


def test_a_refused_module_is_as_it_was() -> None:
    words = {
        "experts": "3 experts do not divide over 2 ranks", "hidden": "F = 9 does not divide over 2",
        "mesh": "with etp='tp'", "tied": "1.experts.down is a parameter of these experts too",
        "together": "1.experts.gate_up is a parameter of these experts too", "before": "applied before",
        "transport": "no shared memory",
    }  # fmt: skip
    for said in run_ranks(refused_whole_on_rank, 2):
        shared = {"tied, style", "together, style"}  # a style sees one layer
        assert set(said) == {f"{name}, {way}" for name in words for way in ("plan", "style")} - shared
        for name, (kind, message, unchanged) in said.items():
            case = name.split(",")[0]
            assert kind == ("BackendError" if case == "transport" else "ConfigError"), name
            assert words[case] in message
            assert unchanged, name


def on_rank() -> str:
    style, mesh, plan = ExpertParallel(), init_device_mesh("cpu", (2,)), {"layers.*.moe": ExpertParallel()}
    doubled = Doubled(MoEConfig(dim=8, hidden=8, router=RouterConfig(num_experts=2, top_k=1)))
    for words, refuses in {
        r"'layer\.\*\.moe' matches no module.*layers\.0\.moe": lambda m: parallelize(m, mesh, {"layer.*.moe": style}),
        r"'layers\.0\.moe' is matched twice": lambda m: parallelize(m, mesh, plan | {"layers.0.*": style}),
        "not Router": lambda m: parallelize(m, mesh, {"layers.0.moe.router": style}),
        "not Doubled": lambda m: parallelize(doubled, mesh, {"": style}),
        "mesh=None is no DeviceMesh: make one": lambda m: parallelize(m, None, plan),
        "mesh=<.*> is no DeviceMesh: make one": lambda m: ddp(m, mesh, dist.group.WORLD),
    }.items():
        with pytest.raises(ConfigError, match=words):
            refuses(Model(torch.float32))
    torch.manual_seed(1)
    model = parallelize(Model(torch.float32), mesh, plan)
    check_replicated(model)  # experts differ between the ranks, as they should
    with torch.no_grad():
        router = model.get_parameter("layers.1.moe.router.weight")
        router[0, 0] += dist.get_rank() * 1e-6
    with pytest.raises(DesyncError) as drifted:
        check_replicated(model)
    with torch.no_grad():
        router.fill_(float("nan"))
    check_replicated(model)  # the same on all ranks, however bad
    gate = torch.nn.Linear(8, 1)
    with torch.no_grad():
        gate.weight.fill_(1.0)
    check_replicated(fully_shard(gate, mesh=init_device_mesh("cpu", (2,))))  # of whose one row rank 1 has none
    config = RouterConfig(num_experts=4, top_k=2, aux_loss=0.1, bias=True)
    layer = MoEConfig(dim=8, hidden=8, router=config).build("moe")
    layer.router = OfMyOwn(layer.router)  # type: ignore[assignment]
    layer.experts.extra = torch.nn.Linear(2, 2)  # of nobody else
    whole = init_device_mesh("cpu", (1, 2), mesh_dim_names=("edp", "ep"))
    parallelize(torch.nn.ModuleList([layer, layer]), whole["ep"], {"*": style})  # in two places
    join_data_parallel(layer, init_device_mesh("cpu", (2,)), whole["edp"])
    out = layer(torch.randn(3 + dist.get_rank(), 8))
    (out.y.square().sum() + out.losses["aux"]).backward()
    assert layer.router.get_parameter("inside.weight").grad is not None
    everywhere = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(everywhere, out.losses["aux"].detach())
    assert everywhere[0] == everywhere[1], "the loss of the global batch"
    biases = [torch.zeros(4) for _ in range(2)]
    update_bias(layer)
    dist.all_gather(biases, layer.router.get_buffer("inside.expert_bias"))
    assert torch.equal(*biases)
    assert biases[0].any()
    with pytest.raises(ConfigError, match="before"):
        parallelize(model, mesh, plan)
    a, b = (model.get_submodule(f"layers.{i}.moe").dispatcher for i in (0, 1))
    assert (a.transport is b.transport, a.layer) == (True, "layers.0.moe")
    return str(drifted.value)


def unlike_on_rank() -> list[str]:
    """Balance losses, for which the ranks meet, in layers that are unlike, of another name, or late."""
    mesh, rank, said = init_device_mesh("cpu", (2,)), dist.get_rank(), []
    losses: dict[str, Any] = {"aux_loss": 0.1, "sequence_aux_loss": 0.1, "global_aux_loss": 0.1, "z_loss": 0.1}

    def layer(name: str, experts: int) -> torch.nn.Module:
        config = RouterConfig(num_experts=experts, top_k=2, **losses)
        return parallelize(MoEConfig(dim=8, hidden=8, router=config).build(name), mesh, {"": ExpertParallel()})

    one, other, unlike = layer("one", 4), layer("other", 4), layer("unlike", 4 + 2 * rank)
    hooked = layer("hooked", 4)
    seen: list[int] = []
    if rank:  # as somebody logs on one rank
        hooked.get_submodule("router").register_forward_hook(lambda _m, _a, made: seen.append(int(made.loads_E.sum())))
    assert set(hooked(torch.randn(3 + rank, 8)).losses) == {"aux", "sequence_aux", "global_aux", "z"}
    assert seen == [2 * (3 + rank)] * rank
    for each in (unlike, one if rank else other):
        with pytest.raises(DesyncError) as raised:
            each(torch.randn(3 + rank, 8))
        assert not each.get_submodule("router").take_loads().any()  # type: ignore[operator]
        said.append(str(raised.value))
    guard = one.dispatcher.guard
    assert isinstance(guard, Guard)
    dist.barrier()
    guard.deadline = 1.5
    elsewhere = dist.new_group()
    if rank == 0:
        with pytest.raises(PhaseTimeout) as late:
            one(torch.randn(3, 8))
        said.append(f"{late.value.ranks} {late.value}")
    dist.barrier(elsewhere)  # where rank 1 waits meanwhile
    return said


def test_ranks_compare_their_calls_before_their_losses() -> None:
    found = run_ranks(unlike_on_rank, 2)
    assert found[0].pop().startswith("(1,) [layer one, rank 1, phase count]")
    for experts, layers in found:
        assert "4 experts" in experts
        assert "6 experts" in experts
        assert "layer one" in layers
        assert "layer other" in layers


def test_what_is_wrong_is_named() -> None:
    for drift in run_ranks(on_rank, 2):
        assert "layers.1.moe.router.weight (rank(s) [0]" in drift
        assert "layers.0" not in drift


def test_a_star_stays_within_its_part() -> None:
    assert matches("layers.3.moe", "layers.*.moe")
    assert not matches("layers.3.block.moe", "layers.*.moe")
    assert not matches("layers.3", "layers.*.moe")
    assert matches("moe", "*")
    assert matches("", "")
    assert not matches("", "*")


def test_tokens_and_mesh_go_together() -> None:
    with pytest.raises(ConfigError, match="tp_mesh"):
        ExpertParallel(tokens="sharded")
    with pytest.raises(ConfigError, match="combine='mean'"):
        ExpertParallel(combine="mean")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="transport"):
        ExpertParallel(transport="pigeon")  # type: ignore[arg-type]
