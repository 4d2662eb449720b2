"""No race where a user puts work on another stream, and each that is planted is found."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpu_evidence.streams import streams
from trimtab import AllToAll, Dispatcher, ExpertMLP, GroupedLinear
from trimtab.dispatch.over_group import empty_rows
from trimtab.experts.activations import activate
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.plan import plan_for
from trimtab.experts.recipes import FP8Rowwise
from trimtab.experts.shared import SharedExperts
from trimtab.experts.weight_grad import GradSink, unchanged
from trimtab.kernels.choose import KernelChoice

T, D, F, E, K = 20, 64, 32, 4, 2


def rows() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(T, D).requires_grad_(), torch.randint(0, E, (T, K)), torch.rand(T, K).requires_grad_()


def test_a_planted_race_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    x, side = torch.ones(3), None
    with streams(monkeypatch) as check:
        x.mul_(2)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x.add_(1)
        assert len(check.races) == 1
        torch.cuda.current_stream().wait_stream(side)
        x.mul_(2)
        assert len(check.races) == 1


def fused(x: Tensor, ids: Tensor, w: Tensor) -> tuple[ExpertMLP, Tensor]:
    module = ExpertMLP(E, D, F, delay_wgrad=True, kernels="torch")
    return module, module(x, ids, w)


def by_products(x: Tensor, ids: Tensor, w: Tensor) -> tuple[ExpertMLP, Tensor]:
    """With an activation of one's own."""
    module, kernels = ExpertMLP(E, D, F, delay_wgrad=True), KernelChoice("torch").on(x.device, x.dtype)
    up, down = module.expert_weights()
    swiglu, sink = partial(activate, word="swiglu"), GradSink("off", module._delayed.add)
    return module, expert_mlp(x, w, plan_for(ids, E, None, kernels), up, down, swiglu, kernels, sink=sink)


def low_precision(x: Tensor, ids: Tensor, w: Tensor) -> tuple[ExpertMLP, Tensor]:
    module = ExpertMLP(E, D, F, delay_wgrad=True, recipe=FP8Rowwise(backend="emulated"), dtype=torch.bfloat16)
    return module, module(x.bfloat16(), ids, w)


def linear(x: Tensor, ids: Tensor, w: Tensor) -> tuple[GroupedLinear, Tensor]:
    module = GroupedLinear(E, D, F, delay_wgrad=True, kernels="torch")
    return module, module(x, torch.tensor([5, 0, T - 5, 0]))


@pytest.mark.parametrize("experts", [fused, by_products, low_precision, linear])
@pytest.mark.parametrize("planted", ["", "wait", "record"])
def test_delayed_gradients_wait_for_their_backward_and_keep_what_they_read(
    planted: str, experts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = rows()
    with streams(monkeypatch) as check:
        module, y = experts(*given)
        y.backward(torch.randn_like(y))
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        if planted == "wait":
            monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda *_: None)
        if planted == "record":
            monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
        with torch.cuda.stream(side):
            module.backward_dw()
        assert bool(check.races) == (planted == "wait"), check.races
        assert bool(check.unkept) == (planted == "record"), check.unkept
        if not planted:
            main.wait_stream(side)
            assert all(p.grad.abs().sum() > 0 for p in module.parameters())
            assert not check.races


def test_delayed_gradients_wait_on_the_device_of_their_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is the current one of the thread that calls."""
    waited: list[object] = []

    class Stream:
        device = torch.device("cuda", 1)

        def record_event(self) -> object:
            return object()

        def wait_event(self, event: object) -> None:
            waited.append(self)

    elsewhere, backward, side = Stream(), Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: backward)
    job = unchanged(list, [])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: elsewhere if device is None else side)
    assert job() == []
    assert waited == [side]


@pytest.mark.parametrize("waits", [True, False])
def test_shared_experts_on_a_stream_of_their_own(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, shared = ExpertMLP(E, D, F, kernels="torch"), SharedExperts(D, F)
    x, ids, w = rows()
    with streams(monkeypatch) as check:
        main, side = torch.cuda.current_stream(), torch.cuda.Stream()
        for _ in range(2):
            h = x * 2
            side.wait_stream(main)
            with torch.cuda.stream(side):
                y = shared(h)
            routed = experts(h, ids, w)
            if waits:
                main.wait_stream(side)
            (routed + y).sum().backward()
        assert bool(check.races) != waits, check.races


@pytest.mark.parametrize("waits", [True, False])
def test_one_microbatch_is_dispatched_while_another_is_computed(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    transport = AllToAll(dist.group.WORLD, guard=False)  # type: ignore[arg-type]
    monkeypatch.setattr(transport, "_rows", empty_rows)  # a pool that is for the CPU alone
    dispatcher, experts = Dispatcher(E, transport), ExpertMLP(E, D, F, kernels="torch")
    batches = [rows() for _ in range(3)]
    try:
        with streams(monkeypatch) as check:
            main, aside = torch.cuda.current_stream(), torch.cuda.Stream()
            ahead = dispatcher.dispatch(*batches[0])
            for after in (*batches[1:], None):
                now, ready = ahead, main.record_event()
                if after is not None:
                    with torch.cuda.stream(aside):
                        aside.wait_event(ready)
                        ahead = dispatcher.dispatch(*after)
                y = dispatcher.combine(experts(now.x_MD, now.ids_MK, now.weights_MK, **now.known), now)
                if waits:
                    main.wait_stream(aside)
                y.sum().backward()
            assert bool(check.races) != waits, check.races
    finally:
        dist.destroy_process_group()
