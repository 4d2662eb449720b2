"""What a layer cannot beat by much, as contestants that take their turns: dense GEMMs, copies, raw exchanges.

Legend: N rows, T tokens, K experts per token, M rows sent, M' rows received, D model dim, F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.layer_case import DTYPES, LayerCase
from benchmarks.subject import BOTH, FORWARD, Subject, Where
from benchmarks.workloads import lane_rows
from trimtab.layout import experts_per_rank


def build_dense(args: dict[str, Any], where: Where) -> Subject:
    """GEMMs of a layer's FLOPs on one dense weight, all rows at once, into memory that is there.

    args: the case, and `dtype`, in which they are done. With ranks: the rows of this rank's experts, and the raw
    exchange of the case's rows. Modes: forward (2 GEMMs), forward+backward (4 more).
    """
    case, dtype = LayerCase.of(args), DTYPES[args["dtype"]]
    slots, e = 0, experts_per_rank(case.num_experts, case.ranks)
    for rank in range(case.ranks):
        slots += int((case.ids(rank) // e == where.rank).sum())
    widths = ((2 * case.hidden, case.dim), (case.dim, case.hidden))
    gemms = [gemm(slots, wide, deep, dtype) for wide, deep in widths]
    forward = [step for product, _, _ in gemms for step in [product]]
    backward = [step for _, d_input, d_weight in gemms for step in (d_input, d_weight)]
    if where.ranks > 1:
        exchange = RawExchange(case, where)
        forward.append(exchange.forward)
        backward.append(exchange.backward)
    modes = {FORWARD: in_turn(forward), BOTH: in_turn(forward + backward)}
    return Subject(modes=modes)


def gemm(rows: int, wide: int, deep: int, dtype: torch.dtype) -> tuple[Callable[[], object], ...]:
    """x [N, deep] @ w^T [deep, wide], and its gradients of x and of w: three products of the same FLOPs."""
    x, w, y = (torch.randn(shape).to(dtype) for shape in ((rows, deep), (wide, deep), (rows, wide)))
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    return (lambda: torch.mm(x, w.t(), out=y), lambda: torch.mm(y, w, out=dx), lambda: torch.mm(y.t(), x, out=dw))


def in_turn(steps: list[Callable[[], object]]) -> Callable[[], None]:
    """One step of all."""

    def run() -> None:
        for step in steps:
            step()

    return run


def build_copy(args: dict[str, Any], where: Where) -> Subject:
    """A copy between two buffers of `bytes` each, larger than caches: facts["bytes"] are read and written."""
    source, target = (torch.ones(args["bytes"], dtype=torch.uint8) for _ in range(2))
    facts = {"bytes": 2 * args["bytes"]}
    return Subject(modes={"copy": lambda: target.copy_(source)}, facts=facts)


def build_read(args: dict[str, Any], where: Where) -> Subject:
    """A sum of `bytes`, larger than caches: facts["bytes"] are read. In float64, which sums fastest."""
    source = torch.ones(args["bytes"] // 8, dtype=torch.float64)
    return Subject(modes={"copy": source.sum}, facts={"bytes": args["bytes"]})


def build_exchange(args: dict[str, Any], where: Where) -> Subject:
    """args: the case. Modes: forward, forward+backward, see `RawExchange`."""
    raw = RawExchange(LayerCase.of(args), where)
    return Subject(modes={FORWARD: raw.forward, BOTH: in_turn([raw.forward, raw.backward])})


class RawExchange:
    """`all_to_all_single` of the bytes that one call moves, and one copy of the rows each for forward and backward.

    Dispatch moves a row per (token, rank): D values, and K ids and weights of 4 bytes; combine moves D values. Their
    backwards move D values, and D values with K gradients of weights.
    """

    def __init__(self, case: LayerCase, where: Where) -> None:
        everyone = [lane_rows(case.ids(rank), case.num_experts, case.ranks) for rank in range(case.ranks)]
        self.out, self.back = everyone[where.rank], [row[where.rank] for row in everyone]
        values = case.dim * DTYPES[case.products].itemsize
        self.wide = {"dispatch": values + 8 * case.top_k, "combine": values, "weights": values + 4 * case.top_k}
        self.buffers: dict[tuple[int, int], Tensor] = {}

    def forward(self) -> None:
        """Copy, dispatch, combine."""
        self._copy()
        self._move(self.wide["dispatch"], self.out, self.back)
        self._move(self.wide["combine"], self.back, self.out)

    def backward(self) -> None:
        """Copy, the transpose of combine, the transpose of dispatch."""
        self._copy()
        self._move(self.wide["combine"], self.out, self.back)
        self._move(self.wide["weights"], self.back, self.out)

    def _copy(self) -> None:
        rows, width = sum(self.out), self.wide["combine"]
        self._buffer(rows, width, 0).copy_(self._buffer(rows, width, 1))

    def _move(self, width: int, sent: list[int], received: list[int]) -> None:
        source, target = self._buffer(sum(sent), width, 0), self._buffer(sum(received), width, 1)
        dist.all_to_all_single(target, source, received, sent)

    def _buffer(self, rows: int, width: int, which: int) -> Tensor:
        """[rows, width] of memory that is there."""
        size = rows * width
        held = self.buffers.get((which, size))
        if held is None:
            held = self.buffers[which, size] = torch.ones(size, dtype=torch.uint8)
        return held.view(rows, width)
