"""A function whose kernels are replayed: as called each time, and results that are the caller's. On a CUDA device, and
by a graph of calls of ATen where there is none."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trimtab.dispatch.options import ReplicationConfig
from trimtab.dispatch.replica_route import _plan
from trimtab.kernels import one_launch
from trimtab.kernels.one_launch import OneLaunch

P, E = 4, 12


class CallGraph(TorchDispatchMode):
    """In place of torch.cuda.CUDAGraph: makes its calls again, into the memory of the first results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def capture_begin(self, capture_error_mode: str) -> None:
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "item" not in func.__name__
        assert "_local_scalar" not in func.__name__
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            given = {t.data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and not old._is_view() and old.data_ptr() not in given:
                    old.copy_(new)


def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = SimpleNamespace(device=None, **{n: lambda _: None for n in ("wait_stream", "wait_event", "record")})
    monkeypatch.setattr(one_launch, "on_cuda", lambda t: True)
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: idle)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CallGraph)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("device", ["emulated", "cuda"])
def test_each_call_plans_what_it_is_given(device: str, inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "emulated":
        emulated(monkeypatch)
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    plain = partial(_plan, ReplicationConfig(copy_cost=20), 0, 1)
    at_once = OneLaunch(plain)
    g, where = torch.Generator().manual_seed(0), "cpu" if device == "emulated" else device
    held: list[tuple[list[Tensor], list[Tensor]]] = []
    for call in range(5):
        counts_HPE = torch.randint(0, 60, (1, P, E), generator=g) * torch.randint(0, 2, (P, E), generator=g)
        own_E = counts_HPE[0, 1].clone() + (call == 3)  # once it has other slots than were gathered
        before = counts_HPE.clone()
        with torch.inference_mode(inference and call == 0):
            made = at_once(counts_HPE.to(where), own_E.to(where))
        assert torch.equal(counts_HPE, before)
        held.append((list(made), plain(counts_HPE, own_E)))
    for call, (made, wanted) in enumerate(held):
        assert len({t.data_ptr() for made, _ in held for t in made}) == 5 * len(made), "results of their own"
        for got, want in zip(made, wanted, strict=True):
            assert torch.equal(got.cpu(), want), call
            assert got.is_contiguous()
