"""Grouped products of quantised operands against float64: within each recipe's bound, and not far below it."""

from __future__ import annotations

import pytest
import torch

from helpers.comparing import relative_error
from helpers.recipe_bounds import product_bound
from helpers.recipe_cases import NAMES, RECIPES, normal, offsets

R_UNITS = (2, 0, 1)


def products(name: str) -> dict[str, float]:
    """Relative errors of the three products of a grouped layer, for standard normal operands."""
    torch.manual_seed(0)
    recipe = RECIPES[name]
    cuts = offsets(recipe, *R_UNITS)
    rows, width_in, width_out = int(cuts[-1]), 256, 192
    x, dy, w = (
        normal(rows, width_in), normal(rows, width_out, seed=1), normal(len(R_UNITS), width_in, width_out, seed=2),
    )  # fmt: skip
    state = recipe.state()
    x_row, w_in = state.activation(x, cuts, along="row"), state.weight(w, along="in")
    dy_row, w_out = state.gradient(dy, cuts, along="row"), state.weight(w, along="out")
    x_column, dy_column = state.activation(x, cuts, along="column"), state.gradient(dy, cuts, along="column")
    ours: dict[str, list[torch.Tensor]] = {"forward": [], "dgrad": [], "wgrad": []}
    true: dict[str, list[torch.Tensor]] = {"forward": [], "dgrad": [], "wgrad": []}
    for i, (a, b) in enumerate(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)):
        ours["forward"].append(x_row[a:b] @ w_in[i])
        true["forward"].append(x[a:b].double() @ w[i].double())
        ours["dgrad"].append(dy_row[a:b] @ w_out[i].t())
        true["dgrad"].append(dy[a:b].double() @ w[i].double().t())
        ours["wgrad"].append(x_column[a:b].t() @ dy_column[a:b])
        true["wgrad"].append(x[a:b].double().t() @ dy[a:b].double())
    return {product: relative_error(torch.cat(ours[product]), torch.cat(true[product])) for product in ours}


@pytest.mark.parametrize("name", NAMES)
def test_products_are_within_the_bound(name: str) -> None:
    forward, backward = (product_bound(RECIPES[name], role) for role in ("activation", "gradient"))
    errors = products(name)
    for product, limit in (("forward", forward), ("dgrad", backward), ("wgrad", backward)):
        assert limit / 3 < errors[product] <= limit, f"{product}: {errors[product]:.4f}, bound {limit:.4f}"


def test_stochastic_gradients_are_right_on_average() -> None:
    state = RECIPES["nvfp4"].state()
    x, cuts = normal(64, 32), torch.tensor([0, 64])
    mean = torch.stack([state.gradient(x, cuts, along="row") for _ in range(400)]).mean(0)
    nearest = RECIPES["nvfp4_nearest"].state().gradient(x, cuts, along="row")
    bulk = x.abs() < 0.8 * x.abs().max()  # what saturates is biased in any rounding
    assert (mean - x)[bulk].square().mean() < (nearest - x)[bulk].square().mean() / 20


def test_noise_is_the_state_s_own_and_is_saved_with_it() -> None:
    recipe, x, cuts = RECIPES["nvfp4"], normal(64, 32), torch.tensor([0, 64])

    def draw(state: torch.nn.Module, times: int) -> list[torch.Tensor]:
        return [state.gradient(x, cuts, along="column") for _ in range(times)]

    one, two = recipe.state(), recipe.state()
    first = draw(one, 3)
    torch.manual_seed(99)  # no part in it
    assert all(torch.equal(a, b) for a, b in zip(first, draw(two, 3), strict=True))
    assert not torch.equal(first[0], first[1])
    three = recipe.state()
    three.load_state_dict(one.state_dict())
    assert torch.equal(draw(one, 1)[0], draw(three, 1)[0])
    keys = [RECIPES["nvfp4_line"].state().noise.key.item() for _ in range(2)]
    assert keys[0] != keys[1]  # without a seed, layers differ


def test_noise_is_uniform_and_its_calls_are_independent() -> None:
    noise = RECIPES["nvfp4"].state().noise
    a, b = noise(torch.empty(300, 100)), noise(torch.empty(300, 100))
    assert a.min() >= 0
    assert a.max() < 1
    counts = torch.histc(a, 64, 0, 1)
    assert ((counts - 30_000 / 64) ** 2 / (30_000 / 64)).sum() < 63 + 5 * (2 * 63) ** 0.5
    for u, v in ((a, b), (a[1:], a[:-1]), (a[:, 1:], a[:, :-1])):
        assert abs(torch.corrcoef(torch.stack((u.flatten(), v.flatten())))[0, 1]) < 5 / 30_000**0.5
