"""The expert MLP against the float64 oracle: output and every gradient, on poisoned memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from helpers.comparing import assert_close, cut, gradients, rounded
from helpers.weights import expert_weights
from trimtab import oracle
from trimtab.errors import BackendError
from trimtab.experts.mlp import RowFunction, expert_mlp
from trimtab.experts.plan import plan_experts
from trimtab.kernels.choose import get_backend

T, D, F, E, K = 13, 16, 24, 6, 3
CPU = torch.device("cpu")
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
ROUTINGS = (
    "random",
    "first_empty",
    "middle_empty",
    "last_empty",
    "one_expert",
    "none",
    "dropped",
    "duplicates",
    "sentinel",
)


def clamped_interleaved(pre: Tensor) -> Tensor:
    """gpt-oss's gate: interleaved, clamped."""
    gate, up = cut(pre[..., ::2], 1.5), cut(pre[..., 1::2], 1.5, -1.5)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def relu_squared(pre: Tensor) -> Tensor:
    return torch.relu(pre).square()


@dataclass
class Variant:
    """An activation of ours or a function, what the oracle calls for it, and the width of its input over F."""

    ours: str | RowFunction
    truth: Callable[[Tensor], Tensor]
    width: int


VARIANTS = {
    "swiglu": Variant("swiglu", oracle.swiglu, 2),
    "clamped_interleaved": Variant(clamped_interleaved, clamped_interleaved, 2),
    "relu_squared": Variant(relu_squared, relu_squared, 1),
}


def route(routing: str, tokens: int) -> Tensor:
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(0, E, (tokens, K), generator=g)
    empty = {"first_empty": 0, "middle_empty": E // 2, "last_empty": E - 1}
    if routing in empty:
        ids = torch.where(ids == empty[routing], (ids + 1) % E, ids)
    elif routing == "one_expert":
        ids = torch.full_like(ids, 2)
    elif routing == "none":
        ids = torch.full_like(ids, -1)
    elif routing == "dropped":
        ids = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.5, -1)
    elif routing == "duplicates":
        ids = ids[:, :1].expand(-1, K)
    elif routing == "sentinel":
        ids = ids.masked_fill(torch.rand(ids.shape, generator=g) < 0.5, E)
    return ids


def check(
    kernels: str, dtype: torch.dtype, routing: str, variant: str, bias: bool, transposed: bool, tokens: int = T,
    alignment: int = 1, norm: bool = False, bound: float | None = None,
) -> None:  # fmt: skip
    g = torch.Generator().manual_seed(5)
    v = VARIANTS[variant]

    def leaf(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(dtype).requires_grad_()

    x = leaf(tokens, D)
    w = torch.rand(tokens, K, generator=g, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
    w.requires_grad_()
    up = leaf(E, v.width * F, D, scale=D**-0.5)
    down = leaf(E, D, F, scale=F**-0.5)
    up_bias, down_bias = (leaf(E, v.width * F), leaf(E, D)) if bias else (None, None)
    ids = route(routing, tokens)
    post, leaves = None, [t for t in (x, w, up, down, up_bias, down_bias) if t is not None]
    truth_post = None
    if norm:
        own = torch.nn.RMSNorm(D, eps=1e-3, dtype=dtype)
        scale = own.weight = torch.nn.Parameter(leaf(D).detach())
        leaves.append(scale)
        post = own
        truth_post = lambda r: torch.nn.functional.rms_norm(r, (D,), eps=1e-3) * scale.double()  # noqa: E731

    flip = (lambda t: t.transpose(1, 2).contiguous()) if transposed else (lambda t: t)
    y = expert_mlp(
        x,
        w,
        plan_experts(ids, E, alignment=alignment, static=kernels == "grouped_mm"),
        *expert_weights(up=flip(up), down=flip(down), up_bias=up_bias, down_bias=down_bias, transposed=transposed),
        v.ours,
        get_backend(kernels, CPU),
        norm=post,
    )
    truth = oracle.moe(
        x, ids.masked_fill(ids == E, -1), w, up, down, up_bias_EI=up_bias, down_bias_ED=down_bias,
        activation=rounded(v.truth, dtype), post_norm=truth_post,
    )  # fmt: skip
    dy = torch.randn(tokens, D, generator=g, dtype=torch.float64)
    grads = torch.autograd.grad(y, leaves, dy.to(dtype))
    wanted, bound = gradients(truth, leaves, dy), bound or BOUNDS[dtype]
    names = ["x", "w", "up", "down"] + ["up_bias", "down_bias"] * bias + ["norm"] * norm
    assert y.dtype == dtype
    assert_close(y, truth, bound, "output")
    for name, leaf_, grad, true_grad in zip(names, leaves, grads, wanted, strict=True):
        assert grad.dtype == leaf_.dtype
        assert_close(grad, true_grad, bound, f"gradient of {name}")


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("bias", "transposed"), [(False, False), (True, True), (True, False)])
def test_loop_equals_oracle(dtype: torch.dtype, routing: str, variant: str, bias: bool, transposed: bool) -> None:
    check("torch", dtype, routing, variant, bias, transposed)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("alignment", [1, 8, 32])
@pytest.mark.parametrize(("bias", "transposed"), [(False, False), (True, True)])
def test_stock_equals_oracle_with_static_shapes(
    dtype: torch.dtype, routing: str, alignment: int, bias: bool, transposed: bool
) -> None:
    check("grouped_mm", dtype, routing, "swiglu", bias, transposed, alignment=alignment)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("kernels", "dtype"), [("torch", torch.float64), ("torch", torch.float32), ("grouped_mm", torch.float32)]
)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("bias", [False, True])
def test_norm_behind_the_experts(kernels: str, dtype: torch.dtype, routing: str, bias: bool) -> None:
    check(kernels, dtype, routing, "swiglu", bias, False, norm=True)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kernels", ["torch", "grouped_mm"])
@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_tokens_is_a_number_of_tokens(kernels: str, tokens: int, variant: str) -> None:
    check(kernels, torch.float32, "random", variant, True, False, tokens=tokens)


def layer(x: Tensor, w: Tensor, up: Tensor, down: Tensor) -> Tensor:
    plan = plan_experts(route("random", x.shape[0]), E)
    return expert_mlp(x, w, plan, *expert_weights(up=up, down=down), "swiglu", get_backend("auto", CPU))


def tensors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((T, D), (T, K), (E, 2 * F, D), (E, D, F))
    x, w, up, down = (torch.randn(*s, generator=g).to(dtype).requires_grad_() for s in shapes)
    return x, w, up, down


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


def test_same_bits_run_to_run() -> None:
    args = tensors()
    runs = [torch.autograd.grad(layer(*args).square().sum(), args) for _ in range(3)]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


def test_kernels_are_refused_by_name() -> None:
    with pytest.raises(BackendError, match="no kernels named 'fast'"):
        get_backend("fast", CPU)
    with pytest.raises(BackendError, match="run on cpu devices only"):
        get_backend("torch", torch.device("cuda"))
    x, w, up, down = (t.double() for t in tensors())
    plan = plan_experts(route("random", T), E)
    with pytest.raises(BackendError, match="float64"):
        expert_mlp(x, w, plan, *expert_weights(up=up, down=down), "swiglu", get_backend("grouped_mm", CPU))
