"""Record, replay and loads of `router="trimtab"` in Megatron's layer, as of any other router."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import trimtab
from helpers.megatron_case import EXPERTS, TOP_K, Case, input_of, layer_of, run_layer, top_k, weights
from helpers.megatron_cpu import megatron_ranks
from trimtab.integrations.transformers.routers.observe import observing
from trimtab.routing.observers import Loads

PLAIN = Case(tokens=[(6, 2)], use={"router": "trimtab"}, padding=[0.5])
AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def observed(case: Case) -> dict[str, Any]:
    """What a step's decisions are, then told others; in the order (sequence, position)."""
    layer = layer_of(case).train()
    loads = Loads()
    with observing(layer, loads), trimtab.record(layer) as recording:
        run_layer(case, layer)
    found = {"ids": recording.decisions().ids, "loads": loads.take()["router"], "calls": len(recording.calls["router"])}
    ids = found["ids"]
    others = torch.where(ids < 0, ids, (ids + 3) % EXPERTS)
    told = trimtab.Decisions(ids=others, num_experts=EXPERTS, layers=("router",))
    with trimtab.replay(layer, told), trimtab.record(layer) as again:
        run_layer(case, layer)
    return found | {"others": others, "told": again.decisions().ids, "layers": again.decisions().layers}


@pytest.mark.parametrize("recompute", [False, True])
def test_megatrons_router_is_observed_as_any_other(recompute: bool) -> None:
    case = replace(PLAIN, options=AGAIN if recompute else {})
    (found,) = megatron_ranks(observed, 1, case)
    given = input_of(case, 0, 0)
    x = given.x_SBH.double().transpose(0, 1)
    ids, _ = top_k((x @ weights(case)["router"].T).flatten(0, 1))
    wanted = ids.view(*x.shape[:2], TOP_K).masked_fill(given.padding_BS[:, :, None], -1)
    assert torch.equal(found["ids"][:, :, 0].sort(-1).values, wanted.sort(-1).values)
    assert torch.equal(found["loads"][:EXPERTS], wanted[wanted >= 0].bincount(minlength=EXPERTS))
    assert found["calls"] == 1
    assert torch.equal(found["told"], found["others"])
    assert found["layers"] == ("router",)
