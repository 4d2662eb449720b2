"""Ranks that share a matrix of which one has no gradient: an error on all of them by the parameter's name, no hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.optim_ranks import LAYOUTS, Run
from helpers.ranks import run_ranks
from trimtab.errors import InputError

LACKING = "layers.1.o_proj.weight"


def stepped(layout: str, who: tuple[int, ...], lacking: str) -> Any:
    """What a step says where these ranks have no gradient of a parameter; whether it moved, where it says nothing."""
    run = Run(LAYOUTS[dist.get_world_size()][layout], torch.float32)
    named = {name.removeprefix("module."): p for name, p in run.model.named_parameters()}
    before = {name: (p.to_local() if hasattr(p, "to_local") else p).detach().clone() for name, p in named.items()}

    def hook(*_: Any) -> None:
        if dist.get_rank() in who:
            named[lacking].grad = None

    run.optimizer.register_step_pre_hook(hook)
    try:
        run.step(1)
    except InputError as error:
        return str(error)
    now = named[lacking].detach()
    return not torch.equal(now.to_local() if hasattr(now, "to_local") else now, before[lacking])


@pytest.mark.parametrize(
    ("ranks", "layout", "who", "lacking"),
    [
        (2, "fsdp, dim 0", (1,), LACKING), (2, "tp 2", (0,), LACKING), (4, "tp 2 x fsdp 2", (2,), LACKING),
        (2, "etp 2", (0,), "layers.2.moe.experts.down"),
    ],
)  # fmt: skip
def test_a_rank_without_a_gradient_is_named_on_all(ranks: int, layout: str, who: tuple[int, ...], lacking: str) -> None:
    said = run_ranks(stepped, ranks, layout, who, lacking, deadline=60.0)
    assert {str(one).split(" has ")[0] for one in said} == {lacking}


def test_what_no_rank_has_a_gradient_of_stays() -> None:
    assert run_ranks(stepped, 2, "fsdp, dim 0", (0, 1), LACKING) == [False, False]
    assert run_ranks(stepped, 2, "ep 2", (0, 1), LACKING) == [False, False]
    assert run_ranks(stepped, 2, "ep 2", (1,), "layers.2.moe.experts.down") == [True, False], "nothing is cut"
