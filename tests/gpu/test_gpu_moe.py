"""Router, `MoE` and `Dispatcher` on a CUDA device: values, ties, checks on the device, host waits, and the exchange on
a group of one rank (NCCL; Gloo where this is rehearsed on the CPU).

Skipped only where there is no CUDA device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpu.device import DEVICE, REHEARSED, need_offsets_on_the_device, needs_device, no_sync, one_graph_serves, syncs
from helpers.comparing import assert_close
from trimtab import oracle
from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.kernels.choose import KernelChoice
from trimtab.moe import MoE, MoEConfig
from trimtab.routing.config import RouterConfig

pytestmark = needs_device

E, K, D, F, T = 8, 2, 128, 64, 70
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {"normalize": True, "aux_loss": 0.01, "z_loss": 0.001},
    "groups": {"score": "sigmoid", "groups": 4, "top_groups": 2, "bias": True, "scale": 2.5},
    "capacity": {"capacity_factor": 1.0},
    "experts pick": {"select": "expert_choice"},
}
DTYPES = {torch.float32: 5e-3, torch.bfloat16: 4e-2}  # float32: TF32 may be on


def layer(dtype: torch.dtype, **router: Any) -> MoE:
    """All draws are the host's, so that a copy in float64 there has the same values."""
    torch.manual_seed(0)
    config = RouterConfig(num_experts=E, top_k=K, **router)
    made = MoEConfig(dim=D, hidden=F, router=config, shared_hidden=F, dtype=dtype).build("moe")
    return made.to(DEVICE)


def tokens(dtype: torch.dtype, rows: int = T, seed: int = 1) -> Tensor:
    return torch.randn(rows, D, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE).requires_grad_()


def results(module: MoE, x: Tensor, ids: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Chosen experts; output, losses, and every gradient."""
    out = module(x, ids=ids)
    dy = torch.randn(out.y.shape, generator=torch.Generator().manual_seed(2)).to(out.y.device, out.y.dtype)
    wanted = {"x": x, **{name: p for name, p in module.named_parameters() if p.requires_grad}}
    total = (out.y * dy).sum() + sum(out.losses.values())
    grads = torch.autograd.grad(total, list(wanted.values()))
    return out.ids_TK, {"y": out.y, **out.losses, **dict(zip(wanted, grads, strict=True))}


def is_true(module: MoE, x: Tensor, bound: float, name: str) -> None:
    """Against the same layer in float64 on the host, told the device's decisions."""
    ids, got = results(module, x)
    true = copy.deepcopy(module).cpu().double()
    true.experts.kernels = KernelChoice("torch")
    true.dispatcher.transport = None
    own, wanted = results(true, x.detach().cpu().double().requires_grad_(), ids.cpu())
    assert torch.equal(ids.cpu(), own)
    for key, value in wanted.items():
        assert_close(got[key].cpu(), value, bound, f"{name}: {key}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("router", ROUTERS)
def test_a_layer_is_true(router: str, dtype: torch.dtype) -> None:
    for rows in (0, 1, T):
        is_true(layer(dtype, **ROUTERS[router]), tokens(dtype, rows), DTYPES[dtype], f"{rows} rows")


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_router_chooses_as_on_the_host_and_ties_go_to_the_lowest_expert(score: str) -> None:
    router = RouterConfig(num_experts=64, top_k=8, score=score).build(D)  # type: ignore[arg-type]
    with torch.no_grad():
        router.weight.copy_(torch.randint(-1, 2, router.weight.shape))
    x = torch.randint(-1, 2, (5000, D)).float() * (torch.rand(D) < 0.1)  # small integers: exact, with many ties
    wanted = router(x).ids_TK
    assert torch.equal(copy.deepcopy(router).to(DEVICE)(x.to(DEVICE)).ids_TK.cpu(), wanted)
    scores = x @ router.weight.T
    assert torch.equal(wanted, scores.sort(dim=-1, descending=True, stable=True).indices[:, :8])


@pytest.mark.parametrize("router", ["softmax", "groups"])
def test_nothing_waits_for_the_device_and_a_graph_serves_every_token(router: str) -> None:
    need_offsets_on_the_device()
    module, x = layer(torch.bfloat16, **ROUTERS[router]), tokens(torch.bfloat16)
    results(module, x)
    with no_sync():
        module(x).y.sum().backward()
    module.eval()  # counts loads in training

    def run() -> list[Tensor]:
        y = module(x).y
        return [y.detach(), *torch.autograd.grad(y.sum(), [x, module.experts.down, module.router.weight])]

    one_graph_serves(run, {router: partial(x.data.copy_, tokens(torch.bfloat16, seed=7))})


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    where: Path = tmp_path_factory.mktemp("group") / "store"
    options: dict[str, Any] = {} if REHEARSED else {"device_id": torch.device(DEVICE, 0)}
    dist.init_process_group(
        "gloo" if REHEARSED else "nccl", init_method=f"file://{where}", rank=0, world_size=1,
        timeout=timedelta(seconds=60), **options,
    )  # fmt: skip
    yield dist.group.WORLD  # type: ignore[misc]
    dist.destroy_process_group()


@pytest.mark.parametrize("combine", ["sum", "ordered"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_over_a_group_of_one_is_true(group: dist.ProcessGroup, dtype: torch.dtype, combine: str) -> None:
    for rows in (0, 1, T):
        module = layer(dtype, **ROUTERS["softmax"])
        module.dispatcher = Dispatcher(E, AllToAll(group), combine=combine, layer="moe")  # type: ignore[arg-type]
        is_true(module, tokens(dtype, rows), DTYPES[dtype], f"{rows} rows, {combine}")


def test_an_exchange_waits_once_forward_and_never_backward(group: dist.ProcessGroup) -> None:
    need_offsets_on_the_device()
    module, x = layer(torch.bfloat16, **ROUTERS["softmax"]), tokens(torch.bfloat16)
    module.dispatcher = Dispatcher(E, AllToAll(group), layer="moe")
    results(module, x)
    forward: list[str] = []
    with syncs(forward):
        y = module(x).y
    with no_sync():
        y.sum().backward()
    assert len(forward) <= 1, forward


def test_a_dispatcher_moves_what_it_is_told(group: dist.ProcessGroup) -> None:
    dispatcher, g = Dispatcher(E, AllToAll(group), layer="alone"), torch.Generator().manual_seed(3)
    x = torch.randn(T, D, generator=g).to(DEVICE).requires_grad_()
    w = torch.rand(T, K, generator=g).to(DEVICE).requires_grad_()
    ids = torch.randint(-1, E, (T, K), generator=g).to(DEVICE)
    up, down = torch.randn(E, 2, F, D, generator=g), torch.randn(E, D, F, generator=g)
    rows = dispatcher.dispatch(x, ids, w)
    out = oracle.moe(rows.x_MD.cpu(), rows.ids_MK.cpu(), rows.weights_MK.cpu(), up, down).to(DEVICE, x.dtype)
    y = dispatcher.combine(out, rows)
    grads = torch.autograd.grad(y.sum(), [x, w])
    leaves = [t.detach().cpu().double().requires_grad_() for t in (x, w)]
    true = oracle.moe(leaves[0], ids.cpu(), leaves[1], up, down)
    for name, got, wanted in zip(
        ("y", "dx", "dw"), (y, *grads), (true, *torch.autograd.grad(true.sum(), leaves)), strict=True
    ):
        assert_close(got.cpu(), wanted, 1e-5, name)
