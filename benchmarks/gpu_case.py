"""One shape on one device: the layer by ours and by transformers, its GEMMs beside a dense one, and its row moves.

Legend: T tokens, K experts per token, E experts, D model dim, F expert hidden dim, R = T * K expert rows.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_race import Replay, Run, T
from trimtab.dispatch.plan import plan_experts
from trimtab.errors import InputError
from trimtab.experts.module import ExpertMLP
from trimtab.kernels.grouped import Block, get_kernels
from trimtab.kernels.rows import combine_rows
from trimtab.kernels.selftest import KernelChoice

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class GpuCase:
    """Sizes, and the device they are measured on."""

    dim: int
    hidden: int
    experts: int
    top_k: int
    tokens: int
    device: torch.device
    dtype: torch.dtype = torch.bfloat16

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k

    @property
    def forward_flops(self) -> float:
        return 6.0 * self.rows * self.dim * self.hidden

    @property
    def first_flops(self) -> float:
        """Of the layer's first GEMM."""
        return 4.0 * self.rows * self.dim * self.hidden

    def drawn(self, *shape: int, seed: int) -> Tensor:
        """Normal values on the device."""
        g = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(*shape, generator=g, device=self.device, dtype=self.dtype)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(x [T, D], ids [T, K], weights [T, K], dy [T, D]); routing uniform at random."""
        scores = self.drawn(self.tokens, self.experts, seed=3).float()
        w, ids = scores.softmax(-1).topk(self.top_k)
        return self.drawn(self.tokens, self.dim, seed=1), ids, w / w.sum(-1, keepdim=True), self.drawn(
            self.tokens, self.dim, seed=2
        )  # fmt: skip


def our_layer(case: GpuCase, kernels: str, first: ExpertMLP | None = None) -> ExpertMLP:
    """trimtab's experts on one set of kernels, with the parameters of `first` if there is one: they fill the device."""
    torch.manual_seed(0)
    device = case.device if first is None else torch.device("meta")
    made = ExpertMLP(
        case.experts, case.dim, case.hidden, dtype=case.dtype, device=device, kernels=KernelChoice(kernels)
    )
    if first is not None:
        made.gate_up, made.down = first.gate_up, first.down
    return made


def their_layer(case: GpuCase, ours: ExpertMLP) -> Any:
    """transformers' `grouped_mm` experts with the same parameters; imported here alone."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=case.dim, moe_intermediate_size=case.hidden, num_experts=case.experts)
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts: Any = Qwen3MoeExperts(config)
    gate_up = nn.Parameter(ours.gate_up.detach().flatten(1, 2))
    experts.gate_up_proj, experts.down_proj = gate_up, ours.down
    return experts


def steps(layer: Any, case: GpuCase) -> tuple[Callable[[], Tensor], Callable[[], list[Tensor]]]:
    """(forward without a graph, forward and backward) of a layer, on inputs that stay where they are."""
    x, ids, w, dy = case.inputs()
    leaves = [x.requires_grad_(), w.requires_grad_(), *layer.parameters()]

    def forward() -> Tensor:
        with torch.no_grad():
            y: Tensor = layer(x, ids, w)
        return y

    def both() -> list[Tensor]:
        y = layer(x, ids, w)
        # No graph outlives its step: its leaves' nodes would stay on this step's stream, and a capture fails on that.
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    return forward, both


def agree(ours: list[Tensor], theirs: list[Tensor], who: str) -> None:
    """Raises InputError if two contestants do not compute the same: what is wrong is not worth timing."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        largest = float(b.detach().float().abs().max())
        error = float((a.detach().float() - b.detach().float().view_as(a)).abs().max())
        if not error <= 5e-2 * largest:
            raise InputError(f"{who}: result {i} differs by {error:.3g} where the largest value is {largest:.3g}")


def answers(device: torch.device) -> bool:
    """Whether the device computes. After some errors, as an illegal access, it never does again in this process."""
    try:
        return float(torch.ones(2, device=device).sum()) == 2.0
    except torch.OutOfMemoryError:
        return True
    except Exception:
        return False


def captured(run: Callable[[], T], device: torch.device) -> Replay[T]:
    """`run` as the replay of a CUDA graph. Its pool is what the device reserves for it during the capture.

    A capture that fails raises, and leaves the current stream as it was.
    """
    stream = torch.cuda.current_stream(device)
    aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    aside.wait_stream(stream)
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    stream.wait_stream(aside)
    gc.collect()
    torch.cuda.empty_cache()  # so that nothing but the pool changes what is reserved
    before, graph = torch.cuda.memory_reserved(device), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kept = run()
    finally:
        torch.cuda.set_stream(stream)  # torch leaves the capture's stream current where its end raises
    return Replay(graph=graph, kept=kept, pool=torch.cuda.memory_reserved(device) - before)


def later(make: Callable[[], Run]) -> Run:
    """A run that is made when it first runs: kernels that are not there are no other contestant's failure."""
    made = cache(make)
    return lambda: made()()


def gemms(case: GpuCase, names: tuple[str, ...]) -> dict[str, Run]:
    """The first GEMM of the layer, [R, D] by [D, 2F] per expert: each set of kernels, and one dense product."""
    ids = case.inputs()[1]
    plan = plan_experts(ids, case.experts)
    x, w = case.drawn(case.rows, case.dim, seed=4), case.drawn(case.experts, 2 * case.hidden, case.dim, seed=5)
    block = Block(slice(0, case.experts), slice(0, case.rows), plan.offsets_e)
    made: dict[str, Run] = {"dense": lambda: torch.mm(x, w[0].t())}

    def grouped(name: str) -> Run:
        return partial(get_kernels(name, case.device).grouped_mm, x, w.transpose(1, 2), block)

    return made | {name: later(partial(grouped, name)) for name in names}


def moves(case: GpuCase, names: tuple[str, ...]) -> dict[str, tuple[Run, int]]:
    """(run, bytes read and written) of the gather and the combine of R rows, and of a copy of as many bytes."""
    ids = case.inputs()[1]
    plan = plan_experts(ids, case.experts)
    x, rows = case.drawn(case.tokens, case.dim, seed=6), case.drawn(case.rows, case.dim, seed=7)
    target = torch.empty_like(rows)
    made: dict[str, tuple[Run, int]] = {"copy": (lambda: target.copy_(rows), 2 * rows.nbytes)}

    def gathered(name: str) -> Run:
        return partial(get_kernels(name, case.device).gather, x, plan.row_R)

    def combined() -> Run:
        from trimtab.kernels.triton.moves import combine

        return partial(combine, rows, plan.row_csr)

    # A token's row is read from memory once and from a cache after that: count it once.
    moved = x.nbytes + rows.nbytes
    made |= {f"gather {name}": (later(partial(gathered, name)), moved) for name in names}
    made["combine torch"] = (lambda: combine_rows(rows, plan.row_csr), moved)
    if "triton" in names:
        made["combine triton"] = (later(combined), moved)
    return made
