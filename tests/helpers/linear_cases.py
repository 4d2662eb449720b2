"""The grouped linear map: one case of its grid, and its truth in float64, a plain loop over the groups; also of what a
recipe makes of its operands.

Legend: R rows, S rows in aligned segments, G groups, A in features, B out features."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from helpers.comparing import assert_close
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.recipes import Recipe, RecipeState
from trimtab.experts.weight_grad import MODES, MainGradMode
from trimtab.kernels.choose import KernelChoice


@dataclass
class Truth:
    """Float64 results, one entry per group where a tensor is per group."""

    y: Tensor
    dx: Tensor
    dw: list[Tensor]
    db: list[Tensor]


@dataclass
class Operands:
    """What each of the three products multiplies: forward x @ w^T, dgrad dy @ v, wgrad d^T @ z."""

    x: Tensor
    w: Tensor
    dy: Tensor
    v: Tensor
    d: Tensor
    z: Tensor


def results(o: Operands, b: Tensor | None, dy: Tensor, sizes: list[int]) -> Truth:
    """Rows behind the last segment are zero in y and dx and count nowhere else."""
    truth = Truth(
        y=torch.zeros_like(dy, dtype=torch.float64), dx=torch.zeros_like(o.x, dtype=torch.float64), dw=[], db=[]
    )
    start = 0
    for i, size in enumerate(sizes):
        s = slice(start, start + size)
        truth.y[s] = o.x[s].double() @ o.w[i].double().t() + (0 if b is None else b[i].detach().double())
        truth.dx[s] = o.dy[s].double() @ o.v[i].double()
        truth.dw.append(o.d[s].double().t() @ o.z[s].double())
        truth.db += [] if b is None else [dy[s].double().sum(0)]
        start += size
    return truth


def true_results(x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor, sizes: list[int]) -> Truth:
    """x [R, A], w [G, B, A], b [G, B], dy [R, B]."""
    x, w = x.detach(), w.detach()
    return results(Operands(x=x, w=w, dy=dy, v=w, d=dy, z=x), b, dy, sizes)


def quantised_results(
    state: RecipeState, alignment: int, x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor, sizes: list[int]
) -> Truth:
    """`state` as the layer's was before the call. Segments are laid out here on their own, from Python integers."""
    x, w = x.detach(), w.detach()
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // alignment) * alignment)
    offsets = torch.tensor(starts)
    place = torch.cat([start + torch.arange(n) for start, n in zip(starts, sizes, strict=False)])

    def laid_out(rows: Tensor) -> Tensor:
        spread = rows.new_zeros(starts[-1], rows.shape[1])
        spread[place] = rows[: sum(sizes)]
        return spread

    def back(spread: Tensor, like: Tensor) -> Tensor:
        rows = torch.zeros_like(like, dtype=torch.float32)
        rows[: sum(sizes)] = spread[place]
        return rows

    w_GAB, spread_x, spread_dy = w.transpose(1, 2), laid_out(x), laid_out(dy)
    operands = Operands(
        x=back(state.activation(spread_x, offsets, "row"), x),
        w=state.weight(w_GAB, "in").transpose(1, 2),
        z=back(state.activation(spread_x, offsets, "column"), x),
        dy=back(state.gradient(spread_dy, offsets, "row"), dy),
        v=state.weight(w_GAB, "out").transpose(1, 2),
        d=back(state.gradient(spread_dy, offsets, "column"), dy),
    )
    return results(operands, b, dy, sizes)


