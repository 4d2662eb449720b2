"""ExpertMLP: every activation, with and without bias, weighted on either side, against the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from helpers.comparing import assert_close, cut, gradients, rounded
from trimtab import oracle
from trimtab.errors import ConfigError, InputError
from trimtab.experts.module import ExpertMLP
from trimtab.experts.weight_grad import MODES

T, D, F, E, K = 13, 16, 24, 6, 3
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def geglu(pre: Tensor) -> Tensor:
    gate, up = pre.chunk(2, -1)
    return torch.nn.functional.gelu(gate) * up


def clamped_swiglu(pre: Tensor) -> Tensor:
    gate, up = pre.chunk(2, -1)
    gate, up = cut(gate, 7.0), cut(up, 7.0, -7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


TRUTH: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": oracle.swiglu,
    "geglu": geglu,
    "clamped_swiglu": clamped_swiglu,
    "relu_squared": lambda pre: torch.relu(pre).square(),
    "gelu": torch.nn.functional.gelu,
    "geglu_tanh": lambda pre: torch.nn.functional.gelu(pre.chunk(2, -1)[0], approximate="tanh") * pre.chunk(2, -1)[1],
    "gelu_tanh": lambda pre: torch.nn.functional.gelu(pre, approximate="tanh"),
}


def experts(activation: str, dtype: torch.dtype = torch.float32, **options: object) -> ExpertMLP:
    torch.manual_seed(0)
    mlp = ExpertMLP(E, D, F, activation=activation, dtype=dtype, **options)
    with torch.no_grad():
        mlp.expert_weights()[0].values[0].mul_(6.0)  # so that gpt-oss's limit of 7 cuts some
    return mlp


def slots(routing: str, tokens: int = T) -> Tensor:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, E - 1, (tokens, K), generator=g)  # the last expert is empty
    return torch.full_like(ids, -1) if routing == "none" else ids


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("activation", TRUTH)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        ("torch", torch.float64), ("torch", torch.float32), ("torch", torch.bfloat16), ("torch", torch.float16),
        ("grouped_mm", torch.float32), ("grouped_mm", torch.bfloat16),
    ],
)  # fmt: skip
def test_values_of_every_variant(activation: str, bias: bool, kernels: str, dtype: torch.dtype) -> None:
    for routing in ("random", "none"):
        for main_grad in MODES:
            compare(activation, bias, kernels, dtype, routing, main_grad)


def compare(activation: str, bias: bool, kernels: str, dtype: torch.dtype, routing: str, main_grad: str) -> None:
    mlp = experts(activation, dtype, bias=bias, kernels=kernels, main_grad=main_grad)
    for param in (mlp.get_parameter(name) for name in mlp.parameter_names[:2]):
        param.main_grad = torch.full_like(param, 3.0, dtype=torch.promote_types(dtype, torch.float32))
    g = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(T, D, generator=g, dtype=torch.float64).to(dtype) for _ in range(2))
    x.requires_grad_()
    w = torch.rand(T, K, generator=g).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    ids = slots(routing)
    y = mlp(x, ids, w)
    y.backward(dy)

    up, down = mlp.expert_weights()
    up_bias, down_bias = (of.biases[0] if of.biases else None for of in (up, down))
    truth = oracle.moe(
        x, ids, w, up.values[0], down.values[0], up_bias_EI=up_bias, down_bias_ED=down_bias,
        activation=rounded(TRUTH[activation], dtype),
    )  # fmt: skip
    leaves = {"x": x, "w": w, **dict(mlp.named_parameters())}
    wanted = gradients(truth, list(leaves.values()), dy)
    assert y.dtype == dtype
    assert_close(y, truth, BOUNDS[dtype], "output")
    for (name, leaf), true in zip(leaves.items(), wanted, strict=True):
        assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype)
        fused = main_grad != "off" and name in mlp.parameter_names[:2]
        got = leaf.main_grad if fused else leaf.grad
        start = 3.0 if fused and main_grad == "accumulate" else 0.0
        assert_close(got, true + start, BOUNDS[dtype], f"gradient of {name}")
        if fused:
            assert leaf.grad_added_to_main_grad is True


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
            run(torch.randn(T, D), slots("random"), torch.rand(T, K))


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="activation 'silu' is not one of"):
        ExpertMLP(E, D, F, activation="silu")
    with pytest.raises(ConfigError, match="at least 1"):
        ExpertMLP(E, D, 0)
    mlp, x, ids, w = experts("swiglu"), torch.randn(T, D), slots("random"), torch.rand(T, K)
    for bad in (
        (x[:, 1:], ids, w),
        (x[1:], ids, w),
        (x, ids[:, 1:], w),
        (x, ids.float(), w),
        (x, ids, ids),
        (x[0], ids, w),
        (x.to(torch.float8_e4m3fn), ids, w),
        *((x.to(dtype), ids, w) for dtype in (torch.int64, torch.complex64, torch.bool)),
        *((x, ids.to(dtype), w) for dtype in (torch.complex64, torch.bool)),
        (x, ids, w.to(torch.float8_e4m3fn)),
        (x.to_sparse(), ids, w),
        (x, ids.to_sparse(), w),
        (x, ids, w.to_sparse()),
        (torch.nested.nested_tensor([x[:1], x[1:]]), ids, w),
        (torch.nested.nested_tensor([x[:1], x[1:]], layout=torch.jagged), ids, w),
    ):
        with pytest.raises(InputError, match=r"expected floating x \[M, 16\], int ids"):
            mlp(*bad)
    assert repr(mlp) == "ExpertMLP(6 x (16 -> 24 -> 16), swiglu, bias=False)"
