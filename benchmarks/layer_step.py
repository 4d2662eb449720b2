"""The steps of an experts layer, whoever made it: forward without a graph, forward and backward, what is judged.

Legend: T tokens of this rank, K experts per token, D model dim, F expert hidden dim, e experts of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.layer_case import LayerCase, LayerData
from benchmarks.layer_truth import digest
from benchmarks.subject import BOTH, FORWARD, Subject

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [T, D], ids [T, K], w [T, K]) -> [T, D]"""


def layer_subject(layer: Layer, case: LayerCase, rank: int, weights: Sequence[Tensor], *, graph: bool) -> Subject:
    """weights: the layer's two parameters, gate and up and down, in the memory layout [e, 2F, D] and [e, D, F].

    graph: forward and backward are captured in a CUDA graph, and each step replays it.
    """
    data = LayerData.of(case, rank)
    leaves = [data.x_TD, data.w_TK, *weights]

    def forward() -> None:
        with torch.no_grad(), case.autocast():
            layer(data.x_TD, data.ids_TK, data.w_TK)

    def run() -> Sequence[Tensor]:
        with case.autocast():
            y = layer(data.x_TD, data.ids_TK, data.w_TK)
        return (y.detach(), *torch.autograd.grad(y, leaves, data.dy_TD))

    both = captured(run) if graph else run

    def outcome() -> dict[str, Tensor]:
        y, dx, dw, d_gate_up, d_down = both()
        width, dim = 2 * case.hidden, case.dim
        return digest(y, dx, dw, d_gate_up.reshape(-1, width, dim), d_down.reshape(-1, dim, case.hidden))

    def step() -> None:
        both()

    held = sum(t.nbytes for t in leaves)
    modes = {BOTH: step} if graph else {FORWARD: forward, BOTH: step}
    return Subject(modes=modes, outcome=outcome, judged=BOTH, held=held, device=case.device)


def captured(run: Callable[[], Sequence[Tensor]]) -> Callable[[], Sequence[Tensor]]:
    """`run` as the replay of a CUDA graph, which gives the same tensors each time.

    A capture that fails raises, and leaves the current stream as it was.
    """
    stream, aside = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(stream)
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    stream.wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kept = run()
    finally:
        torch.cuda.set_stream(stream)  # torch leaves the capture's stream current where its end raises

    def replay() -> Sequence[Tensor]:
        graph.replay()
        return kept

    return replay
