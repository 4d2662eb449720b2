"""Weight gradients in float32 over as many rows as MKL is slow for: by cpu/wgrad.h, against float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from helpers.comparing import assert_close
from helpers.threads import torch_threads
from trimtab.kernels import compiled, mkl
from trimtab.kernels.block import Block
from trimtab.kernels.compiled import CompiledKernels, compiled_kernels
from trimtab.kernels.loop import LoopKernels

SIZES = (64, 0, 100, 1, 41)
A, B = 600, 70


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each gradient that the C++ computed, which is taken for any number of rows."""
    taken: list[int] = []
    real = CompiledKernels.weight_gradients

    def spy(self: CompiledKernels, fields: Mapping[str, Any]) -> None:
        taken.append(fields["R"])
        real(self, fields)

    monkeypatch.setattr(CompiledKernels, "weight_gradients", spy)
    monkeypatch.setattr(compiled, "slow_gradient", lambda rows, *, add: True)
    return taken


def block_of(sizes: tuple[int, ...]) -> Block:
    offsets = torch.tensor((0, *sizes)).cumsum(0)
    return Block(slice(0, len(sizes)), slice(0, sum(sizes)), offsets, sizes)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("widths", [(A, B), (576, 64), (17, 3)], ids=str)
@pytest.mark.parametrize("sizes", [SIZES, (300,), (0, 0)], ids=str)
def test_it_is_the_gradient_of_every_expert(
    calls: list[int], sizes: tuple[int, ...], widths: tuple[int, int], add: bool, turned: bool, threads: int
) -> None:
    block, e = block_of(sizes), len(sizes)
    a, b = (torch.randn(sum(sizes), width) for width in widths)
    shape = (e, *widths)
    out = torch.full((e, *widths[::-1]) if turned else shape, 0.5 if add else torch.nan)
    with torch_threads(threads):
        compiled_kernels().grouped_wgrad(a, b, block, out.transpose(1, 2) if turned else out, add=add)
    assert calls == [sum(sizes)]
    pieces = zip(a.double().split(sizes), b.double().split(sizes), strict=True)
    truth = torch.stack([x.t() @ y for x, y in pieces]) + (0.5 if add else 0.0)
    assert_close(out.transpose(1, 2) if turned else out, truth.float(), 1e-6, "gradient")


def test_it_needs_no_default_device_and_no_columns(calls: list[int]) -> None:
    block, kernels = block_of(SIZES), compiled_kernels()
    a, b, out = torch.randn(sum(SIZES), A), torch.randn(sum(SIZES), B), torch.empty(len(SIZES), A, B)
    truth = torch.stack([x.t() @ y for x, y in zip(a.split(SIZES), b.split(SIZES), strict=True)])
    with torch.device("meta"):
        kernels.grouped_wgrad(a, b, block, out)
    assert_close(out, truth, 1e-6, "gradient")
    kernels.grouped_wgrad(a[:, :0], b, block, out[:, :0].contiguous())
    assert len(calls) == 2


def test_operands_that_do_not_fit_are_the_loop_s_to_refuse(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    block, kernels = block_of(SIZES), compiled_kernels()
    refused: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        LoopKernels, "grouped_wgrad", lambda self, a, b, *rest, add: refused.append((*a.shape, *b.shape))
    )
    for rows, wide, deep in ((sum(SIZES) - 1, A, B), (sum(SIZES), A - 1, B), (sum(SIZES), A, B + 1)):
        out = torch.empty(len(SIZES), A, B)
        kernels.grouped_wgrad(torch.randn(rows, wide), torch.randn(rows, deep), block, out)
    assert len(refused) == 3
    assert not calls


def test_others_go_the_way_of_the_loop(calls: list[int]) -> None:
    block, kernels = block_of(SIZES), compiled_kernels()
    a, b, out = torch.randn(sum(SIZES), A), torch.randn(sum(SIZES), B), torch.empty(len(SIZES), A, B)
    truth = torch.stack([x.t() @ y for x, y in zip(a.split(SIZES), b.split(SIZES), strict=True)])
    strided = torch.randn(sum(SIZES), 2 * B)
    strided[:, ::2] = b
    for columns, target in ((strided[:, ::2], out), (b, torch.empty(len(SIZES), A, 2 * B)[:, :, ::2])):
        kernels.grouped_wgrad(a, columns, block, target)
        assert_close(target, truth, 1e-6, "gradient")
    half = torch.empty(len(SIZES), A, B, dtype=torch.float16)
    kernels.grouped_wgrad(a, b, block, half)
    assert torch.equal(half, truth.half())
    assert not calls


def test_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mkl, "_measured", lambda: True)
    taken = {
        add: [r for r in (0, 16, 47, 48, 64, 111, 112, 199, 200) if mkl.slow_gradient(r, add=add)]
        for add in (False, True)
    }
    assert taken == {False: [48, 64, 111, 112, 199], True: [48, 64, 111]}
    monkeypatch.setattr(mkl, "_measured", lambda: False)
    assert not mkl.slow_gradient(64, add=False)
