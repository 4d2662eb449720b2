"""Adapters on the experts: output and every gradient of what adds them by thin products, against the dense experts with
the deltas built, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from helpers.weights import expert_weights
from trimtab import oracle
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.plan import plan_experts
from trimtab.experts.weight import GroupedWeight, LoraFactors, stack_factors
from trimtab.kernels.choose import KernelChoice

NAMES = ("x", "w", "up", "down", "up_a", "up_b", "down_a", "down_b", "up_bias", "down_bias")
BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 3e-2}
SCALES = {"up": 2.0, "down": 0.5}
TRUTHS = {"swiglu": oracle.swiglu, "relu_squared": lambda pre: torch.relu(pre).square()}


@dataclass(frozen=True, kw_only=True)
class Case:
    """shared: of the pairs' matrices, those that all experts share. on: weights with an adapter."""

    experts: int = 6
    dim: int = 64
    hidden: int = 96
    tokens: int = 37
    rank: int = 4
    shared: str = ""
    on: tuple[str, ...] = ("up", "down")
    activation: str = "swiglu"
    transposed: bool = False
    bias: bool = False
    kept: float = 0.9


CASES = {
    "plain": Case(),
    "shared": Case(shared="ab"),
    "shared_a": Case(shared="a"),
    "transposed": Case(transposed=True),
    "no_gate": Case(activation="relu_squared"),
    "biases": Case(bias=True),
    "up": Case(on=("up",)),
    "down": Case(on=("down",)),
    "no_token": Case(kept=0.0),
    "no_row_at_all": Case(tokens=0),
    "many_rows": Case(rank=16, tokens=300),
    "more_than_a_step": Case(rank=40, dim=416, hidden=288, tokens=64),
    "rows_in_steps": Case(experts=2, rank=24, dim=32, hidden=32, tokens=700),
    "odd_widths": Case(dim=48, hidden=40, rank=3),
}


