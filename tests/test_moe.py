"""The MoE layer against the float64 oracle: output and every gradient, the router's through the weights included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.layer_case import BOUNDS, SHAPES, D, E, K, build, check
from helpers.router_truth import truth_group_top, truth_scores, truth_top
from trimtab.experts.activations import ACTIVATIONS
from trimtab.routing.scores import SCORES


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("combine", ["sum", "ordered"])
def test_any_shape(dtype: torch.dtype, combine: str, poisoned: None) -> None:
    moe = build(dtype, combine=combine, router={"normalize": True, "scale": 1.5})
    for shape in SHAPES:
        check(moe, dtype, shape)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_any_activation_with_shared_experts(dtype: torch.dtype, activation: str, poisoned: None) -> None:
    for more in ({"bias": True, "shared_hidden": 10}, {"shared_hidden": 10, "shared_gate": True, "latent_dim": 8}):
        check(build(dtype, activation=activation, **more), dtype, (3, 8))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("score", SCORES)
def test_any_score(dtype: torch.dtype, score: str, poisoned: None) -> None:
    for more in (
        {"normalize": True, "scale": 2.5, "bias": True, "groups": 3, "top_groups": 2}, {"top_k": 1},
        {"top_k": E, "normalize": True}, {"aux_loss": 0.3, "sequence_aux_loss": 0.2, "z_loss": 0.1},
    ):  # fmt: skip
        check(build(dtype, router={"score": score} | more), dtype, (3, 7))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_any_selection_and_dropped_slots(dtype: torch.dtype, poisoned: None) -> None:
    dropping = {"capacity_factor": 0.6}
    for more in (
        {"select": "sinkhorn", "score": "sigmoid"}, {"select": "expert_choice"},
        {"select": "expert_choice", "capacity_factor": 0.3}, {"select": "balanced"}, dropping,
        dropping | {"drop": "position", "score": "sigmoid"}, {"capacity_factor": 2.0},
    ):  # fmt: skip
        moe = build(dtype, router=more, shared_hidden=8)
        out = check(moe, dtype, (3, 7))
        if more.get("capacity_factor") == 0.6:
            assert 0 < int(out.loads_E.sum()) < 21 * K
        check(moe, dtype, (0,))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_masked_tokens_are_not_read_and_give_nothing(dtype: torch.dtype, poisoned: None) -> None:
    more: dict[str, Any] = {"bias": True, "shared_hidden": 8, "shared_gate": True, "latent_dim": 8}
    losses = {"aux_loss": 0.3, "sequence_aux_loss": 0.2, "z_loss": 0.1}
    for router in (losses, {"select": "expert_choice"}, {"capacity_factor": 1.0}):
        moe = build(dtype, router=router, **more)
        for mask in (torch.rand(3, 7, generator=torch.Generator().manual_seed(2)) < 0.5, torch.zeros(3, 7).bool()):
            out = check(moe, dtype, (3, 7), mask)
            assert (out.y[~mask] == 0).all()


@pytest.mark.parametrize("combine", ["sum", "ordered"])
def test_the_gradient_of_a_masked_token_is_not_read(combine: str, poisoned: None) -> None:
    more = {"shared_hidden": 8, "shared_gate": True, "latent_dim": 8, "bias": True}
    moe, g = build(combine=combine, **more), torch.Generator().manual_seed(3)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    found = []
    for junk in (0.0, float("nan"), float("inf")):
        x = torch.randn(2, 3, D, generator=g.manual_seed(3)).requires_grad_()
        dy = torch.randn(2, 3, D, generator=g).masked_fill(~mask[..., None], junk)
        y = moe(x, token_mask=mask).y
        found.append(torch.autograd.grad(y, [x, *moe.parameters()], dy))
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert torch.equal(one, other)
    assert (found[0][0][~mask] == 0).all()


@pytest.mark.parametrize("groups", [1, 3])
def test_the_layer_picks_what_the_scores_say(groups: int) -> None:
    router = {"score": "sigmoid", "bias": True, "groups": groups, "top_groups": min(groups, 2)}
    moe = build(torch.float64, router=router)
    x = torch.randn(40, D, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    bias = moe.router.expert_bias
    assert bias is not None
    scores = truth_scores(x @ moe.router.weight.detach().T, "sigmoid") + bias
    pick = (lambda row: truth_top(row, K)) if groups == 1 else (lambda row: truth_group_top(row, moe.config.router))
    assert moe(x).ids_TK.tolist() == [pick(row) for row in scores.tolist()]
