"""The device of these tests: CUDA, or, to see that the tests themselves run, the CPU (TRIMTAB_GPU_TESTS=cpu)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from helpers.comparing import assert_close

DEVICE = os.environ.get("TRIMTAB_GPU_TESTS", "cuda")
REHEARSED = DEVICE == "cpu"
needs_device = pytest.mark.skipif(not REHEARSED and not torch.cuda.is_available(), reason="no CUDA device")
Run = Callable[[], Sequence[Tensor]]


def need_offsets_on_the_device() -> None:
    """Fails where the promise cannot be kept: before 9.0 torch's bfloat16 grouped GEMM is a loop on the host."""
    capability = (9, 0) if REHEARSED else torch.cuda.get_device_capability()
    assert capability[0] in (9, 10), f"torch's grouped GEMM reads the offsets on the host at capability {capability}"


@contextmanager
def no_sync() -> Iterator[None]:
    """Within: whatever waits for the device raises."""
    with _sync_debug("error"):
        yield


@contextmanager
def syncs(found: list[str]) -> Iterator[None]:
    """Adds a line for whatever waits for the device."""
    with warnings.catch_warnings(record=True) as said, _sync_debug("warn"):
        warnings.simplefilter("always")
        yield
    found += [str(one.message) for one in said if "synchroniz" in str(one.message)]


@contextmanager
def _sync_debug(mode: str) -> Iterator[None]:
    if REHEARSED:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def one_graph_serves(run: Run, changes: Mapping[str, Callable[[], object]], bound: float = 1e-6) -> Run:
    """One CUDA graph of `run` gives, behind each of `changes`, what `run` gives. Returns the graph's replay."""
    graph = _captured(run)
    for name, change in changes.items():
        change()
        replayed = [t.clone() for t in graph()]
        for i, (got, wanted) in enumerate(zip(replayed, run(), strict=True)):
            assert_close(got.cpu(), wanted.cpu(), bound, f"{name}: result {i}")
    return graph


def _captured(run: Run) -> Run:
    """`run` as the replay of a CUDA graph, which gives the same tensors each time.

    A capture that fails raises, and leaves the current stream as it was.
    """
    if REHEARSED:
        return run
    stream, aside = torch.cuda.current_stream(), torch.cuda.Stream()
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