A, B, TAIL = 16, 24, 3
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
EMPTY = ("first", "middle", "last", "all", "none")
# Layers share a choice so that the self-test runs once, not thousands of times.
KERNELS = {"host": KernelChoice("torch"), "device": KernelChoice("grouped_mm")}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the grid.

    splits: "host" runs on sizes that the host reads, "device" on the kernels that never read them.
    stale: what main_grad holds before.
    """

    dtype: torch.dtype
    groups: int
    empty: str = "none"
    single: bool = True
    bias: bool = True
    main_grad: MainGradMode = "off"
    delayed: bool = False
    splits: str = "host"
    recipe: Recipe | None = None
    stale: float = 3.0

    @property
    def sizes(self) -> list[int]:
        sizes = [1 + (5 * i) % 7 for i in range(self.groups)]
        which = {"first": slice(0, 1), "middle": slice(self.groups // 2, self.groups // 2 + 1), "last": slice(-1, None)}
        which |= {"all": slice(None), "none": slice(0, 0)}
        sizes[which[self.empty]] = [0] * len(sizes[which[self.empty]])
        return sizes


def all_cases(dtype: torch.dtype, groups: int) -> Iterator[Case]:
    """Every value of every other axis with every other."""
    flags = (False, True)
    for empty, single, bias, main_grad, delayed, splits in product(EMPTY, flags, flags, MODES, flags, KERNELS):
        yield Case(
            dtype=dtype, groups=groups, empty=empty, single=single, bias=bias, main_grad=main_grad, delayed=delayed,
            splits=splits,
        )  # fmt: skip


def recipe_cases(recipe: Recipe, dtype: torch.dtype, groups: int) -> Iterator[Case]:
    """Every empty group with every form and main_grad; bias, delay and splits alternate so that all eight occur."""
    for i, (empty, single, main_grad) in enumerate(product(EMPTY, (False, True), MODES)):
        yield Case(
            dtype=dtype, groups=groups, empty=empty, single=single, bias=i % 2 == 0, main_grad=main_grad,
            delayed=(i // 2) % 2 == 0, splits="host" if (i // 4) % 2 else "device", recipe=recipe,
        )  # fmt: skip


def per_group(layer: GroupedLinear, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return list(tensors[0].unbind()) if layer.single_parameter else list(tensors)


def check(case: Case, main_dtype: torch.dtype = torch.float32) -> None:
    """Two microbatches' worth of contract in one: stale main_grad before, hooks counted, tails poisoned."""
    layer = GroupedLinear(
        case.groups, A, B, bias=case.bias, dtype=case.dtype, single_parameter=case.single, main_grad=case.main_grad,
        delay_wgrad=case.delayed, kernels=KERNELS[case.splits], recipe=case.recipe,
    )  # fmt: skip
    twin = copy.deepcopy(layer.recipe_state)
    sizes, bound = case.sizes, BOUNDS[case.dtype]
    rows = sum(sizes) + TAIL
    g = torch.Generator().manual_seed(rows)
    x, dy = (torch.randn(rows, n, generator=g, dtype=torch.float64).to(case.dtype) for n in (A, B))
    x[sum(sizes) :] = dy[sum(sizes) :] = float("nan")
    x.requires_grad_()
    fired: list[Tensor] = []
    for param in (*layer.weights, *layer.biases):
        param.main_grad = torch.full_like(param, case.stale, dtype=main_dtype)
        param.register_post_accumulate_grad_hook(fired.append)
    y = layer(x, sizes if case.splits == "host" else torch.tensor(sizes, dtype=torch.int32))
    y.backward(dy)
    if case.delayed:
        assert not fired
        assert all(p.grad is None for p in layer.parameters())
        layer.backward_dw()
    bias = torch.stack(per_group(layer, layer.biases)) if case.bias else None
    weight = torch.stack(per_group(layer, layer.weights))
    if case.recipe is None:
        truth = true_results(x, weight, bias, dy, sizes)
    else:
        truth = quantised_results(twin, case.recipe.alignment, x, weight, bias, dy, sizes)
    assert {id(p) for p in fired} == {id(p) for p in layer.parameters()}
    assert len(fired) == len(list(layer.parameters()))
    assert (y.dtype, x.grad.dtype) == (case.dtype, case.dtype)
    assert_close(y, truth.y, bound, "output")
    assert_close(x.grad, truth.dx, bound, "dX")
    compare_weights(case, layer, truth)
    db = per_group(layer, tuple(p.grad for p in layer.biases)) if case.bias else []
    for i, (got, true) in enumerate(zip(db, truth.db, strict=True)):
        assert got.dtype == case.dtype
        assert_close(got, true, bound, f"dB{i}")


def compare_weights(case: Case, layer: GroupedLinear, truth: Truth) -> None:
    """Where the gradient belongs by its mode, and nowhere else."""
    kept = case.stale if case.main_grad == "accumulate" else 0.0
    for param in layer.weights:
        assert param.grad.shape == param.shape
        assert param.grad.dtype == case.dtype
        assert getattr(param, "grad_added_to_main_grad", False) is (case.main_grad != "off")
        if case.main_grad == "off":
            assert torch.equal(param.main_grad, torch.full_like(param.main_grad, case.stale))
    where = [p.grad if case.main_grad == "off" else p.main_grad for p in layer.weights]
    for i, (got, true) in enumerate(zip(per_group(layer, tuple(where)), truth.dw, strict=True)):
        assert_close(got, true + (kept if case.main_grad != "off" else 0), BOUNDS[case.dtype], f"dW{i}")
