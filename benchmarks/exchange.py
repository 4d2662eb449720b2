"""`trimtab bench exchange`: dispatch and combine of each transport against the raw collective and transformers' own.

The experts in between do nothing, so that only the exchange is timed: rows come home as they went out.

Legend: T tokens, K experts per token, M' rows received, D model dim, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contestant import Contestant
from benchmarks.layer_case import LayerCase, LayerData
from benchmarks.layer_truth import BOUNDS, compare, probe
from benchmarks.subject import BOTH, FORWARD, Subject, Where
from benchmarks.task import Task
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.transports import TRANSPORTS
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
    transports: Sequence[str] = ("alltoall",),
    peers: Sequence[str] = (),
) -> Task:
    """One thread per rank. peers: "all_to_all", transformers' own; imported only where it is named."""
    dim, hidden, num_experts, top_k = shape
    if wrong := [peer for peer in peers if peer != "all_to_all"]:
        raise ConfigError(f"peer {wrong[0]!r} has no exchange to race: there is all_to_all")
    if ranks < 2:
        raise ConfigError("an exchange needs at least 2 ranks")
    experts_per_rank(num_experts, ranks)
    case = LayerCase(
        dim=dim, hidden=hidden, num_experts=num_experts, top_k=top_k, tokens=tokens, dtype=dtype, workload=workload,
        ranks=ranks,
    )  # fmt: skip

    def made(name: str, role: Any, build: str, **args: Any) -> Contestant:
        return Contestant(name=name, role=role, build=build, args=case.as_args(**args), group=workload, ranks=ranks)

    ours = [made(f"trimtab {name}", "ours", f"{__name__}:build_ours", transport=name) for name in transports]
    theirs = [made(peer, "peer", f"{__name__}:build_transformers") for peer in peers]
    return Task(
        part="exchange",
        case={"shape": list(shape), "dtype": dtype, "tokens": tokens, "ranks": ranks, "workload": workload},
        contestants=[
            *ours,
            *theirs,
            made("raw all-to-all + copy", "limit", "benchmarks.limits:build_exchange"),
        ],
        modes=[FORWARD, BOTH],
        make_judge=lambda: _judge,
    )


def build_ours(args: dict[str, Any], where: Where) -> Subject:
    """args: the case and `transport`. The rows come back as they are: each token times its ranks."""
    case = LayerCase.of(args)
    assert dist.group.WORLD is not None
    dispatcher = Dispatcher(case.num_experts, TRANSPORTS[args["transport"]](dist.group.WORLD), layer="bench")

    def layer(x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        rows = dispatcher.dispatch(x, ids, w)
        return dispatcher.combine(rows.x_MD, rows)

    return _subject(layer, LayerData.of(case, where.rank), transport=args["transport"])


def build_transformers(args: dict[str, Any], where: Where) -> Subject:
    """args: the case. `AllToAllEP` around experts that give their rows back: each token times its weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import AllToAllEP

    case = LayerCase.of(args)
    meshes = init_device_mesh("cpu", (where.ranks, 1), mesh_dim_names=("ep", "tp"))

    class Rows(torch.nn.Module):
        num_experts = case.num_experts // where.ranks

        def forward(self, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return rows

    return _subject(AllToAllEP(Rows(), meshes["ep"], meshes["tp"]), LayerData.of(case, where.rank))


def _subject(layer: Callable[[Tensor, Tensor, Tensor], Tensor], data: LayerData, **facts: Any) -> Subject:
    def forward() -> None:
        with torch.no_grad():
            layer(data.x_TD, data.ids_TK, data.w_TK)

    def both() -> Tensor:
        data.x_TD.grad = data.w_TK.grad = None
        y = layer(data.x_TD, data.ids_TK, data.w_TK)
        y.backward(data.dy_TD)  # type: ignore[no-untyped-call]
        return y

    def outcome() -> dict[str, Tensor]:
        y, random_DV = both(), probe(data.x_TD.shape[1])
        assert data.x_TD.grad is not None
        return {"y": y.detach().float() @ random_DV, "input gradient": data.x_TD.grad.float() @ random_DV}

    return Subject(modes={FORWARD: forward, BOTH: both}, outcome=outcome, judged=BOTH, facts=facts)


def _judge(contestant: Contestant, outcomes: list[dict[str, Tensor]]) -> str | None:
    """Each token comes back as often as it went out, or as its weights say."""
    case = LayerCase.of(contestant.args)
    true = []
    for rank in range(case.ranks):
        d = LayerData.of(case, rank)
        owner_TK = d.ids_TK // experts_per_rank(case.num_experts, case.ranks)
        ranks_T1 = torch.stack([(owner_TK == r).any(1) for r in range(case.ranks)]).sum(0)[:, None]
        times_T1 = d.w_TK.detach().float().sum(1, keepdim=True) if contestant.role == "peer" else ranks_T1
        random_DV = probe(case.dim)
        true.append(
            {
                "y": (d.x_TD.detach().float() * times_T1) @ random_DV,
                "input gradient": (d.dy_TD.float() * times_T1) @ random_DV,
            }
        )
    return compare(outcomes, true, BOUNDS[case.dtype])