def tensors(case: Case, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The operands as `dtype` holds them, ids with an expert that has no token, and dy."""
    g = torch.Generator().manual_seed(1)
    e, d, f, r = case.experts, case.dim, case.hidden, case.rank
    i = 2 * f if case.activation == "swiglu" else f
    a, b = (1 if kind in case.shared else e for kind in "ab")
    shapes = {
        "x": (case.tokens, d), "w": (case.tokens, 3), "up": (e, i, d), "down": (e, d, f), "up_a": (a, r, d),
        "up_b": (b, i, r), "down_a": (a, r, f), "down_b": (b, d, r), "up_bias": (e, i), "down_bias": (e, d),
    }  # fmt: skip
    made = {name: torch.randn(s, generator=g, dtype=torch.float64) / s[-1] ** 0.5 for name, s in shapes.items()}
    ids = torch.randint(0, e - 1, (case.tokens, 3), generator=g)
    ids = ids.masked_fill(torch.rand(ids.shape, generator=g) >= case.kept, -1)
    dy = torch.randn(case.tokens, d, generator=g, dtype=torch.float64)
    return {name: t.to(dtype).double() for name, t in made.items()}, ids, dy.to(dtype)


def truth(case: Case, given: dict[str, Tensor], ids: Tensor, dy: Tensor) -> dict[str, Tensor]:
    t = {name: value.clone().requires_grad_() for name, value in given.items()}
    whole = {name: t[name] for name in SCALES}
    for name in case.on:
        whole[name] = t[name] + SCALES[name] * (t[f"{name}_b"] @ t[f"{name}_a"])
    biases = {"up_bias_EI": t["up_bias"], "down_bias_ED": t["down_bias"]} if case.bias else {}
    y = oracle.moe(t["x"], ids, t["w"], *whole.values(), activation=TRUTHS[case.activation], **biases)
    unused = (
        "" if case.bias else "bias",
        *(f"{name}_{kind}" for name in SCALES if name not in case.on for kind in "ab"),
    )
    zero = sum(0 * value.sum() for name, value in t.items() if not any(word and word in name for word in unused))
    (y + zero).backward(dy.double())  # whatever was used has a gradient, also where no token came
    return {"y": y.detach()} | {name: value.grad for name, value in t.items() if value.grad is not None}


def weights_of(case: Case, t: dict[str, Tensor], dropout: float = 0.0) -> tuple[GroupedWeight, GroupedWeight]:
    lora = {
        name: LoraFactors(a=t[f"{name}_a"], b=t[f"{name}_b"], scale=SCALES[name], dropout=dropout) for name in case.on
    }
    up, down = (t[name].mT.contiguous() if case.transposed else t[name] for name in ("up", "down"))
    biases = {name: t[name] if case.bias else None for name in ("up_bias", "down_bias")}
    return expert_weights(up=up, down=down, transposed=case.transposed, lora=lora, **biases)


def ours(
    case: Case, given: dict[str, Tensor], ids: Tensor, dy: Tensor, kernels: str, **options: float
) -> dict[str, Tensor]:
    t = {name: value.to(dy.dtype).clone().requires_grad_() for name, value in given.items()}
    plan = plan_experts(ids, case.experts)
    backend = KernelChoice(kernels).on(torch.device("cpu"), dy.dtype)
    y = expert_mlp(t["x"], t["w"], plan, *weights_of(case, t, **options), case.activation, backend)
    y.backward(dy)
    return {"y": y.detach()} | {name: value.grad for name, value in t.items() if value.grad is not None}


def check(got: dict[str, Tensor], true: dict[str, Tensor], bound: float) -> None:
    for name, value in true.items():
        scale = value.abs().max().item() if value.numel() else 0.0
        assert got[name].shape == value.shape, name
        assert ((got[name].double() - value).abs() <= bound * (scale or 1.0)).all(), name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        ("cpu", torch.float32),
        ("cpu", torch.bfloat16),
        ("torch", torch.float64),
        ("torch", torch.bfloat16),
        ("grouped_mm", torch.float32),
    ],
)
def test_equal_to_experts_with_the_delta(case: str, kernels: str, dtype: torch.dtype) -> None:
    given, ids, dy = tensors(CASES[case], dtype)
    got = ours(CASES[case], given, ids, dy, kernels)
    check(got, truth(CASES[case], given, ids, dy), BOUNDS[dtype])


def test_frozen_weights_cost_no_product_and_get_no_gradient() -> None:
    case = Case(rank=8)
    given, ids, dy = tensors(case, torch.float32)
    t = {name: value.float().requires_grad_(name not in ("up", "down")) for name, value in given.items()}
    plan = plan_experts(ids, case.experts)
    rows, (d, f, r) = int((ids >= 0).sum()), (case.dim, case.hidden, case.rank)
    with FlopCounterMode(display=False) as counter:
        expert_mlp(t["x"], t["w"], plan, *weights_of(case, t), "swiglu", "cpu").backward(dy)
    own, thin = 2 * rows * 3 * d * f, 2 * rows * r * (d + 2 * f + f + d)
    assert counter.get_total_flops() == own + thin + own + 2 * thin
    assert t["up"].grad is None
    assert t["down"].grad is None


def test_saved_are_the_rows_the_pre_activations_and_thin_rows() -> None:
    case = Case(rank=8)
    given, ids, _ = tensors(case, torch.float32)
    t = {name: value.float().requires_grad_(name.endswith(("_a", "_b"))) for name, value in given.items()}
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        expert_mlp(t["x"], t["w"], plan_experts(ids, case.experts), *weights_of(case, t), "swiglu", "cpu")
    own = {value.data_ptr() for value in t.values()}
    floats = [tuple(s.shape) for s in saved if s.is_floating_point() and s.data_ptr() not in own]
    rows = int((ids >= 0).sum())
    assert sorted(floats) == sorted([(rows, 2 * case.hidden), (rows, case.rank), (rows, case.rank)])


def test_factors_of_several_adapters_are_one_adapter_s() -> None:
    g = torch.Generator().manual_seed(0)

    def factors(groups: int, scale: float) -> LoraFactors:
        a, b = (torch.randn(groups, *size, generator=g, dtype=torch.float64) for size in ((3, 8), (10, 3)))
        return LoraFactors(a=a, b=b, scale=scale)

    def delta(of: LoraFactors) -> Tensor:
        return of.scale * (of.b @ of.a)

    own, shared = factors(4, 2.0), factors(1, 0.5)
    total = stack_factors([own, shared])
    assert total is not None
    torch.testing.assert_close(delta(total), delta(own) + delta(shared))
    assert stack_factors([]) is None
    assert stack_factors([own]) is own


def test_dropout_is_of_the_rows_that_the_adapter_reads() -> None:
    case = Case()
    given, ids, dy = tensors(case, torch.float64)
    torch.manual_seed(0)
    some = ours(case, given, ids, dy, "torch", dropout=0.5)
    alone = ours(case, given, ids, dy, "torch", dropout=1.0)  # the base is all that is left
    base = truth(Case(on=()), given, ids, dy)
    torch.testing.assert_close(alone["y"], base["y"])
    assert not torch.allclose(some["y"], base["y"])
    assert not torch.allclose(some["y"], truth(case, given, ids, dy)["y"])


def test_a_row_has_the_same_bits_whatever_rows_are_beside_it() -> None:
    case = Case(rank=16, tokens=80)
    given, ids, dy = tensors(case, torch.bfloat16)
    whole = ours(case, given, ids, dy, "cpu")
    for n in (1, 7, 40):
        part = ours(case, given | {"x": given["x"][:n], "w": given["w"][:n]}, ids[:n], dy[:n], "cpu")
        assert torch.equal(part["y"], whole["y"][:n])
        assert torch.equal(part["x"], whole["x"][:n])


def test_compiled_without_a_break() -> None:
    case = Case()
    given, ids, dy = tensors(case, torch.float32)
    t = {name: value.float().requires_grad_() for name, value in given.items()}

    def run(x: Tensor, w: Tensor) -> Tensor:
        return expert_mlp(x, w, plan, *weights_of(case, t), "swiglu", "cpu")

    plan = plan_experts(ids, case.experts)
    leaves = list(t.values())[:8]
    expected = torch.autograd.grad(run(t["x"], t["w"]), leaves, dy)
    found = torch.autograd.grad(torch.compile(run, fullgraph=True)(t["x"], t["w"]), leaves, dy)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
