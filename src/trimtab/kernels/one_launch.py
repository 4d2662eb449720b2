"""A function of many small kernels, launched on CUDA as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trimtab.kernels.tensor_checks import no_values


def on_cuda(t: Tensor) -> bool:
    """True for values on a CUDA device."""
    return t.device.type == "cuda" and not no_values(t.device)


class OneLaunch:
    """`function`, for arguments that always have the same shapes, dtypes and device. It must not read values on the
    host, and its results must have one dtype.

    On CUDA the first call records its kernels in a graph; each call fills the graph's inputs, replays it, and
    clones the results. On other devices `function` is called.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]]) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None

    def __deepcopy__(self, memo: object) -> OneLaunch:
        return self  # a copy of its layer may use it too

    def __call__(self, *given: Tensor) -> Sequence[Tensor]:
        if not on_cuda(given[0]):
            return self._function(*given)
        stream = torch.cuda.current_stream(given[0].device)
        if self._graph is None:
            with torch.inference_mode(False):  # of whichever call comes first
                self._graph = self._record(given, stream)
        stream.wait_event(self._done)  # the call before may have been on another stream
        for static, t in zip(self._given, given, strict=True):
            static.copy_(t)
        self._graph.replay()
        parts = self._made.clone().split([shape.numel() for shape in self._shapes])  # type: ignore[no-untyped-call]
        self._done.record(stream)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _record(self, given: Sequence[Tensor], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        """Capture without the device synchronization of `torch.cuda.graph`; other threads may launch meanwhile."""
        graph, aside = torch.cuda.CUDAGraph(), torch.cuda.Stream(stream.device)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._given = [torch.empty_like(t).copy_(t) for t in given]
        aside.wait_stream(stream)
        with torch.cuda.stream(aside):
            self._function(*self._given)  # libraries set themselves up at a first call
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                made = self._function(*self._given)
                self._shapes, self._made = [t.shape for t in made], torch.cat([t.reshape(-1) for t in made])
            finally:
                graph.capture_end()
        stream.wait_stream(aside)
        return graph
