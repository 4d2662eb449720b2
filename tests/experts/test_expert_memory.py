"""The memory that ExpertMLP's docstring promises, measured: storages counted as they come and go."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.threads import torch_threads
from trimtab.experts.activations import activation_of
from trimtab.experts.module import ExpertMLP
from trimtab.kernels.compiled import compiled_kernels
from trimtab.plan.ledger import Ledger

M, K, D, F, SIZE = 128, 4, 64, 96, 4
INDICES = 48  # bytes per kept slot


def peaks(mlp: ExpertMLP, x: Tensor, ids: Tensor, w: Tensor, dy: Tensor) -> tuple[int, int, int]:
    """Bytes kept for the backward, at the peak of the forward and at that of the backward; y counts in the second one
    alone, and the parameters' gradients do not."""
    mlp(x, ids, w)  # the self-test is not part of it
    with Ledger() as live:
        live.know((x, w, ids, dy, *mlp.parameters()))
        y = mlp(x, ids, w)
        forward, kept, since = live.peak()[0], live.now - y.nbytes, live.clock
        y.backward(dy)
    return kept, forward, live.peak(since)[0] - y.nbytes - sum(p.nbytes for p in mlp.parameters())


def promised(activation: str, rows: int, busiest: int, stock: bool) -> tuple[int, int, int]:
    """ExpertMLP's formulas."""
    gated, clamped = activation_of(activation).gated, activation == "clamped_swiglu"
    width = 2 * F if gated else F
    a = 3 if clamped else 1
    b = 6 if clamped else 4 if gated else 2
    c = 3
    base = rows * (width + D)
    forward = base + max(M * D, busiest * D, a * busiest * F)
    if stock:  # the results of its one block are no copies
        forward = rows * width + max(rows * (F + D), a * rows * F)
    backward = base + max(M * D, busiest * (c * F + D), b * busiest * F)
    return SIZE * rows * width, SIZE * forward, SIZE * backward


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "clamped_swiglu", "relu_squared", "gelu"])
@pytest.mark.parametrize("routing", ["even", "one_expert", "last_is_busiest", "grouped_mm"])
def test_peaks_are_what_the_docstring_says(activation: str, routing: str) -> None:
    ids = torch.arange(M * K).view(M, K) % 4
    if routing == "one_expert":
        ids = torch.full_like(ids, 2)
    if routing == "last_is_busiest":
        ids = torch.where(torch.arange(M)[:, None] < M // 2, 3, ids)
    kernels = "grouped_mm" if routing == "grouped_mm" else "torch"
    busiest = {"even": 256, "one_expert": M * K, "last_is_busiest": 320, "grouped_mm": M * K}[routing]  # of all blocks
    mlp = ExpertMLP(4, D, F, activation=activation, kernels=kernels, dtype=torch.float32)
    x, w = torch.randn(M, D, requires_grad=True), torch.rand(M, K, requires_grad=True)
    got = peaks(mlp, x, ids, w, torch.randn(M, D))
    bounds = promised(activation, M * K, busiest, routing == "grouped_mm")
    for name, value, bound in zip(("kept", "forward", "backward"), got, bounds, strict=True):
        indices = INDICES * M * K
        assert value <= bound + indices, f"{name}: {value} bytes, promised {bound} + {indices}"
        if (routing, name) != ("grouped_mm", "backward"):
            assert value >= bound, f"{name}: {value} bytes, promised {bound}: the formula is too generous"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peaks_of_the_compiled_kernels(dtype: torch.dtype, threads: int) -> None:
    tokens, experts, size = 4096, 16, dtype.itemsize
    ids = torch.arange(tokens * K).view(tokens, K) % experts
    mlp = ExpertMLP(experts, D, F, kernels="cpu", dtype=dtype)
    x, w = torch.randn(tokens, D, dtype=dtype, requires_grad=True), torch.rand(tokens, K, requires_grad=True)
    dy = torch.randn(tokens, D, dtype=dtype)
    with torch_threads(threads):
        kept, forward, backward = peaks(mlp, x, ids, w, dy)
    rows, width, piece = tokens * K, 2 * F, 512
    wave = rows // (16 if threads == 1 else rows // (2048 * threads))
    pre, indices = size * rows * width, INDICES * rows
    pairs = dtype == torch.bfloat16 and compiled_kernels().bf16.number > 0
    value, together = 2 if pairs else 4, piece if threads == 1 else wave
    each = max(piece * (value * D + 128), 520_000)
    both = pre + (4 * tokens * D if size < 4 else 0)
    assert pre <= kept <= pre + indices
    most = both + together * (value * F + 64) + threads * (each + 1_000_000)
    assert 0.9 * most <= forward - dy.nbytes <= most + indices
    together = wave if value == size else together
    most = both + together * (value * width + 64) + threads * (each + (2_200_000 if pairs else 1_000_000))
    most += size * wave * (F if pairs else width if value != size else 0)
    assert 0.9 * most <= backward - dy.nbytes <= most + indices


@pytest.mark.parametrize("activation", ["swiglu", "relu_squared"])
@pytest.mark.parametrize("kernels", ["torch", "grouped_mm"])
def test_delayed_gradients_keep_what_the_docstring_says_and_then_nothing(activation: str, kernels: str) -> None:
    """x and the gradient of y are kept as well, but they were there before."""
    ids = torch.arange(M * K).view(M, K) % 4
    mlp = ExpertMLP(4, D, F, activation=activation, kernels=kernels, dtype=torch.float32, delay_wgrad=True)
    x, w = torch.randn(M, D, requires_grad=True), torch.rand(M, K, requires_grad=True)
    dy = torch.randn(M, D)
    mlp(x, ids, w)
    params = sum(p.numel() for p in mlp.parameters()) * SIZE
    with Ledger() as live:
        live.know((x, w, ids, dy, *mlp.parameters()))
        mlp(x, ids, w).backward(dy)
        waiting = live.now - (x.numel() + w.numel()) * SIZE
        mlp.backward_dw()
        after = live.now - (x.numel() + w.numel()) * SIZE - params
    pre = SIZE * M * K * mlp.expert_weights()[0].outs
    assert 2 * pre <= waiting <= 2 * pre + (INDICES + SIZE) * M * K
    assert after < SIZE * M  # some odd bytes, none of them rows


@pytest.mark.parametrize("kernels", ["cpu", "torch"])
def test_peaks_under_autocast_are_those_of_its_dtype_and_of_the_copies(kernels: str) -> None:
    """The compiled kernels copy no weight."""
    tokens, experts = 4096, 16
    ids, w = torch.arange(tokens * K).view(tokens, K) % experts, torch.rand(tokens, K)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        mlp = ExpertMLP(experts, D, F, kernels=kernels, dtype=dtype)
        x, dy = torch.randn(tokens, D, dtype=dtype, requires_grad=True), torch.randn(tokens, D, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16):
            kept, forward, backward = peaks(mlp, x, ids, w, dy)
        found.append((kept, forward - dy.nbytes, backward - dy.nbytes))
    rows, copies = 2 * tokens * D, 2 * experts * 3 * F * D if kernels == "torch" else 0
    more = [wide - low for low, wide in zip(*found, strict=True)]
    assert more[0] == pytest.approx(rows, rel=1e-3)
    assert more[1] == pytest.approx(copies, rel=1e-3, abs=1e3)  # y itself, twice as large, comes after the peak
    assert more[2] == pytest.approx(rows + copies, rel=1e-3)
