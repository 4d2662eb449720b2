"""What the guard costs: one MoE layer, forward and backward, on 2 ranks with the guard on and off, interleaved.

    python bench/guard.py                     all shapes, fp32 and bf16
    python bench/guard.py --pairs 5           fewer repetitions

Each pair runs the layer once with the guard and once without, in turns which is first, in the same processes with the
same weights and tokens; a time is that of the slower rank. `on / off` is the median of the pairs' ratios. The last row
is a layer of next to no work, many times: its `on - off` is what the guard adds to any layer, in ms.

Legend: T tokens of a rank, K experts per token, D model dim, E experts, F expert hidden dim.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from trimtab.dispatch.all_to_all import AllToAll
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.experts.module import ExpertMLP
from trimtab.verify.ranks import run_ranks

SHAPES = ((512, 256, 64, 8), (1024, 512, 32, 4))
DTYPES = (torch.float32, torch.bfloat16)


def measure(tokens: int, pairs: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> list[tuple[float, float]]:
    """Milliseconds (on, off) of each pair. Collective."""
    dim, hidden, num_experts, top_k = shape
    group = dist.group.WORLD
    torch.manual_seed(dist.get_rank())
    dispatchers = [Dispatcher(num_experts, AllToAll(group, guard=on), layer="bench") for on in (True, False)]
    experts = ExpertMLP(dispatchers[0].experts_per_rank, dim, hidden, dtype=dtype)
    x_TD = torch.randn(tokens, dim, dtype=dtype, requires_grad=True)
    ids_TK = torch.rand(tokens, num_experts).argsort(1)[:, :top_k]
    w_TK = torch.rand(tokens, top_k, requires_grad=True)
    dy_TD = torch.randn(tokens, dim, dtype=dtype)

    def once(dispatcher: Dispatcher) -> float:
        dist.barrier()
        start = time.perf_counter()
        rows = dispatcher.dispatch(x_TD, ids_TK, w_TK)
        y_TD = dispatcher.combine(experts(rows.x_MD, rows.ids_MK, rows.weights_MK, num_slots=rows.num_slots), rows)
        y_TD.backward(dy_TD)
        mine = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        for tensor in (x_TD, w_TK, *experts.parameters()):
            tensor.grad = None
        return float(mine) * 1e3

    for dispatcher in dispatchers * 2:
        once(dispatcher)
    found = []
    for pair in range(pairs):
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        times = {which: once(dispatchers[which]) for which in order}
        found.append((times[0], times[1]))
    return found


def spread(values: list[float]) -> str:
    """Median and the middle half."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:9.3f} ({low:.3f} .. {high:.3f})"


def main() -> None:
    """Print one row per shape and dtype."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=2048, help="of each rank")
    args = parser.parse_args()
    print(f"{args.tokens} tokens a rank, 2 ranks, {args.pairs} pairs; median (middle half), ms")
    print(f"{'D, F, E, K':>20} {'dtype':>9} {'on':>30} {'off':>30} {'on / off':>26} {'on - off':>28}")
    cases = [(args.tokens, args.pairs, shape, dtype) for shape in SHAPES for dtype in DTYPES]
    for case in [*cases, (16, 10 * args.pairs, (16, 16, 4, 2), torch.float32)]:
        pairs = run_ranks(measure, 2, *case, deadline=600.0)[0]
        on, off = ([pair[which] for pair in pairs] for which in (0, 1))
        ratio, extra = [a / b for a, b in pairs], [a - b for a, b in pairs]
        name = str(case[3]).removeprefix("torch.")
        print(f"{case[2]!s:>20} {name:>9} {spread(on):>30} {spread(off):>30} {spread(ratio):>26} {spread(extra):>28}")


if __name__ == "__main__":
    main()
