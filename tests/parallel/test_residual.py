"""What a layer returns is no view to autograd: a residual may be added to it in place, also under FSDP2."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from helpers.comparing import full_value, relative_error
from helpers.layer_case import D, build
from helpers.ranks import run_ranks
from trimtab.experts.linear import GroupedLinear
from trimtab.experts.recipes import FP8Current
from trimtab.parallel.expert_parallel import ExpertParallel, parallelize
from trimtab.parallel.fsdp import fully_shard_moe


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.moe = nn.Linear(D, D), build(shared_hidden=6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y: Tensor = self.moe(h).y
        y += h
        return y.square().sum()


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_value(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def on_rank() -> dict[str, float]:
    """Each rank has the same tokens, so that the mean of its gradients is the gradient of one."""
    x = torch.randn(2, 6, D, generator=torch.Generator().manual_seed(1))
    alone = Block()
    sharded, spread = copy.deepcopy(alone), copy.deepcopy(alone)
    alone(x).backward()
    truth = whole(alone)
    assert len(truth) == len(list(alone.parameters()))
    fully_shard(sharded.moe)
    fully_shard(sharded)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("edp", "ep"))
    parallelize(spread, mesh["ep"], {"moe": ExpertParallel()})
    fully_shard_moe(spread, init_device_mesh("cpu", (2,)), mesh["edp"], blocks=["moe"])
    errors = {}
    for kind, model in (("fsdp", sharded), ("ep", spread)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # torch says so where a result that it hooks is a view
            model(x).backward()
        found = whole(model)
        assert found.keys() == truth.keys()
        errors |= {f"{kind} {name}": relative_error(found[name], truth[name]) for name in truth}
    return errors


def test_a_residual_is_added_in_place_under_fsdp2() -> None:
    for errors in run_ranks(on_rank, 2, deadline=60.0):
        assert {name: error for name, error in errors.items() if not error <= 2e-6} == {}


EMULATED = FP8Current(backend="emulated")
WAYS = [{"kernels": "torch"}, {"kernels": "grouped_mm"}, {"dtype": torch.float64}, {"recipe": EMULATED}]
"""Through experts that are not one call of C++."""


@pytest.mark.parametrize(
    "options", [{}, {"latent_dim": 8}, {"shared_hidden": 6}, {"combine": "ordered"}, *WAYS], ids=str
)
@pytest.mark.parametrize("shape", [(5,), (2, 3), (0,)], ids=str)
def test_a_result_is_no_view(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, D, dtype=options.get("dtype", torch.float32))
    y = build(**options)(x).y
    assert not y._is_view()
    assert y.shape == (*shape, D)
    y += x
    y.sum().backward()


def test_a_grouped_linear_s_result_is_no_view() -> None:
    layer = GroupedLinear(3, 16, 16, recipe=EMULATED)
    x = torch.randn(5, 16)
    y = layer(x, torch.tensor([2, 0, 3]))
    y += x
    y.sum().backward()


LATENT = {"latent_dim": 8}


@pytest.mark.parametrize(
    ("options", "hooked"),
    [({}, "experts"), (LATENT, "experts"), (LATENT, "from_latent"), ({"combine": "ordered"}, "experts")],
    ids=str,
)
def test_who_has_saved_what_it_was_made_of_is_told_of_a_change(options: dict[str, object], hooked: str) -> None:
    """A hook's loss on a part's result: right if the residual is added elsewhere, refused by torch if in place."""
    found = []
    for in_place in (False, True):
        moe, penalties, refused = build(**options), list[Tensor](), ""
        getattr(moe, hooked).register_forward_hook(lambda _, given, out, to=penalties: to.append(out.square().sum()))
        h = torch.randn(2, 3, D, generator=torch.Generator().manual_seed(2)).requires_grad_()
        y = moe(h).y
        y = y.add_(h) if in_place else y + h
        try:
            (y.sum() + penalties[0]).backward()
        except RuntimeError as error:
            refused = str(error)
        if in_place and refused:
            assert "modified by an inplace operation" in refused
        else:
            assert refused == ""
            found.append(h.grad)
    assert all(torch.equal(found[0], other) for other in found)
