"""State dicts of either form load into either form; whatever does not add up is refused, not guessed."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from trimtab.errors import InputError
from trimtab.experts.linear import GroupedLinear

G, A, B = 12, 8, 16  # more than ten groups: "weight10" is not "weight1" and a 0


def linear(single: bool, seed: int = 0, bias: bool = True) -> GroupedLinear:
    torch.manual_seed(seed)
    return GroupedLinear(G, A, B, bias=bias, single_parameter=single)


def stacked(layer: GroupedLinear) -> list[torch.Tensor]:
    parts = (layer.weights, layer.biases)
    return [p[0] if layer.single_parameter else torch.stack(p) for p in parts]


@pytest.mark.parametrize("source", [True, False])
@pytest.mark.parametrize("target", [True, False])
@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_either_form_loads_into_either(source: bool, target: bool, assign: bool, nested: bool) -> None:
    ours, theirs = linear(source), linear(target, seed=1)
    module, into = (nn.Sequential(ours), nn.Sequential(theirs)) if nested else (ours, theirs)
    state = module.state_dict()
    names = list(state)
    into.load_state_dict(state, assign=assign)
    assert list(state) == names  # the caller's dict is not touched
    for a, b in zip(stacked(ours), stacked(theirs), strict=True):
        assert torch.equal(a, b)
    theirs(torch.randn(5, A), [5] + [0] * (G - 1)).sum().backward()
    assert all(p.grad is not None for p in theirs.parameters())


def test_separate_names() -> None:
    names = [f"weight{i}" for i in range(G)] + [f"bias{i}" for i in range(G)]
    assert list(linear(False).state_dict()) == names
    assert list(linear(True).state_dict()) == ["weight", "bias"]


def without(state: OrderedDict, name: str) -> dict:
    return {key: value for key, value in state.items() if key != name}


@pytest.mark.parametrize("strict", [True, False])
def test_counts_are_checked_in_both_directions_even_without_strict(strict: bool) -> None:
    state = linear(False).state_dict()
    for target in (True, False):
        with pytest.raises(InputError, match=r"11 of weight\*, expected weight0 \.\. weight11: missing \[3\]"):
            linear(target).load_state_dict(without(state, "weight3"), strict=strict)
        with pytest.raises(InputError, match=r"13 of bias\*.*unexpected \[12\]"):
            linear(target).load_state_dict(state | {"bias12": torch.zeros(B)}, strict=strict)
        with pytest.raises(InputError, match=r"has both weight and weight0"):
            linear(target).load_state_dict(state | {"weight": torch.zeros(G, B, A)}, strict=strict)
        with pytest.raises(InputError, match=r"has weight \(11, 16, 8\), expected 12 groups"):
            linear(target).load_state_dict({"weight": torch.zeros(G - 1, B, A)}, strict=strict)


def test_missing_and_transposed_entries_are_reported_as_ever() -> None:
    with pytest.raises(RuntimeError, match=r"Missing key.*bias"):
        linear(True).load_state_dict(linear(False, bias=False).state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        linear(True).load_state_dict(linear(False).state_dict() | {f"weight{i}": torch.zeros(A, B) for i in range(G)})
