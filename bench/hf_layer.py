"""One MoE layer of transformers, forward + backward: trimtab against transformers' own, as ratios.

    local   experts_implementation="trimtab" against "grouped_mm", one rank, all threads
    ep      trimtab's dispatch and experts against "all_to_all" with "grouped_mm", 2 Gloo ranks, one thread each

Every contestant lives in processes of its own, so that none inherits another's heap; they take turns, and the
median of the turns counts. `python bench/hf_layer.py --help` lists the ways to run a part of the grid.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

SHAPES = {"A": (512, 256, 64, 8), "B": (1024, 512, 32, 4), "C": (1024, 2816, 8, 2)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EP_RANKS = 2


def build(contestant: str, shape: str, tokens: int, dtype: torch.dtype, ranks: int) -> Any:
    """A function that runs one forward + backward of the layer, on this rank's data."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import Qwen3MoeConfig
    from transformers.distributed.expert_parallel import AllToAllEP, EPImplementationInterface
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    import trimtab.hf

    trimtab.hf.register()
    width, hidden, num_experts, top_k = SHAPES[shape]
    config = Qwen3MoeConfig(hidden_size=width, moe_intermediate_size=hidden, num_experts=num_experts // ranks)
    config._experts_implementation = "trimtab" if contestant == "trimtab" else "grouped_mm"
    experts = Qwen3MoeExperts(config)
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.02)
    experts.to(dtype)
    rank = int(os.environ.get("RANK", "0"))
    g = torch.Generator().manual_seed(rank)
    layer: Any = experts
    if ranks > 1:
        meshes = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("ep", "tp"))
        experts._is_expert_parallel = True
        interface = EPImplementationInterface()
        cls = interface["trimtab"] if contestant == "trimtab" else AllToAllEP
        layer = cls(experts, meshes["ep"], meshes["tp"])
    x = torch.randn(tokens, width, generator=g).to(dtype).requires_grad_()
    ids = torch.rand(tokens, num_experts, generator=g).argsort(1)[:, :top_k].contiguous()
    weights = torch.rand(tokens, top_k, generator=g).to(dtype).requires_grad_()
    dy = torch.randn(tokens, width, generator=g).to(dtype)

    def step() -> None:
        layer(x, ids, weights).backward(dy)
        x.grad = weights.grad = None
        experts.zero_grad(set_to_none=True)

    return step


def work(
    contestant: str,
    shape: str,
    tokens: int,
    dtype: str,
    rank: int,
    ranks: int,
    threads: int,
    store: str,
    pipe: Connection,
) -> None:
    """A contestant's process: answers each request for n steps with the seconds that they took."""
    torch.set_num_threads(threads)
    if ranks > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    step = build(contestant, shape, tokens, DTYPES[dtype], ranks)
    for _ in range(2):
        step()
    pipe.send("ready")
    while steps := pipe.recv():
        if ranks > 1:
            torch.distributed.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        pipe.send((time.perf_counter() - start) / steps)


def race(
    contestants: list[str], shape: str, tokens: int, dtype: str, ranks: int, turns: int, budget: float
) -> dict[str, float]:
    """Median seconds of a step per contestant, taking turns; the slowest rank counts."""
    context = multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // ranks)
    pipes: dict[str, list[Connection]] = {}
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for name in contestants:
            pipes[name] = []
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                store = os.path.join(folder, name)
                args = (name, shape, tokens, dtype, rank, ranks, threads, store, theirs)
                processes.append(context.Process(target=work, args=args, daemon=True))
                processes[-1].start()
                pipes[name].append(ours)
            for pipe in pipes[name]:
                pipe.recv()

        def turn(name: str, steps: int) -> float:
            for pipe in pipes[name]:
                pipe.send(steps)
            return max(pipe.recv() for pipe in pipes[name])

        first = {name: turn(name, 1) for name in contestants}
        steps = max(1, int(budget / turns / sum(first.values())))
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(turns):
            for name in contestants:
                seconds[name].append(turn(name, steps))
        for name in contestants:
            for pipe in pipes[name]:
                pipe.send(0)
        for process in processes:
            process.join()
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", nargs="+", choices=("local", "ep"), default=["local", "ep"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 2048, 8192], help="tokens per rank")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="time per line of the table, at least 5 turns")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {platform.processor() or platform.machine()}")
    print("| where | D, F, E, K | dtype | tokens | trimtab ms | transformers ms | ratio |")
    print("|---|---|---|---|---|---|---|")
    for where in args.where:
        peer = "grouped_mm" if where == "local" else "all_to_all"
        for shape in args.shapes:
            for dtype in args.dtypes:
                for tokens in args.tokens:
                    ranks = 1 if where == "local" else EP_RANKS
                    t = race(["trimtab", peer], shape, tokens, dtype, ranks, args.turns, args.seconds)
                    row = f"| {where} | {', '.join(map(str, SHAPES[shape]))} | {dtype} | {tokens} "
                    row += f"| {t['trimtab'] * 1e3:.0f} | {t[peer] * 1e3:.0f} | {t[peer] / t['trimtab']:.2f} |"
                    print(row, flush=True)


if __name__ == "__main__":
    main()
