"""Delayed scaling: what the first step does, how the history moves, what saturates, what is saved and loaded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.recipe_cases import normal
from trimtab.errors import ConfigError, InputError
from trimtab.experts.recipes import FP8Current, FP8Delayed
from trimtab.experts.recipes.fp8_delayed import LARGEST_MARGIN, REMEMBERED, FP8DelayedCall, FP8DelayedState
from trimtab.experts.recipes.numbers import E4M3, E5M2, float_scale

CUTS = torch.tensor([0, 16, 16, 48])


def fresh(length: int = 3, margin: int = 0, latest: bool = False) -> FP8DelayedState:
    algorithm = "latest" if latest else "max"
    return FP8Delayed(backend="emulated", history=length, margin=margin, algorithm=algorithm).state()


def bases(state: FP8DelayedState, activation: tuple[float, ...], weight: tuple[float, ...], again: bool) -> list[list]:
    """Magnitudes that the scales of a call stand for."""
    call = state.call()
    assert isinstance(call, FP8DelayedCall)
    call.recomputed = again
    given = (("activation", activation), ("weight", weight))
    return [call.basis(torch.tensor(amax), role).tolist() for role, amax in given]


def step(state: FP8DelayedState, *amax: float) -> list[float]:
    return bases(state, amax, amax, False)[0]


def again(state: FP8DelayedState, *amax: float) -> list[float]:
    return bases(state, amax, amax, True)[0]


def test_a_scale_comes_from_the_steps_before() -> None:
    h = fresh()
    assert step(h, 8.0, 1.0) == [8, 1]  # nothing is known: from the data
    assert step(h, 2.0, 4.0) == [8, 1]
    assert step(h, 1.0, 1.0) == [8, 4]
    assert step(h, 1.0, 1.0) == [8, 4]
    assert h.activation_amax.history_He.tolist() == [[1, 1], [1, 1], [2, 4]]
    assert step(h, 1.0, 1.0) == [2, 4]  # 8 is forgotten


def test_latest_looks_one_step_back() -> None:
    h = fresh(latest=True)
    assert [step(h, x) for x in (8.0, 2.0, 1.0, 4.0)] == [[8], [8], [2], [1]]


def test_the_products_of_a_call_have_one_scale_whatever_other_calls_come_between() -> None:
    state = FP8Delayed(backend="emulated", history=2, algorithm="latest").state()
    x = normal(48, 24)
    state.activation(x, CUTS, along="row")
    first, second = state.call(), state.call()
    row = first.encode(8 * x, CUTS, "activation", "row")
    other = second.encode(2 * x, CUTS, "activation", "row")
    column = first.encode(8 * x, CUTS, "activation", "column")
    assert torch.equal(row.scale, column.scale)
    torch.testing.assert_close(other.scale[[0, 2]], 8 * row.scale[[0, 2]])
    moved = state.activation_amax.history_He.clone()
    second.encode(2 * x, CUTS, "activation", "column")
    assert torch.equal(state.activation_amax.history_He, moved)


def test_later_steps_leave_room_for_every_product_of_a_step() -> None:
    state = FP8Delayed(backend="emulated", history=2).state()
    x, call = normal(48, 24), state.call()
    call.activation(x, CUTS, along="row")
    before = state.activation_amax.history_He[0].clone()
    call.activation(3 * x, CUTS, along="column")
    torch.testing.assert_close(state.activation_amax.history_He[0], 3 * before)


def test_an_expert_without_history_takes_its_scale_from_the_data() -> None:
    h = fresh(length=2)
    step(h, 4.0, 0.0)
    assert step(h, 2.0, 16.0) == [4, 16]
    assert step(h, 0.0, 0.0) == [4, 16]
    assert step(h, 0.0, 0.0) == [2, 16]
    assert step(h, 64.0, 0.0) == [64, 0]  # all forgotten: from the data
    assert float_scale(torch.tensor([64.0, 0.0]), E4M3).encode.tolist() == [7, 1]


def test_eval_uses_the_history_and_leaves_it() -> None:
    h = fresh()
    step(h, 8.0)
    h.eval()
    assert step(h, 2.0) == step(h, 1.0) == [8]
    assert h.activation_amax.history_He[:, 0].tolist() == [8, 0, 0]
    h.train()
    assert step(h, 1.0) == [8]


def test_a_recomputed_forward_finds_its_scale_by_its_magnitudes_and_moves_nothing() -> None:
    h = fresh(length=8, latest=True)
    found = [step(h, *amax) for amax in ((8.0, 1.0), (2.0, 1.0), (2.0, 4.0), (2.0, 1.0), (5.0, 5.0))]
    assert found == [[8, 1], [8, 1], [2, 1], [2, 4], [2, 1]]
    before = h.activation_amax.history_He.clone()
    assert again(h, 5.0, 5.0) == [2, 1]
    assert again(h, 2.0, 4.0) == [2, 1]
    assert again(h, 8.0, 1.0) == [8, 1]
    assert again(h, 2.0, 1.0) == [2, 4]  # the latest of two such steps
    assert again(h, 7.0, 7.0) == [5, 5]  # no such step: as in eval mode
    assert torch.equal(h.activation_amax.history_He, before)


def test_a_recompute_finds_as_many_calls_however_long_the_history_is() -> None:
    h = fresh(1, latest=True)
    scales = [step(h, float(i)) for i in range(REMEMBERED + 1)]
    assert [again(h, float(i)) for i in range(1, REMEMBERED + 1)] == scales[1:]
    assert again(h, 0.0) == [REMEMBERED] != scales[0]  # forgotten: as in eval mode
    assert all(key.endswith("history_He") for key in h.state_dict())


def test_a_recompute_asks_for_calls_of_its_mode_first() -> None:
    h = fresh(latest=True)
    assert [step(h, x) for x in (4.0, 2.0, 8.0)] == [[4], [4], [2]]
    h.eval()
    assert again(h, 2.0) == [4]  # a forward in training, run again in eval mode
    assert step(h, 2.0) == step(h, 3.0) == [8]
    assert again(h, 2.0) == [8]
    h.train()
    assert step(h, 16.0) == [8]
    assert (again(h, 2.0), again(h, 3.0)) == ([4], [8])
    h.eval()
    assert (again(h, 2.0), again(h, 5.0)) == ([8], [16])
    for _ in range(REMEMBERED + 1):  # an evaluation makes no call in training forgotten
        step(h, 1.0)
    assert again(h, 4.0) == [4]


def test_a_call_without_tokens_is_found_too() -> None:
    h = fresh()
    for amax in (8.0, 2.0):
        bases(h, (0.0,), (amax,), False)
    h.eval()
    assert bases(h, (0.0,), (2.0,), True) == [[0], [8]]


def test_inference_before_training() -> None:
    h = fresh()
    with torch.inference_mode():
        step(h.eval(), 4.0)
        assert not h.calls[False]  # nothing of that runs again
    assert step(h, 2.0) == step(h.train(), 2.0) == [2]
    assert step(h, 1.0) == [2]


def test_margin_is_headroom_and_what_is_beyond_it_saturates() -> None:
    x = torch.full((16, 4), 3.0)
    for margin, growth, wanted in ((0, 1.0, 3), (0, 2.0, 3), (1, 2.0, 6), (1, 4.0, 6), (3, 4.0, 12)):
        state = FP8Delayed(backend="emulated", margin=margin, hybrid=False).state()
        cuts = torch.tensor([0, 16])
        state.gradient(x, cuts, along="row")
        torch.testing.assert_close(state.gradient(x * growth, cuts, along="row"), torch.full_like(x, wanted))
        torch.testing.assert_close(state.gradient(x * growth, cuts, along="row"), x * growth)  # it has been seen


@pytest.mark.parametrize("hybrid", [False, True])
def test_no_margin_makes_nan_or_inf_of_large_values(hybrid: bool) -> None:
    x = torch.zeros(16, 4)
    x[0, :2] = torch.tensor([3e38, 2.0])
    state = FP8Delayed(backend="emulated", margin=LARGEST_MARGIN, hybrid=hybrid).state()
    for low in (state.activation(x, torch.tensor([0, 16]), along="row"), state.weight(x[None], along="in")[0]):
        assert low.sum() == low[0, 0] == pytest.approx(3e38, rel=1 / 16)
    low = state.gradient(x, torch.tensor([0, 16]), along="row")
    assert low.sum() == low[0, 0] == pytest.approx(3e38, rel=1 / 8)


def test_with_steady_data_it_is_current_scaling() -> None:
    delayed, current = FP8Delayed(backend="emulated").state(), FP8Current(backend="emulated").state()
    x, w = normal(48, 24), normal(3, 24, 8)
    for _ in range(3):
        for along in ("row", "column"):
            assert torch.equal(delayed.activation(x, CUTS, along=along), current.activation(x, CUTS, along=along))
            assert torch.equal(delayed.gradient(x, CUTS, along=along), current.gradient(x, CUTS, along=along))
        for along in ("in", "out"):
            assert torch.equal(delayed.weight(w, along=along), current.weight(w, along=along))


def test_operands_have_histories_of_their_own_and_nothing_odd_enters_them() -> None:
    state = FP8Delayed(backend="emulated", history=2).state()
    x = torch.ones(50, 24)
    x[48:] = torch.nan  # padding
    x[0, 0], x[1, 0] = torch.nan, torch.inf
    state.activation(x, CUTS, along="row")
    state.gradient(2 * x, CUTS, along="row")
    state.weight(4 * torch.ones(3, 24, 8), along="in")
    assert state.activation_amax.history_He.tolist() == [[1, 0, 1], [0, 0, 0]]
    assert state.gradient_amax.history_He.tolist() == [[2, 0, 2], [0, 0, 0]]
    assert state.weight_amax.history_He.tolist() == [[4, 4, 4], [0, 0, 0]]
    assert (state.recipe.form("activation"), state.recipe.form("gradient")) == (E4M3, E5M2)


def run(state: torch.nn.Module, steps: range) -> list[Tensor]:
    out = []
    for i in steps:
        x = normal(48, 24, seed=i) * 2.0 ** (i % 3)
        for along in ("row", "column"):
            out += [state.activation(x, CUTS, along=along), state.gradient(x, CUTS, along=along)]
        out.append(state.weight(normal(3, 24, 8, seed=i), along="in"))
    return out


@pytest.mark.parametrize("reserved", [False, True])
def test_a_saved_state_goes_on_with_the_same_bits(reserved: bool) -> None:
    recipe = FP8Delayed(backend="emulated", history=4)
    state = recipe.state()
    run(state, range(3))
    saved = {name: tensor.clone() for name, tensor in state.state_dict().items()}
    wanted = run(state, range(3, 7))
    other = recipe.state()
    if reserved:
        other.reserve(3)
    assert not other.load_state_dict(saved).missing_keys
    assert all(torch.equal(a, b) for a, b in zip(run(other, range(3, 7)), wanted, strict=True))
    other.load_state_dict(recipe.state().state_dict())  # saved before a first step
    assert all(torch.equal(a, b) for a, b in zip(run(other, range(3)), run(recipe.state(), range(3)), strict=True))


def test_a_module_cast_to_a_narrow_dtype_keeps_its_history() -> None:
    state = FP8Delayed(backend="emulated", history=2).state()
    run(state, range(2))
    kept = state.activation_amax.history_He.clone()
    state.bfloat16()
    assert state.activation_amax.history_He.dtype == torch.float32
    assert torch.equal(state.activation_amax.history_He, kept)


def test_another_number_of_experts_is_refused() -> None:
    state = FP8Delayed(backend="emulated").state()
    state.weight(normal(3, 8, 8), along="in")
    with pytest.raises(InputError, match="3 experts cannot scale 4"):
        state.weight(normal(4, 8, 8), along="in")
    other = FP8Delayed(backend="emulated").state()
    other.reserve(4)
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.weight_amax.load_state_dict(state.weight_amax.state_dict())


@pytest.mark.parametrize(
    "wrong", [{"history": 0}, {"history": 1.5}, {"margin": -1}, {"margin": 12}, {"margin": 1.5}, {"algorithm": "mean"}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="need history >= 1"):
        FP8Delayed(backend="emulated", **wrong)  # type: ignore[arg-type]
