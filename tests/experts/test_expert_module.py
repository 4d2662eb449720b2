"""ExpertMLP beyond the grid of pairs: what it takes and refuses, what the compiled kernels cover, memory that is handed
out again."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.comparing import assert_close
from helpers.weights import expert_weights
from trimtab.errors import BackendError, ConfigError, InputError
from trimtab.experts import on_cpu
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.module import ExpertMLP
from trimtab.experts.passes import Pass
from trimtab.experts.plan import plan_experts
from trimtab.experts.weight import GroupedWeight
from trimtab.experts.weight_grad import GradSink
from trimtab.kernels.choose import get_backend
from trimtab.kernels.compiled import CompiledKernels, compiled_kernels

CPU = torch.device("cpu")
T, D, F, E, K = 13, 16, 24, 6, 3


def experts(activation: str = "swiglu", **options: Any) -> ExpertMLP:
    torch.manual_seed(0)
    return ExpertMLP(E, D, F, activation=activation, **options)


def slots(tokens: int = T) -> Tensor:
    """The last expert is empty."""
    return torch.randint(0, E - 1, (tokens, K), generator=torch.Generator().manual_seed(1))


def layer(x: Tensor, w: Tensor, up: Tensor, down: Tensor) -> Tensor:
    plan = plan_experts(slots(x.shape[0]), E)
    return expert_mlp(x, w, plan, *expert_weights(up=up, down=down), "swiglu", get_backend("auto", CPU))


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((T, D), (T, K), (E, 2 * F, D), (E, D, F))
    x, w, up, down = (torch.randn(*s, generator=g).to(dtype).requires_grad_() for s in shapes)
    return x, w, up, down


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("alignment", [1, 8, 32])
@pytest.mark.parametrize(("kernels", "dtype", "bound"), [
    ("cpu", torch.float32, 2e-6), ("cpu", torch.bfloat16, 3e-2),
    ("grouped_mm", torch.float32, 2e-6), ("grouped_mm", torch.bfloat16, 3e-2),
])  # fmt: skip
def test_padding_of_segments_and_behind_them_counts_nowhere(
    kernels: str, dtype: torch.dtype, bound: float, alignment: int, static: bool
) -> None:
    """A static plan has a row for each slot, kept or not, as where nothing may be read back."""
    for tokens, transposed, kept in ((T, False, 0.6), (T, True, 0.6), (T, True, 0.0), (1, False, 1.0), (0, False, 1.0)):
        ids = slots(tokens).masked_fill(torch.rand(tokens, K) >= kept, -1)
        dense, padded = plan_experts(ids, E), plan_experts(ids, E, alignment=alignment, static=static)
        found, g = [], torch.Generator().manual_seed(2)
        shapes = ((tokens, D), (tokens, K), (E, 2 * F, D), (E, D, F), (E, 2 * F), (E, D))
        leaves = [torch.randn(*s, generator=g).to(dtype).requires_grad_() for s in shapes]
        x, w, up, down, up_bias, down_bias = leaves
        given = [t.mT.contiguous() if transposed else t for t in (up, down)]
        weights = expert_weights(*given, up_bias, down_bias, transposed=transposed)
        for plan in (dense, padded):
            y = expert_mlp(x, w, plan, *weights, "swiglu", get_backend(kernels, CPU))
            found.append([y, *torch.autograd.grad(y.square().sum(), leaves, retain_graph=True)])
        for ours, true in zip(*found[::-1], strict=True):
            assert_close(ours, true, bound, f"{tokens} tokens, transposed {transposed}, kept {kept}")


def test_a_stride_zero_gradient_is_taken() -> None:
    args = tensors()
    ours = torch.autograd.grad(layer(*args).sum(), args)
    dense = torch.autograd.grad(layer(*args), args, torch.ones(T, D))
    for a, b in zip(ours, dense, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_weights_of_another_dtype_get_their_own_dtype_back() -> None:
    x, w, up, down = tensors(torch.bfloat16)
    layer(x, w, up, down).sum().backward()
    assert [t.grad.dtype for t in (x, w, up, down)] == [torch.bfloat16] * 4
    x = x.detach().float().requires_grad_()  # as under autocast: tokens wider than the experts
    y = layer(x, w, up, down)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.float32


def test_kernels_are_refused_by_name() -> None:
    with pytest.raises(BackendError, match="no kernels named 'fast'"):
        get_backend("fast", CPU)
    with pytest.raises(BackendError, match="run on cpu devices only"):
        get_backend("torch", torch.device("cuda"))
    x, w, up, down = (t.double() for t in tensors())
    plan = plan_experts(slots(), E)
    with pytest.raises(BackendError, match="float64"):
        expert_mlp(x, w, plan, *expert_weights(up=up, down=down), "swiglu", get_backend("grouped_mm", CPU))


@pytest.mark.parametrize("kernels", ["torch", "auto", "grouped_mm"])
def test_fewer_slots_than_are_kept_are_refused(kernels: str) -> None:
    mlp, x, w = experts("swiglu", kernels=kernels), torch.randn(2, D), torch.rand(2, K)
    ids = torch.tensor([[0, 3, -1], [5, 1, E]])
    assert torch.equal(mlp(x, ids, w, num_slots=4), mlp(x, ids, w, num_slots=9))
    for compiled in (mlp, torch.compile(mlp, backend="eager")):
        with pytest.raises(InputError, match=r"phase experts.*num_slots is 3, but 4 slots are kept"):
            compiled(x, ids, w, num_slots=3)
    for wrong in (-1, 2.5, True, "4"):
        with pytest.raises(InputError, match=rf"num_slots={wrong!r} must be a whole number, at least 0, or None"):
            mlp(x, ids, w, num_slots=wrong)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["gate_up", "down", "down_bias"])
def test_parameters_that_were_cast_to_what_is_not_computed_with_are_refused(name: str, compiled: bool) -> None:
    mlp = experts("swiglu", bias=True).requires_grad_(False)
    param = getattr(mlp, name)
    param.data = param.data.to(torch.float8_e4m3fn)
    run = torch.compile(mlp, backend="eager") if compiled else mlp
    for under in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        with under, pytest.raises(ConfigError, match=r"experts.*in torch\.float8_e4m3fn: keep parameters in"):
            run(torch.randn(T, D), slots(), torch.rand(T, K))


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="activation 'silu' is not one of"):
        ExpertMLP(E, D, F, activation="silu")
    with pytest.raises(ConfigError, match="at least 1"):
        ExpertMLP(E, D, 0)
    mlp, x, ids, w = experts("swiglu"), torch.randn(T, D), slots(), torch.rand(T, K)
    for bad in (
        (x[:, 1:], ids, w), (x[1:], ids, w), (x, ids[:, 1:], w), (x, ids.float(), w), (x, ids, ids), (x[0], ids, w),
        (x.to(torch.float8_e4m3fn), ids, w),
        *((x.to(dtype), ids, w) for dtype in (torch.int64, torch.complex64, torch.bool)),
        *((x, ids.to(dtype), w) for dtype in (torch.complex64, torch.bool)), (x, ids, w.to(torch.float8_e4m3fn)),
        (x.to_sparse(), ids, w), (x, ids.to_sparse(), w), (x, ids, w.to_sparse()),
        (torch.nested.nested_tensor([x[:1], x[1:]]), ids, w),
        (torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged), ids, w),
    ):  # fmt: skip
        with pytest.raises(InputError, match=r"expected floating x \[M, 16\], int ids"):
            mlp(*bad)
    assert repr(mlp) == "ExpertMLP(6 x (16 -> 24 -> 16), swiglu, bias=False)"


def a_pass(activation: str = "swiglu", dtype: torch.dtype = torch.float32) -> Pass:
    up, down = torch.zeros(2, 8, 4, dtype=dtype), torch.zeros(2, 4, 4, dtype=dtype)
    plan, x = plan_experts(torch.zeros(1, 1, dtype=torch.int64), 2), torch.zeros(1, 4, dtype=dtype)
    return Pass(x, torch.ones(1, 1), *expert_weights(up, down), activation, plan, compiled_kernels())


def test_what_is_covered_and_what_goes_the_loop_s_way() -> None:
    def differs(**fields: Any) -> Pass:
        p = a_pass()
        for name, value in fields.items():
            setattr(p, name, value)
        return p

    assert on_cpu.covers(a_pass())
    assert not on_cpu.covers(a_pass(dtype=torch.float64))
    assert not on_cpu.covers(a_pass(dtype=torch.float16))
    assert not on_cpu.covers(differs(kernels=get_backend("torch", CPU)))
    assert not on_cpu.covers(differs(up=GroupedWeight(values=(torch.zeros(2, 4, 8).transpose(1, 2),))))
    assert not on_cpu.covers(differs(up=GroupedWeight(values=(torch.zeros(8, 4), torch.zeros(8, 4)))))
    assert not on_cpu.covers(differs(word="tanh"))


def test_results_may_be_changed_in_place_and_gradients_are_not_copied() -> None:
    module = ExpertMLP(4, 256, 128)  # no other tensor of the call is as large as up's gradient
    x, ids, w = torch.randn(600, 256, requires_grad=True), torch.randint(0, 4, (600, 2)), torch.rand(600, 2)
    y = module(x, ids, w)
    y += 1
    y.sum().backward()
    where = module.gate_up.grad.data_ptr()
    module.zero_grad(set_to_none=True)
    module(x, ids, w).sum().backward()
    assert module.gate_up.grad.data_ptr() == where  # the same pages, handed out again


def test_copies_share_the_kernels() -> None:
    module = ExpertMLP(2, 16, 16)
    module(torch.randn(3, 16), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    kernels = module.kernels.on(CPU, torch.float32)
    assert kernels.name == "cpu"
    assert copy.deepcopy(module).kernels.on(CPU, torch.float32) is kernels
    assert pickle.loads(pickle.dumps(kernels)) is kernels
    others = CompiledKernels(products="widened")
    for copied in (copy.deepcopy(others), pickle.loads(pickle.dumps(others))):
        assert copied.bf16.name == "widened"


def test_shapes_that_do_not_fit_are_refused() -> None:
    ids, w = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    for x, up, down in (
        (torch.ones(3, 4), torch.ones(2, 16, 8), torch.ones(2, 8, 8)),
        (torch.ones(3, 8), torch.ones(2, 8, 8), torch.ones(2, 8, 8)),
    ):
        weights = expert_weights(up=up, down=down)
        with pytest.raises(InputError, match="do not fit together"):
            expert_mlp(x, w, plan_experts(ids, 2), *weights, "swiglu", compiled_kernels())


@pytest.mark.parametrize("given", ["codes", "recipe", "more of down", "a list of stacks", "no such sink"])
def test_weights_that_no_pass_reads_are_refused(given: str) -> None:
    up, down, low = torch.randn(E, 2, F, D), torch.randn(E, D, F), None
    first, second = GroupedWeight(values=(up,)), GroupedWeight(values=(down,))
    x, w, ids = torch.randn(T, D), torch.rand(T, K), slots()
    plan = plan_experts(ids, E)
    if given == "codes":
        second = GroupedWeight(values=(down.byte(),), transposed=True, format="int8", scales=torch.ones(E, D, 1))
    elif given == "recipe":
        second, low = GroupedWeight(values=(down.mT.contiguous(),), transposed=True), (None, None)
    elif given == "more of down":
        second = GroupedWeight(values=(torch.randn(E + 1, D, F),))
    elif given == "a list of stacks":
        first = GroupedWeight(values=tuple(up.split(1)))
    mode: Any = given == "no such sink" or "off"
    options: dict[str, Any] = {"low_precision": low}
    with pytest.raises(ConfigError, match=r"transposed|one tensor of all experts|main_grad=True"):
        expert_mlp(x, w, plan, first, second, "swiglu", "torch", sink=GradSink(mode), **options)
