"""Layers with a recipe beyond the grid of pairs: what is saved and kept, nothing read on the host, recipes of one's
own, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.comparing import relative_error
from helpers.pair_truth import LOW, linear_truth
from helpers.recipe_cases import RECIPES
from helpers.stand_ins import PAIRS
from trimtab.errors import BackendError
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.module import ExpertMLP
from trimtab.experts.recipes import MXFP8, FP8Rowwise, RecipeState
from trimtab.experts.recipes.base import Way
from trimtab.experts.recipes.hardware import Packed

G, A, B, M, K = 4, 128, 256, 13, 2


def both(recipe: Any, **options: Any) -> tuple[GroupedLinear, ExpertMLP]:
    torch.manual_seed(0)
    return GroupedLinear(G, A, B, recipe=recipe, **options), ExpertMLP(G, A, A, recipe=recipe, bias=True, **options)


def shapes_only(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """grouped_mm for the meta device in float32, which torch describes for bfloat16 only."""
    shape = (a.shape[0], b.shape[-1]) if b.ndim == 3 else (offs.shape[0], a.shape[0], b.shape[1])
    return a.new_empty(shape)


def torch_checks(self: Any, x: Packed, w: Packed, offsets_e: Tensor) -> Tensor:
    """torch's own checks of shapes, strides and scales; the public function has none for the meta device."""
    offs = offsets_e[1:].int()
    return torch._scaled_grouped_mm(x[0], w[0].mT, x[1], w[1], offs=offs, out_dtype=torch.bfloat16)


class OnMeta:
    """A recipe whose kernels know shapes only. Whatever reads a size on the host raises on the meta device."""

    def __init__(self, name: str) -> None:
        stand_in, emulated = PAIRS[name]
        self.name, self.alignment, self.state = emulated.name, emulated.alignment, emulated.state
        kind = type(stand_in(backend="hardware").engine())
        made = type("Meta", (kind,), {"product": torch_checks})
        self.engine = lambda: made(torch.bfloat16)

    def check(self, device: torch.device, in_features: int, out_features: int) -> Way:
        return "hardware"


@pytest.mark.parametrize("rows", [0, 11])
@pytest.mark.parametrize("name", LOW)
def test_nothing_is_read_on_the_host(name: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", shapes_only)
    recipe = OnMeta(name.removeprefix("hardware ")) if name.startswith("hardware") else RECIPES[name]
    for delayed in (False, True):
        linear, mlp = both(recipe, dtype=torch.bfloat16, device="meta", delay_wgrad=delayed)
        x = torch.empty(rows, A, device="meta", dtype=torch.bfloat16, requires_grad=True)
        linear(x, torch.empty(G, device="meta", dtype=torch.int32)).sum().backward()
        ids = torch.empty(rows, K, device="meta", dtype=torch.int64)
        mlp(x, ids, torch.empty(rows, K, device="meta")).sum().backward()
        assert x.grad.shape == x.shape
        for layer in (linear, mlp):
            layer.backward_dw()
            assert all((p.grad.shape, p.grad.dtype) == (p.shape, torch.bfloat16) for p in layer.parameters())


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
    true_y, dx, dw, _ = linear_truth(x, layer.weight, torch.zeros(4, B), dy, sizes)
    for got, true in ((y, 8 * true_y), (x.grad, 12 * dx), (layer.weight.grad, 6 * dw)):
        assert relative_error(got, true) < 1e-5


@pytest.mark.parametrize("name", ["fp8_delayed", "nvfp4"])
def test_states_are_saved_with_the_layers(name: str) -> None:
    (linear, mlp), others = both(RECIPES[name]), both(RECIPES[name])
    x, ids, w = torch.randn(8, A), torch.randint(0, G, (8, K)), torch.rand(8, K)
    for scale in (1.0, 8.0):
        linear(scale * x, [1, 0, 5, 2]).sum().backward()
        mlp(scale * x, ids, w).sum().backward()
    for layer, other, args in ((linear, others[0], ([1, 0, 5, 2],)), (mlp, others[1], (ids, w))):
        other.load_state_dict(layer.state_dict())
        assert torch.equal(layer(x, *args), other(x, *args))


def saved_by(call: Any, *own: Tensor) -> list[Tensor]:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call()
    leaves = {t.data_ptr() for t in own}
    return [t for t in saved if t.data_ptr() not in leaves and (t.is_floating_point() or t.dtype.itemsize == 1)]


@pytest.mark.parametrize("name", ["fp8_delayed", "mxfp8"])
def test_an_mlp_saves_only_rows_weights_and_pre_activations(name: str) -> None:
    _, mlp = both(RECIPES[name])
    x, ids, w = torch.randn(M, A), torch.randint(-1, G - 1, (M, K)), torch.rand(M, K)
    own = saved_by(lambda: mlp(x, ids, w), x, w, *mlp.parameters())
    alignment = RECIPES[name].alignment
    rows = sum(-(-int(n) // alignment) * alignment for n in torch.bincount(ids[ids >= 0], minlength=G))
    assert [t.shape for t in own] == [(rows, 2 * A)]


@pytest.mark.parametrize("name", PAIRS)
def test_a_linear_keeps_one_byte_a_value_for_its_weight_gradient(name: str) -> None:
    layer, _ = both(PAIRS[name][0](backend="hardware"), dtype=torch.bfloat16)
    kept = saved_by(lambda: layer(torch.randn(128, A, dtype=torch.bfloat16), [128, 0, 0, 0]), *layer.parameters())
    assert [t.numel() for t in kept if t.dtype == torch.float8_e4m3fn] == [128 * A]
    assert sum(t.numel() * t.element_size() for t in kept) <= 128 * A + 4 * G * A  # and their scales


def test_layers_say_how_they_compute_and_refuse_what_cannot_run() -> None:
    stand_in, emulated = PAIRS["rowwise"]
    ways = {"hardware": stand_in(backend="hardware"), "emulated": emulated}
    for way, recipe in ways.items():
        for layer in both(recipe):
            assert layer.recipe_way == way
            assert f"recipe=fp8_rowwise ({way})" in repr(layer)
    assert [layer.recipe_way for layer in both(None)] == [None, None]
    assert both(FP8Rowwise(backend="auto"))[0].recipe_way == "emulated"  # here is no GPU
    assert repr(both(RECIPES["mxfp8"], delay_wgrad=True)[1]).startswith(
        "ExpertMLP(\n  4 x (128 -> 128 -> 128), swiglu, bias=True, delay_wgrad=True, recipe=mxfp8 (emulated)"
    )
    for make in (lambda r: GroupedLinear(4, A, B, recipe=r), lambda r: ExpertMLP(4, A, B, recipe=r)):
        with pytest.raises(BackendError, match=r"mxfp8.*needs.*Here are torch"):
            make(MXFP8(backend="hardware"))
