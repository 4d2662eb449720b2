"""Loops of one's own on real ranks against their plans: DDP's buckets, expert tensor parallel, context parallel; and
`worst` against all that was routed.

python -m plan.test_planned_loops      every way, and how far plans are off

Legend: T tokens of a rank, K experts per token, E experts, D model dim, P ranks of the expert group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import trimtab
from helpers.ranks import run_ranks
from trimtab.dispatch import planned as transport
from trimtab.errors import ConfigError
from trimtab.plan.ledger import Ledger
from trimtab.plan.traffic import SKEWS, draw

RANKS, E, K, D, HIDDEN, LAYERS = 4, 16, 4, 64, 128, 3
Way = Callable[..., nn.Module]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        router = trimtab.RouterConfig(num_experts=E, top_k=K, sequence_aux_loss=0.01)
        self.moe = trimtab.MoEConfig(dim=D, hidden=HIDDEN, router=router, kernels="grouped_mm").build()
        self.wide, self.back = nn.Linear(D, 32 * D), nn.Linear(32 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.moe(self.back(self.wide(x))).y
        return y


def mesh_of(**dims: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


def over(model: nn.Module, mesh: DeviceMesh, transport: str, **options: Any) -> nn.Module:
    return trimtab.parallelize(model, mesh, {"*.moe": trimtab.ExpertParallel(transport=transport, **options)})


def in_ddp(model: nn.Module, transport: str, **options: Any) -> nn.Module:
    mesh = mesh_of(edp=2, ep=2)
    return trimtab.ddp(over(model, mesh["ep"], transport), mesh_of(dp=RANKS), mesh["edp"], **options)


def split(model: nn.Module, transport: str, sharded: bool = False) -> nn.Module:
    mesh, dp = mesh_of(one=1, ep=2, etp=2), mesh_of(dp=RANKS)
    over(model, mesh["ep", "etp"], transport, etp="etp")
    return (trimtab.fully_shard_moe if sharded else trimtab.ddp)(model, dp, mesh["one"])


def by_positions(model: nn.Module, transport: str) -> nn.Module:
    dense, mesh = mesh_of(dp=2, cp=2), mesh_of(efsdp=2, ep=2)
    over(model, mesh["ep"], transport, cp_mesh=dense["cp"])
    return trimtab.fully_shard_moe(model, dense["dp", "cp"], mesh["efsdp"], blocks=["*"])


def ep(model: nn.Module, transport: str, **options: Any) -> nn.Module:
    return over(model, mesh_of(ep=RANKS), transport, **options)


RULES: tuple[Any, ...] = ("off", 0.1)
WAYS: dict[str, Way] = {
    "ddp": in_ddp, "etp, ddp": split, "cp, fsdp": by_positions,
    "ddp, small buckets": partial(in_ddp, bucket_cap_mb=1),
    "ddp, buckets for gradients": partial(in_ddp, gradient_as_bucket_view=True),
    "ddp, unused": partial(in_ddp, find_unused_parameters=True), "etp, fsdp": partial(split, sharded=True),
}  # fmt: skip


def build(way: Way, device: str = "meta", transport: str = "planned") -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    return way(model, transport)


def loop(tokens: int, model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        model(torch.randn(2, tokens // 2, D)).square().mean().backward()
        trimtab.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def held_on_rank(way: Way, tokens: int, skews: Sequence[str]) -> list[int]:
    """The most bytes that two steps hold on this rank, as tokens fall by each workload."""
    torch.set_num_threads(1)
    found = []
    for skew in skews:
        with Ledger() as ledger:
            model = build(way, "cpu", "alltoall")
            for moe in (module for module in model.modules() if isinstance(module, trimtab.MoE)):
                transport: Any = moe.dispatcher.transport
                ids_TK = draw(skew, tokens, K, E, rank=transport.rank, ranks=transport.size)
                moe.dispatcher._dispatch = partial(routed, moe.dispatcher._dispatch, ids_TK)  # type: ignore[method-assign]
            ledger.know(model.parameters(), "weights")
            begin = ledger.clock
            loop(tokens, model)
        found.append(ledger.peak(begin)[0])
    return found


def routed(own: Callable[..., Any], ids_TK: Tensor, x: Tensor, ids: Tensor, *more: Any, **options: Any) -> Any:
    return own(x, ids_TK.to(ids.dtype), *more, **options)


@pytest.mark.parametrize(("way", "tokens"), [("ddp", 64), ("etp, ddp", 512), ("cp, fsdp", 512)])
def test_the_busiest_rank_holds_what_is_planned(way: str, tokens: int) -> None:
    planned = partial(trimtab.plan_memory, partial(build, WAYS[way]), partial(loop, tokens), ranks=RANKS, device="cpu")
    keeps_nothing = SimpleNamespace(empty=torch.empty)  # what waits in a run's pool is in no tensor of a ledger
    held = max(told[0] for told in run_ranks(held_on_rank, RANKS, WAYS[way], tokens, ["zipf"], deadline=120.0))
    with patch.object(transport, "Pool", lambda _: keeps_nothing):
        plan = planned(skew="zipf")
    print(f"{way}, {tokens} tokens: run {held}, plan {plan.peak / held - 1:+.3%}, {plan.parts}")
    assert plan.peak == pytest.approx(held, rel=0.01)
    assert sum(plan.parts.values()) == plan.peak
    assert plan.biggest[0][0] == max(size for size, _, _ in plan.biggest)
    assert planned(skew="worst").peak >= held


def test_ddp_takes_its_options_by_place_too_and_no_hooks() -> None:
    def planned(*options: Any, **named: Any) -> int:
        way = lambda model, _: DistributedDataParallel(model[0].wide, *options, **named)  # noqa: E731
        step = lambda model: model(torch.randn(2, D)).sum().backward()  # noqa: E731
        return trimtab.plan_memory(partial(build, way), step, ranks=RANKS).peak

    viewed = planned(gradient_as_bucket_view=True)
    assert planned(None, None, 0, None, True, None, None, False, False, True) == viewed < planned()
    hooked: Any = lambda model: model.register_comm_hook(state=None, hook=fp16_compress_hook)  # noqa: E731
    with pytest.raises(ConfigError, match="comm hooks cannot be planned"):
        trimtab.plan_memory(partial(build, in_ddp), hooked, ranks=RANKS)


@pytest.mark.parametrize("rule", RULES)
def test_worst_is_never_less_than_what_ranks_hold(rule: Any) -> None:
    given: dict[str, Any] = {"replicate_experts": rule, "copy_cost": 1}
    way = partial(ep, **given)
    planned = partial(trimtab.plan_memory, partial(build, way), partial(loop, 512), ranks=RANKS, device="cpu", **given)
    told = run_ranks(held_on_rank, RANKS, way, 512, SKEWS[2:], deadline=120.0)
    worst, even = (planned(skew=skew).peak for skew in ("worst", "even"))
    assert max(map(max, told)) <= worst
    assert min(map(min, told)) < even < worst


def main() -> None:
    for way in WAYS:
        for tokens in (64, 512):
            test_the_busiest_rank_holds_what_is_planned(way, tokens)


if __name__ == "__main__":
    main()
