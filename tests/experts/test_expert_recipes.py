"""ExpertMLP with every recipe: exactly the products of what the recipe makes of the operands, delayed or not."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from torch import Tensor

from experts.test_linear_recipes import RECIPES, shapes_only
from helpers.comparing import assert_close, relative_error
from helpers.linear_cases import KERNELS
from helpers.lowered_truth import truth
from trimtab.errors import BackendError, InputError
from trimtab.experts.activations import ACTIVATIONS
from trimtab.experts.module import ExpertMLP
from trimtab.experts.recipes import MXFP8
from trimtab.experts.weight_grad import MODES

M, D, F, E, K = 13, 16, 24, 6, 3
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def case(
    name: str | None, dtype: torch.dtype = torch.float32, *, routing: str = "random", scale: float = 1.0,
    stale: float = 3.0, **options: object,
) -> tuple[ExpertMLP, dict[str, Tensor], dict[str, object]]:  # fmt: skip
    """A module with stale main_grads, its inputs, and its recipe states as they were before the call."""
    torch.manual_seed(0)
    recipe = None if name is None else RECIPES[name]
    mlp = ExpertMLP(E, D, F, dtype=dtype, recipe=recipe, **options)
    for param in (mlp.get_parameter(name) for name in mlp.parameter_names[:2]):
        param.main_grad = torch.full_like(param, stale, dtype=torch.float32)
    g = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(M, D, generator=g, dtype=torch.float64).mul(scale).to(dtype) for _ in range(2))
    ids = torch.randint(0, E - 1, (M, K), generator=g)  # the last expert is empty
    ids = torch.where(torch.rand(M, K, generator=g) < 0.1, -1, ids)
    ids = torch.full_like(ids, -1) if routing == "none" else ids
    w = torch.rand(M, K, generator=g)
    inputs = {"x": x.requires_grad_(), "ids": ids, "w": w.requires_grad_(), "dy": dy}
    return mlp, inputs, copy.deepcopy({"up": mlp.up_state, "down": mlp.down_state})


def run(mlp: ExpertMLP, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Output and every gradient, from wherever its mode put it."""
    y = mlp(inputs["x"], inputs["ids"], inputs["w"])
    y.backward(inputs["dy"])
    mlp.backward_dw()
    found = {"output": y.detach(), "x": inputs["x"].grad, "w": inputs["w"].grad}
    for name, param in mlp.named_parameters():
        assert param.grad.shape == param.shape
        assert param.grad.dtype == param.dtype
        fused = mlp.main_grad != "off" and name in mlp.parameter_names[:2]
        found[name] = param.main_grad if fused else param.grad
    return found


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kernels", KERNELS)
def test_values_of_every_variant(name: str, kernels: str) -> None:
    flags = (False, True)
    for i, (activation, bias, routing) in enumerate(product(ACTIVATIONS, flags, ("random", "none"))):
        dtype, mode, delayed = (torch.float32, torch.bfloat16)[i % 3 == 2], MODES[(i // 2) % 3], i % 4 < 2
        mlp, inputs, before = case(
            name, dtype, routing=routing, activation=activation, bias=bias, main_grad=mode,
            delay_wgrad=delayed, kernels=KERNELS[kernels],
        )  # fmt: skip
        wanted = truth(mlp, before, inputs["x"], inputs["ids"], inputs["w"], inputs["dy"])
        for key, value in run(mlp, inputs).items():
            stale = 3.0 if mode == "accumulate" and key in mlp.parameter_names[:2] else 0.0
            where = f"{activation}, bias {bias}, {routing}, {mode}, delayed {delayed}: {key}"
            assert_close(value, wanted[key] + stale, BOUNDS[dtype], where)


@pytest.mark.parametrize("name", [None, *RECIPES])
@pytest.mark.parametrize("kernels", KERNELS)
def test_delayed_gradients_are_the_same_bits(name: str | None, kernels: str) -> None:
    for mode, bias in product(MODES, (False, True)):
        found = []
        for delayed in (False, True):
            mlp, inputs, _ = case(name, main_grad=mode, bias=bias, delay_wgrad=delayed, kernels=KERNELS[kernels])
            fired: list[Tensor] = []
            for param in mlp.parameters():
                param.register_post_accumulate_grad_hook(fired.append)
            found.append(run(mlp, inputs))
            assert {id(p) for p in fired} == {id(p) for p in mlp.parameters()}
            assert len(fired) == len(list(mlp.parameters()))
        assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("name", [None, "fp8_current"])
def test_delayed_gradients_wait_for_their_turn_and_come_once(name: str | None) -> None:
    mlp, inputs, _ = case(name, delay_wgrad=True, main_grad="accumulate", bias=True, stale=0.0)
    outputs = [mlp(inputs["x"], inputs["ids"], inputs["w"]) for _ in range(2)]
    for i, y in enumerate(outputs):
        y.backward(inputs["dy"] * (i + 1))
    assert all(p.grad is None for p in mlp.parameters())
    assert not mlp.gate_up.main_grad.any()
    mlp.backward_dw()
    first = mlp.gate_up.main_grad.clone()
    mlp.backward_dw()
    torch.testing.assert_close(mlp.gate_up.main_grad, 3 * first, rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="without a backward before it"):
        mlp.backward_dw()


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("name", [None, *(n for n in RECIPES if n != "nvfp4")])  # its noise counts its calls
def test_frozen_parts_get_nothing_and_the_others_keep_theirs(name: str | None, delayed: bool) -> None:
    mlp, inputs, _ = case(name, bias=True, delay_wgrad=delayed)
    wanted = run(mlp, inputs)
    for frozen in ("gate_up", "down", "gate_up_bias", "down_bias", "x", "w"):
        mlp, inputs, _ = case(name, bias=True, delay_wgrad=delayed)
        leaves = {"x": inputs["x"], "w": inputs["w"], **dict(mlp.named_parameters())}
        leaves[frozen].requires_grad_(False)
        mlp(inputs["x"], inputs["ids"], inputs["w"]).backward(inputs["dy"])
        mlp.backward_dw()
        for key, leaf in leaves.items():
            assert leaf.grad is None if key == frozen else torch.equal(leaf.grad, wanted[key]), f"{frozen}: {key}"


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_near_what_it_would_be_without_a_recipe(name: str) -> None:
    bound = 0.6 if name == "nvfp4" else 0.2
    results = []
    for recipe in (name, None):
        mlp, inputs, _ = case(recipe, bias=True)
        results.append(run(mlp, inputs))
    for key, value in results[0].items():
        assert relative_error(value, results[1][key]) < bound, key


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", [None, *RECIPES])
@pytest.mark.parametrize("kernels", KERNELS)
def test_no_rows_at_all(name: str | None, kernels: str) -> None:
    """Output [0, D], every gradient zeros of its shape and dtype, main_grad right over stale values."""
    for mode, delayed in product(MODES, (False, True)):
        mlp, _, _ = case(
            name, torch.bfloat16, bias=True, delay_wgrad=delayed, main_grad=mode, stale=7.0, kernels=KERNELS[kernels]
        )
        mlp.gate_up.zero_out_wgrad = mlp.down.zero_out_wgrad = True
        x = torch.empty(0, D, dtype=torch.bfloat16, requires_grad=True)
        y = mlp(x, torch.empty(0, K, dtype=torch.int64), torch.empty(0, K))
        y.sum().backward()
        mlp.backward_dw()
        assert (y.shape, y.dtype, x.grad.shape) == ((0, D), torch.bfloat16, (0, D))
        for param in mlp.parameters():
            assert param.grad.dtype == torch.bfloat16
            assert torch.equal(param.grad, torch.zeros_like(param))
        left = {"off": 7.0, "accumulate": 7.0, "overwrite": 0.0}[mode]
        assert all(
            torch.equal(p.main_grad, torch.full_like(p.main_grad, left))
            for p in (mlp.get_parameter(name) for name in mlp.parameter_names[:2])
        )


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_is_read_on_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", shapes_only)
    mlp = ExpertMLP(E, D, F, dtype=torch.bfloat16, device="meta", recipe=RECIPES[name], bias=True)
    x = torch.empty(M, D, device="meta", dtype=torch.bfloat16, requires_grad=True)
    mlp(x, torch.empty(M, K, device="meta", dtype=torch.int64), torch.empty(M, K, device="meta")).sum().backward()
    assert x.grad.shape == x.shape
    assert all((p.grad.shape, p.grad.dtype) == (p.shape, torch.bfloat16) for p in mlp.parameters())


@pytest.mark.parametrize("name", ["fp8_delayed", "nvfp4"])
def test_states_are_saved_with_the_module(name: str) -> None:
    mlp, inputs, _ = case(name)
    run(mlp, inputs)
    other, _, _ = case(name)
    other.load_state_dict(mlp.state_dict())
    args = inputs["x"].detach() * 2, inputs["ids"], inputs["w"]
    assert torch.equal(mlp(*args), other(*args))


@pytest.mark.parametrize("name", ["fp8_delayed", "mxfp8"])
def test_only_rows_weights_and_pre_activations_are_saved(name: str) -> None:
    saved: list[Tensor] = []
    mlp, inputs, _ = case(name)
    keep = lambda t: saved.append(t) or t  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        mlp(inputs["x"], inputs["ids"], inputs["w"])
    leaves = {t.data_ptr() for t in (inputs["x"], inputs["w"], *mlp.parameters())}
    own = [t for t in saved if t.data_ptr() not in leaves and t.is_floating_point()]  # and the plan
    alignment = RECIPES[name].alignment
    counts = torch.bincount(inputs["ids"][inputs["ids"] >= 0], minlength=E)
    rows = int(sum(-(-int(n) // alignment) * alignment for n in counts))
    assert [t.shape for t in own] == [(rows, 2 * F)]


def test_it_says_what_it_is_and_refuses_at_construction() -> None:
    mlp, _, _ = case("mxfp8", delay_wgrad=True)
    assert repr(mlp).startswith(
        "ExpertMLP(\n  6 x (16 -> 24 -> 16), swiglu, bias=False, delay_wgrad=True, recipe=mxfp8 (emulated)"
    )
    assert mlp.recipe_way == "emulated"
    with pytest.raises(BackendError, match=r"mxfp8.*needs.*Here are torch"):
        ExpertMLP(E, D, F, recipe=MXFP8(backend="hardware"))
