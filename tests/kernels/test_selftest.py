"""The self-test passes what is right, names what is broken, and takes another only where that was allowed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partialmethod
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trimtab.errors import BackendError, ConfigError
from trimtab.kernels import selftest
from trimtab.kernels.api import Backend, Block
from trimtab.kernels.choose import KernelChoice
from trimtab.kernels.compiled import CompiledKernels
from trimtab.kernels.expert_check import swiglu_experts, wave
from trimtab.kernels.selftest import self_test
from trimtab.kernels.torch_mm import GroupedMMBackend, TorchBackend
from trimtab.oracle import moe

CPU = torch.device("cpu")


def broken(base: type[Any], name: str, method: str, wrong: Callable[..., Any]) -> type[Backend]:
    """`base`, of which one method does what `wrong` makes of the right one."""
    return type(name, (base,), {"name": name, method: partialmethod(wrong, getattr(base, method))})


def leaves_tail(self: Any, right: Any, x: Tensor, w: Tensor, block: Block, out: Tensor | None = None) -> Tensor:
    """Writes the segments only; rows behind them are what the memory held."""
    y, end = right(self, x, w, block), int(block.offsets_e[-1])
    if out is None:
        return y
    out[:end] = y[:end]
    return out


def leaves_fresh_tail(self: Any, right: Any, x: Tensor, w: Tensor, block: Block, out: Tensor | None = None) -> Tensor:
    """The same, in fresh memory only."""
    y, end = right(self, x, w, block, out), int(block.offsets_e[-1])
    fresh = torch.empty_like(y)
    fresh[:end] = y[:end]
    return fresh if out is None else y


def stale_groups(self: Any, right: Any, a: Tensor, b: Tensor, block: Block, out: Tensor, *, add: bool = False) -> None:
    """Skips groups without rows, so that their gradient stays what it was."""
    before, empty = out.clone(), block.offsets_e[1:] == block.offsets_e[:-1]
    right(self, a, b, block, out, add=add)
    out.copy_(torch.where(empty[:, None, None], before, out))


def refuses_stride_0(self: Any, right: Any, x: Tensor, *rest: Any) -> Tensor:
    if 0 in x.stride():
        raise ValueError("operand has stride 0")
    return right(self, x, *rest)


def off_by_one(self: Any, right: Any, x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    """Right shapes, wrong numbers."""
    return right(self, x, w + 1, *rest)


LeavesTail = broken(GroupedMMBackend, "leaves_tail", "grouped_mm", leaves_tail)
StaleGroups = broken(GroupedMMBackend, "stale_groups", "grouped_wgrad", stale_groups)
BROKEN = (
    (LeavesTail, "output with a NaN tail"),
    (broken(GroupedMMBackend, "leaves_fresh_tail", "grouped_mm", leaves_fresh_tail), "output with a NaN tail"),
    (StaleGroups, "weight gradient over stale values"),
    (
        broken(TorchBackend, "refuses_stride_0", "grouped_mm", refuses_stride_0),
        "stride-0 gradient.*ValueError: operand has stride 0",
    ),
    (broken(TorchBackend, "off_by_one", "grouped_mm", off_by_one), "output with a NaN tail.*wrong values"),
)


@pytest.mark.parametrize("name", ["torch", "grouped_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_our_own_kernels_pass_once(name: str, dtype: torch.dtype) -> None:
    choice = KernelChoice(name)
    assert choice.reports == []  # nothing runs before the first use
    kernels = choice.on(CPU, dtype)
    assert kernels.name == name
    assert choice.on(CPU, dtype) is kernels
    (report,) = choice.reports
    assert report.fault is None


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("broken", "fault"), BROKEN)
def test_a_broken_backend_is_refused_by_name_and_another_taken_only_where_it_was_allowed(
    broken: type[Backend], fault: str
) -> None:
    with pytest.raises(BackendError, match=rf"kernels '{broken.name}' failed.*{fault}"):
        KernelChoice(broken()).on(CPU, torch.float32)
    choice = KernelChoice(broken(), fallback=["torch"])
    with pytest.warns(UserWarning, match=rf"'{broken.name}' failed.*Kernels 'torch' are used instead"):
        assert choice.on(CPU, torch.float32).name == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choice.on(CPU, torch.float32).name == "torch"  # said once
    assert [r.kernels for r in choice.reports] == [broken.name, "torch"]


@pytest.mark.parametrize(("fault", "at"), [(None, None), ("a fault", None), ("a fault", torch.float32)])
def test_kernels_that_layers_share_are_tested_once(
    fault: str | None, at: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = CompiledKernels(), CompiledKernels()
    seen: list[tuple[bool, torch.dtype | None]] = []

    def found(kernels: CompiledKernels, device: torch.device = CPU, dtype: torch.dtype | None = None) -> str | None:
        seen.append((kernels is one, dtype))
        return fault if dtype == at else None

    monkeypatch.setattr(selftest, "first_cpu_fault", found)
    monkeypatch.setattr(selftest, "_first_fault", found)
    for kernels, dtype in ((one, torch.bfloat16), (one, torch.bfloat16), (one, torch.float32), (other, torch.float32)):
        assert self_test(kernels, CPU, dtype).fault == (fault if at in (None, dtype) else None)
    products = [] if fault and at is None else [torch.bfloat16, torch.float32]
    assert [dtype for ours, dtype in seen if ours] == [None, *products]
    assert [dtype for ours, dtype in seen if not ours] == [None, *products[1:]]


def test_the_experts_that_fused_kernels_are_held_to_have_autograd_s_gradients() -> None:
    f64 = torch.float64
    M, K, E, D, F = 5, 2, 3, 4, 3
    x, w, up, down = (
        wave(*shape, step=step, dtype=f64).requires_grad_()
        for shape, step in (((M, D), 0.7), ((M, K), 0.9), ((E, 2 * F, D), 2.1), ((E, D, F), 3.3))
    )
    dy = wave(M, D, step=1.3, dtype=f64)
    ids = torch.tensor([[0, 2], [-1, 0], [2, 0], [0, -1], [-1, -1]])  # none to expert 1
    found = swiglu_experts(x.detach(), dy, w.detach(), up.detach(), down.detach(), ids)
    y = moe(x, ids, w, up, down)
    true = (y, *torch.autograd.grad(y, (x, w, up, down), dy))
    for name, value in zip(("y", "dx", "dw", "d_up", "d_down"), true, strict=True):
        torch.testing.assert_close(found[name], value, msg=name)


@pytest.mark.parametrize("check", ["first_glue_fault", "first_triton_fault"])
def test_what_triton_raises_is_a_reason_to_fall_back(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiler's errors derive from Exception alone."""

    class OutOfResources(Exception):
        pass

    class OnTriton(GroupedMMBackend):
        name, words, launch = "on_triton", (), object()

    out = OutOfResources("shared memory, Required: 147456, Hardware limit: 101376")
    monkeypatch.setattr(selftest, "first_glue_fault", lambda *args: None)
    monkeypatch.setattr(selftest, check, Mock(side_effect=out))
    choice = KernelChoice(OnTriton(), fallback=["torch"])
    with pytest.warns(UserWarning, match="'on_triton' failed.*OutOfResources: shared memory, Required: 147456"):
        assert choice.on(CPU, torch.float32).name == "torch"


