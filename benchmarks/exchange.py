"""`python -m benchmarks exchange`: dispatch and combine of each transport against the raw collective and transformers'.

The experts in between do nothing, so that only the exchange is timed: rows come home as they went out.

Legend: T tokens, K experts per token, D model dim, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contestant import Contestant, Role
from benchmarks.layer_builds import registered, spread
from benchmarks.layer_case import LayerCase, LayerData
from benchmarks.layer_truth import BOUNDS, compare, probe
from benchmarks.subject import BOTH, FORWARD, Subject, Where
from benchmarks.task import Task
from trimtab.errors import ConfigError
from trimtab.layout import experts_per_rank

DIRECT = ("alltoall", "shared_memory")
"""The transports that send a row only where it is needed, each by its own name."""


def exchange_task(
    shape: tuple[int, int, int, int],
    *,
    tokens: int,
    dtype: str,
    ranks: int,
    workload: str = "balanced",
    transports: Sequence[str] = DIRECT,
    peers: Sequence[str] = (),
) -> Task:
    """One thread per rank. peers: "all_to_all", transformers' own. Raises ConfigError for what does not fit."""
    if wrong := [peer for peer in peers if peer != "all_to_all"]:
        raise ConfigError(f"peer {wrong[0]!r} has no exchange to race: there is all_to_all")
    if ranks < 2:
        raise ConfigError("an exchange needs at least 2 ranks")
    experts_per_rank(shape[2], ranks)
    case = LayerCase.shaped(shape, tokens=tokens, dtype=dtype, workload=workload, ranks=ranks)

    def made(name: str, role: Role, build: str, **args: Any) -> Contestant:
        return Contestant(name=name, role=role, build=build, args=case.as_args(**args), group=workload, ranks=ranks)

    return Task(
        part="exchange",
        case={"shape": list(shape), "dtype": dtype, "tokens": tokens, "ranks": ranks, "workload": workload},
        contestants=[
            *(made(f"trimtab {name}", "ours", f"{__name__}:build", transport=name) for name in transports),
            *(made(peer, "peer", f"{__name__}:build", transport="") for peer in peers),
            made("raw all-to-all + copy", "limit", "benchmarks.limits:build_exchange"),
        ],
        modes=[FORWARD, BOTH],
        make_judge=lambda: judge,
    )


class RowsBack(nn.Module):
    """In place of experts: received rows as they are."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.config, self.has_post_expert_norm = SimpleNamespace(_experts_implementation="none"), False

    def forward(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return rows


def build(args: dict[str, Any], where: Where) -> Subject:
    """args: the case and `transport`, "" for transformers' own exchange."""
    case = LayerCase.of(args)
    name = registered(args["transport"]) if args["transport"] else "all_to_all"
    layer = spread(RowsBack(experts_per_rank(case.num_experts, where.ranks)), name, where)
    data = LayerData.of(case, where.rank)

    def forward() -> None:
        with torch.no_grad():
            layer(data.x_TD, data.ids_TK, data.w_TK)

    def both() -> None:
        step()

    def step() -> Tensor:
        data.x_TD.grad = data.w_TK.grad = None
        y = layer(data.x_TD, data.ids_TK, data.w_TK)
        y.backward(data.dy_TD)  # type: ignore[no-untyped-call]
        return y

    def outcome() -> dict[str, Tensor]:
        y = step()
        assert data.x_TD.grad is not None
        random_DV = probe(y)
        return {"y": y.detach().float() @ random_DV, "input gradient": data.x_TD.grad.float() @ random_DV}

    return Subject(modes={FORWARD: forward, BOTH: both}, outcome=outcome, judged=BOTH)


def judge(contestant: Contestant, outcomes: list[dict[str, Tensor]]) -> str | None:
    """Ours brings a token back as often as it went out; transformers' weighs each of its K rows."""
    case = LayerCase.of(contestant.args)
    true = []
    for rank in range(case.ranks):
        d = LayerData.of(case, rank)
        owner_TK = d.ids_TK // experts_per_rank(case.num_experts, case.ranks)
        ranks_T1 = torch.stack([(owner_TK == r).any(1) for r in range(case.ranks)]).sum(0)[:, None]
        times_T1 = d.w_TK.detach().float().sum(1, keepdim=True) if contestant.role == "peer" else ranks_T1
        x, dy = d.x_TD.detach().float(), d.dy_TD.float()
        true.append({"y": (x * times_T1) @ probe(x), "input gradient": (dy * times_T1) @ probe(dy)})
    return compare(outcomes, true, BOUNDS[case.dtype])
