"""Tensors without values, on the meta device and fake: shapes, FLOPs and memory of the real run; nothing is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from helpers.ranks import run_ranks
from helpers.weights import expert_weights
from trimtab import AllGather, AllToAll, Dispatcher, ExpertMLP, GroupedLinear, MoEConfig, RouterConfig, SharedMemory
from trimtab.errors import InputError
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.plan import plan_experts
from trimtab.experts.recipes import MXFP8
from trimtab.kernels.choose import KernelChoice
from trimtab.kernels.torch_mm import GroupedMMBackend
from trimtab.moe import MoE
from trimtab.plan.ledger import Ledger
from trimtab.plan.unrun import UnrunGlue, kernels_without_values
from trimtab.plan.without_values import WithoutValues
from trimtab.routing.recompute import replay_in_recompute

D, HIDDEN, E, K = 64, 32, 8, 2
WAYS = ("meta", "fake")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all around it": {
        "activation": "clamped_swiglu", "bias": True, "latent_dim": 32, "shared_hidden": 16,
        "shared_gate": True,
    },
    "ordered": {"combine": "ordered"},
    "expert choice": {"router": {"select": "expert_choice"}},
    "capacity": {"router": {"capacity_factor": 1.0}},
    "groups, bias, jitter": {"router": {"groups": 2, "top_groups": 1, "bias": True, "jitter": 0.1}},
    "delayed": {"delay_wgrad": True},
    "no such kernels there": {"kernels": "torch"},
    "a recipe": {"recipe": MXFP8(backend="emulated")},
}  # fmt: skip


@contextmanager
def as_(way: str) -> Iterator[None]:
    with FakeTensorMode() if way == "fake" else torch.device(way):
        yield


def build(dtype: torch.dtype = torch.float32, **more: Any) -> MoE:
    router = RouterConfig(num_experts=E, top_k=K, aux_loss=0.01, **more.get("router", {}))
    return MoEConfig(**{"dim": D, "hidden": HIDDEN, "dtype": dtype} | more | {"router": router}).build()


def found(way: str, dtype: torch.dtype, options: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Shapes, dtypes and strides of what forward and backward leave, and their FLOPs."""
    with as_(way), FlopCounterMode(display=False) as counter:
        moe = build(dtype, **options)
        x = torch.randn(4, 8, D, dtype=dtype, requires_grad=True)
        out = moe(x)
        (out.y.sum() + out.losses["aux"]).backward()
        moe.experts.backward_dw()
    left = {"y": out.y, "ids": out.ids_TK, "loads": out.loads_E, "dx": x.grad} | out.losses
    left |= {name: p.grad for name, p in moe.named_parameters()}
    assert way == "cpu" or all(type(t) is not Tensor or t.is_meta for t in left.values())
    return {n: (tuple(t.shape), t.dtype, t.stride()) for n, t in left.items()}, int(counter.get_total_flops())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_what_the_real_layer_leaves(way: str, options: str, dtype: torch.dtype) -> None:
    if options == "a recipe" and dtype != torch.bfloat16:
        options = "plain"
    left, flops = found(way, dtype, OPTIONS[options])
    real, real_flops = found("cpu", dtype, OPTIONS[options] | {"recipe": None})
    assert left == real
    if options in ("capacity", "a recipe"):  # the bound: slots may be dropped, and rows fill up
        assert flops >= real_flops
    elif dtype != torch.bfloat16:  # whose segments are filled up for speed
        assert flops == real_flops


def keeps_products(_context: object, op: Any, *_args: object, **_more: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("how", ["reentrant", "replaying", "selective"])
@pytest.mark.parametrize("way", WAYS)
def test_checkpointed(way: str, how: str) -> None:
    options: dict[str, Any] = {"use_reentrant": how == "reentrant"}
    if how == "selective":
        selective = partial(create_selective_checkpoint_contexts, keeps_products)
        options["context_fn"] = partial(replay_in_recompute, selective)
    elif how == "replaying":
        options["context_fn"] = replay_in_recompute
    with as_(way):
        moe, x = build(), torch.randn(3, D, requires_grad=True)
        for _ in range(2):
            y: Tensor = checkpoint(lambda x: moe(x).y, x, **options)
            y.sum().backward()
            del y
    assert x.grad is not None
    assert all(p.grad is not None and p.grad.shape == p.shape for p in moe.parameters())


@pytest.mark.parametrize("sizes", [list, torch.tensor, partial(torch.tensor, dtype=torch.int32)])
@pytest.mark.parametrize("way", WAYS)
def test_grouped_linear(way: str, sizes: Callable[[list[int]], Any]) -> None:
    with as_(way):
        linear, x = GroupedLinear(4, D, 32), torch.randn(10, D, requires_grad=True)
        y = linear(x, sizes([1, 0, 3, 2]))
        y.sum().backward()
    assert y.shape == (10, 32)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in (x, *linear.parameters()))