def test_all_refused_names_all() -> None:
    with pytest.raises(BackendError, match=r"'leaves_tail' failed.*'stale_groups' failed"):
        KernelChoice(LeavesTail(), fallback=[StaleGroups()]).on(CPU, torch.float32)


@pytest.mark.parametrize("wrong", ["fast", None])
def test_a_name_that_is_none_is_refused_at_once(wrong: str) -> None:
    for asked, fallback in ((wrong, ()), ("torch", (wrong,))):
        with pytest.raises(ConfigError, match=f"kernels={wrong!r} is not one of .'auto', 'cpu'"):
            KernelChoice(asked, fallback=fallback)


def test_a_dtype_that_kernels_do_not_have_is_a_reason_to_fall_back() -> None:
    with pytest.raises(BackendError, match="float64"):
        KernelChoice("grouped_mm").on(CPU, torch.float64)
    with pytest.warns(UserWarning, match="float64"):
        assert KernelChoice("grouped_mm", fallback=["torch"]).on(CPU, torch.float64).name == "torch"


def test_tensors_without_values_are_computed_by_none_and_test_none() -> None:
    choice = KernelChoice("triton")
    assert choice.on(torch.device("meta"), torch.float64).name == "grouped_mm"
    with FakeTensorMode():
        assert choice.on(CPU, torch.float32).name == "grouped_mm"
    assert not choice.reports
    with pytest.raises(BackendError):
        choice.on(CPU, torch.float32)
