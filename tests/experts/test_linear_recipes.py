"""GroupedLinear with every recipe: exactly the products of what the recipe makes of the operands, and no row lost."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from helpers.comparing import relative_error
from helpers.linear_cases import KERNELS, A, B, check, recipe_cases, true_results
from trimtab.errors import BackendError
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.recipes import MXFP8, NVFP4, FP8Blockwise, FP8Current, FP8Delayed, FP8Rowwise, Recipe, RecipeState
from trimtab.experts.weight_grad import MODES

RECIPES: dict[str, Recipe] = {
    "fp8_delayed": FP8Delayed(backend="emulated", history=4),
    "fp8_current": FP8Current(backend="emulated"),
    "fp8_rowwise": FP8Rowwise(backend="emulated"),
    "fp8_blockwise": FP8Blockwise(backend="emulated"),
    "mxfp8": MXFP8(backend="emulated"),
    "nvfp4": NVFP4(backend="emulated", seed=7),
}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("groups", [1, 3, 6, 16])
@pytest.mark.parametrize("name", RECIPES)
def test_values_of_every_case(name: str, groups: int) -> None:
    failed = []
    for dtype in DTYPES:
        for case in recipe_cases(RECIPES[name], dtype, groups):
            try:
                check(case)
            except Exception as error:
                failed.append(f"{case}: {type(error).__name__}: {error}")
    assert not failed, f"{len(failed)} cases, the first: " + "\n".join(failed[:5])


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kernels", KERNELS)
def test_no_row_is_lost_and_results_are_near_those_without_a_recipe(name: str, kernels: str) -> None:
    sizes, bound = [1, 0, 5, 2], 0.2 if name == "nvfp4" else 0.06
    torch.manual_seed(0)
    layer = GroupedLinear(4, A, B, recipe=RECIPES[name], kernels=KERNELS[kernels])
    x, dy = torch.randn(8, A, requires_grad=True), torch.randn(8, B)
    y = layer(x, sizes)
    y.backward(dy)
    truth = true_results(x, layer.weight, layer.bias, dy, sizes)
    assert relative_error(y, truth.y) < bound
    assert relative_error(x.grad, truth.dx) < 2 * bound  # gradients have one bit less in most recipes
    assert relative_error(layer.weight.grad, torch.stack(truth.dw)) < 2 * bound


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", RECIPES)
def test_no_rows_at_all(name: str) -> None:
    for mode, delayed, kernels in product(MODES, (False, True), KERNELS.values()):
        layer = GroupedLinear(
            4, A, B, recipe=RECIPES[name], dtype=torch.bfloat16, main_grad=mode, delay_wgrad=delayed, kernels=kernels
        )
        layer.weight.main_grad, layer.weight.zero_out_wgrad = torch.full((4, B, A), 7.0), True
        x = torch.empty(0, A, dtype=torch.bfloat16, requires_grad=True)
        y = layer(x, [0] * 4)
        y.sum().backward()
        layer.backward_dw()
        assert (y.shape, y.dtype, x.grad.shape) == ((0, B), torch.bfloat16, (0, A))
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in layer.parameters())
        left = {"off": 7.0, "accumulate": 7.0, "overwrite": 0.0}[mode]
        assert torch.equal(layer.weight.main_grad, torch.full((4, B, A), left))


def shapes_only(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """grouped_mm for the meta device in float32, which torch describes for bfloat16 only."""
    shape = (a.shape[0], b.shape[-1]) if b.ndim == 3 else (offs.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(shape)


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_is_read_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", shapes_only)
    layer = GroupedLinear(4, A, B, recipe=RECIPES[name], dtype=torch.bfloat16, device="meta")
    x = torch.empty(9, A, device="meta", dtype=torch.bfloat16, requires_grad=True)
    layer(x, torch.empty(4, device="meta", dtype=torch.int32)).sum().backward()
    assert x.grad.shape == x.shape
    assert {p.grad.dtype for p in layer.parameters()} == {torch.bfloat16}


class OwnState(RecipeState):
    def activation(self, x_RA: Tensor, offsets_e: Tensor, along: str) -> Tensor:
        return x_RA.float() * 2

    def gradient(self, dy_RB: Tensor, offsets_e: Tensor, along: str) -> Tensor:
        return dy_RB.float() * 3

    def weight(self, w_eAB: Tensor, along: str) -> Tensor:
        return w_eAB.float() * 4


class OwnRecipe:
    name, alignment, state = "own", 1, OwnState

    def check(self, device: torch.device, in_features: int, out_features: int) -> str:
        return "emulated"

    def engine(self) -> None:
        return None


def test_a_recipe_of_one_s_own_multiplies_what_its_state_returns() -> None:
    layer = GroupedLinear(4, A, B, bias=False, recipe=OwnRecipe())
    x, dy, sizes = torch.randn(8, A, requires_grad=True), torch.randn(8, B), [1, 0, 5, 2]
    y = layer(x, sizes)
    y.backward(dy)
    truth = true_results(x, layer.weight, None, dy, sizes)
    for got, true in ((y, 8 * truth.y), (x.grad, 12 * truth.dx), (layer.weight.grad, 6 * torch.stack(truth.dw))):
        assert relative_error(got, true) < 1e-5


def test_state_is_saved_with_the_layer() -> None:
    layer, other = (GroupedLinear(4, A, B, recipe=RECIPES["fp8_delayed"]) for _ in range(2))
    for scale in (1.0, 8.0):
        layer(scale * torch.randn(8, A), [1, 0, 5, 2]).sum().backward()
    other.load_state_dict(layer.state_dict())
    x = torch.randn(8, A)
    assert torch.equal(layer(x, [1, 0, 5, 2]), other(x, [1, 0, 5, 2]))


def test_a_recipe_that_cannot_run_is_refused_at_construction() -> None:
    with pytest.raises(BackendError, match="mxfp8"):
        GroupedLinear(4, A, B, recipe=MXFP8(backend="hardware"))