def test_a_main_grad_is_no_gradient_here_either() -> None:
    for way in WAYS:
        with as_(way):
            experts = ExpertMLP(E, D, HIDDEN, main_grad="accumulate")
            for p in experts.parameters():
                p.main_grad = torch.zeros(p.shape)  # type: ignore[attr-defined]
            experts(torch.randn(5, D), torch.zeros(5, K, dtype=torch.long), torch.rand(5, K)).sum().backward()
        assert all(p.main_grad.shape == p.shape for p in experts.parameters())


def layer_peak(mode: Any, kernels: Any, run_by: Any, dtype: torch.dtype, **options: Any) -> int:
    with mode:
        router = RouterConfig(num_experts=E, top_k=K)
        layer = MoEConfig(dim=256, hidden=128, router=router, kernels=kernels, dtype=dtype, **options).build()
        x = torch.randn(2048, 256, requires_grad=True, dtype=dtype)
        even = torch.arange(2048 * K).view(2048, K) % E if run_by is None else None
        layer(x, ids=even).y.sum().backward()  # its self-test is not part of it
        with Ledger(kernels=run_by and (lambda _: run_by)) as ledger:
            layer(x, ids=even).y.sum().backward()
    return ledger.peak()[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["cpu", "torch", "grouped_mm"])
def test_the_ledger_counts_memory_of_what_is_not_there(name: str, dtype: torch.dtype) -> None:
    """Of float16 C++ leaves the most to PyTorch, expert by expert."""
    unrun: Any = kernels_without_values(name, "cpu")
    unrun.pool = SimpleNamespace(empty=torch.empty, empty_like=torch.empty_like)  # what waits there is no tensor
    real = layer_peak(nullcontext(), name, None, dtype)
    assert layer_peak(WithoutValues(), name, unrun, dtype) == pytest.approx(real, rel=0.002)


def test_kernels_of_triton_say_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """They return as much without a launch."""
    pytest.importorskip("triton")
    from trimtab.kernels.triton import glue, moves

    for module in (glue, moves):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, defaultdict(lambda: lambda *_, **__: None))
    monkeypatch.setattr(glue.GluedBackend, "place_on_device", None)
    monkeypatch.setattr("trimtab.kernels.selftest.self_test", lambda *_: SimpleNamespace(fault=None))
    real = layer_peak(nullcontext(), KernelChoice(glue.GluedBackend()), None, torch.float32)
    assert layer_peak(WithoutValues(), "grouped_mm", UnrunGlue(), torch.float32) == pytest.approx(real, rel=0.002)


def test_stock_products_read_nothing_either() -> None:
    kernels, bf16 = GroupedMMBackend(), torch.bfloat16
    with torch.device("meta"):
        up, down = (torch.randn(E, *s, dtype=bf16, requires_grad=True) for s in ((2 * HIDDEN, D), (D, HIDDEN)))
        x, w = torch.randn(9, D, dtype=bf16, requires_grad=True), torch.rand(9, K, requires_grad=True)
        plan = plan_experts(torch.zeros(9, K, dtype=torch.long), E, kernels=kernels)
        expert_mlp(x, w, plan, *expert_weights(up=up, down=down), "swiglu", kernels).sum().backward()
    assert all(t.grad is not None for t in (x, w, up, down))


@pytest.mark.parametrize("mode", ["fake", "symbolic", "real"])
def test_no_graph_is_traced_that_lacks_the_products(mode: str) -> None:
    experts = ExpertMLP(E, D, HIDDEN)
    given = torch.randn(5, D), torch.zeros(5, K, dtype=torch.long), torch.rand(5, K)
    with pytest.raises(Exception, match=r"data-dependent|tracing tensor"):
        make_fx(lambda x, ids, w: experts(x, ids, w), tracing_mode=mode)(*given)


def exchanges_on_rank() -> list[str]:
    said, group = [], dist.group.WORLD
    for transport in (AllToAll(group), AllGather(group), SharedMemory(group)):
        dispatcher, slots = Dispatcher(E, transport, layer="moe"), (5, K)
        x, ids, w = torch.randn(5, D), torch.zeros(slots, dtype=torch.long), torch.ones(slots)
        real = dispatcher.combine(dispatcher.dispatch(x, ids, w).x_MD, dispatcher.dispatch(x, ids, w)).shape
        assert real == x.shape
        with FakeTensorMode(), pytest.raises(InputError) as caught:
            dispatcher.dispatch(torch.randn(5, D), torch.zeros(slots, dtype=torch.long), torch.ones(slots))
        said.append(str(caught.value))
    return said


def test_rows_whose_number_nobody_knows_are_not_exchanged() -> None:
    for rank, said in enumerate(run_ranks(exchanges_on_rank, 2)):
        assert len(said) == 3
        assert all("no rows can be exchanged" in text and f"rank {rank}" in text for text in said)
