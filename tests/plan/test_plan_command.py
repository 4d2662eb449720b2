"""The command, its table and its files; a loop of one's own; `worst` against what real ranks of a layer hold."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from helpers.ranks import run_ranks
from trimtab import ExpertParallel, MoEConfig, RouterConfig, parallelize, plan_memory
from trimtab.cli.main import main
from trimtab.plan.ledger import Ledger
from trimtab.plan.traffic import SKEWS, draw

P, E, T, K, D, HIDDEN = 4, 16, 512, 4, 64, 128
RULES: tuple[Any, ...] = ("off", 0.1)
TINY = ("--model", "qwen3_moe", "--batch-size", "2", "--seq-len", "32", "--ranks", "2")


def test_the_command_plans_and_says_how_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan"
    assert main(["plan", *TINY, "--gb", "4", "--layouts", "1", "--skew", "zipf", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    found = json.loads((out / "plan.json").read_text())
    assert [(row["fits"], row["ep"]) for row in found["layouts"]] == [(True, 2)]
    assert [row["skew"] for row in found["skew"]] == ["even", "zipf", "worst"]
    even, _, worst = (row["peak"] for row in found["skew"])
    assert worst > even
    for row in found["layouts"]:
        assert row["peak"] == max(sum(parts.values()) for parts in row["stages"].values())
        assert row["at least seconds"] > 0
    assert (out / "plan.png").stat().st_size > 5000
    assert "9 further layouts divide and were not tried" in said
    assert "run     trimtab train --nproc 2 --batch-size 2 --model qwen3_moe --seq-len 32 --ep 2 --fsdp 2" in said


def test_nothing_fits_is_an_exit_code_and_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gb = ["--gb", "0.02", "--device", "cpu", "--ep", "2", "--layouts", "1", "--out", str(tmp_path)]
    assert main(["plan", *TINY, *gb]) == 1
    said = capsys.readouterr().out
    assert "too much: activations" in said
    assert "--gradient-checkpointing" in said
    assert "run  " not in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--gb", "0"], "must be more than 0"),
        (["--gb", "1"], "no more than what --device cuda takes"),
        (["--optim", "none"], "--optim none: there is no such optimizer"),
        (["--ep", "3"], "no layout divides them with 16 experts"),
        (["--skew", "steep"], "--skew steep: neither even, worst"),
        (["--quantize", "nf4"], "goes with --lora"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *TINY, *more, "--out", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def build(transport: str = "planned", device: str = "meta", **options: Any) -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (P,))
    with torch.device(device):
        moe = MoEConfig(dim=D, hidden=HIDDEN, router=RouterConfig(num_experts=E, top_k=K), kernels="grouped_mm").build()
    return parallelize(moe, mesh, {"": ExpertParallel(transport=transport, **options)})


def loop(moe: Any) -> None:
    optimizer = torch.optim.AdamW(moe.parameters())
    for _ in range(2):
        x_TD = torch.randn(T, D, requires_grad=True)
        moe(x_TD).y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def held_on_rank() -> dict[tuple[Any, str], int]:
    """The most bytes that two steps of a layer hold on this rank, by each rule and as tokens fall by each workload."""
    found, rank = {}, dist.get_rank()
    torch.set_num_threads(1)
    for rule, skew in product(RULES, SKEWS[2:]):
        torch.manual_seed(0)
        moe: Any = build("alltoall", "cpu", replicate_experts=rule, copy_cost=1)
        ids_TK, own = draw(skew, T, K, E, rank=rank, ranks=P), moe.dispatcher._dispatch

        def dispatch(x: Any, ids: Any, *more: Any, own: Any = own, ids_TK: Any = ids_TK, **options: Any) -> Any:
            return own(x, ids_TK.to(ids.dtype), *more, **options)

        moe.dispatcher._dispatch = dispatch
        with Ledger() as ledger:
            ledger.know(moe.parameters(), "weights")
            loop(moe)
        found[rule, skew] = ledger.peak()[0]
    return found


def test_worst_is_never_less_than_what_ranks_hold() -> None:
    told = run_ranks(held_on_rank, P)
    for rule in RULES:
        given: dict[str, Any] = {"replicate_experts": rule, "copy_cost": 1}
        options: dict[str, Any] = {"ranks": P, "device": "cpu", **given}
        bounds, plan = (plan_memory(partial(build, **given), loop, skew=skew, **options) for skew in ("worst", "even"))
        worst, even = bounds.peak, plan.peak
        held = [found[rule, skew] for found in told for skew in SKEWS[2:]]
        assert max(held) <= worst
        assert min(held) < even < worst
        assert sum(plan.parts.values()) == even
        assert plan.biggest[0][0] == max(size for size, _, _ in plan.biggest)
