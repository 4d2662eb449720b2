"""How the Triton kernels are launched, without a device: tensors that say they are on one, kernels that only record.

Legend: n rows, K slots per row, R expert rows, e experts, D model dim, F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction

from trimtab.kernels.rows import Csr
from trimtab.kernels.triton import glue, moves, products, swiglu
from trimtab.kernels.triton.language import AMPERE, BLACKWELL, CDNA, HOPPER, WARPS, Gemms, Launch, on

MODULES = (glue, moves, products, swiglu)
KERNELS = {kernel for module in MODULES for name, kernel in vars(module).items() if name.endswith("_kernel")}
LAUNCH = Launch(programs=3, gemms=HOPPER)
EXPERTS, DIM, HIDDEN = 3, 128, 256
COUNTS = {"experts", "rows", "bags", "slots", "top_k", "total", "chunks", "alignment"}
"""Integers that follow the batch or the ranks."""


class DeviceOf:
    """In place of `torch.cuda.device_of`: which device is current."""

    current = 0

    def __init__(self, tensor: Tensor) -> None:
        self.device, self.before = tensor.get_device(), self.current

    def __enter__(self) -> None:
        DeviceOf.current = self.device

    def __exit__(self, *error: object) -> None:
        DeviceOf.current = self.before


@dataclass(frozen=True)
class Launched:
    """One launch: what, with what, and which device was current."""

    kernel: JITFunction[Any]
    options: dict[str, Any]
    device: int


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    found: list[Launched] = []

    def record(self: JITFunction[Any], *args: Any, **options: Any) -> None:
        found.append(Launched(self, options, DeviceOf.current))

    monkeypatch.setattr(torch.cuda, "device_of", DeviceOf)
    monkeypatch.setattr(JITFunction, "run", record)
    with FakeTensorMode():
        yield found


def call_all(rows: int, top_k: int, alignment: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Every function that launches a kernel, on the second device."""

    def some(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda:1")

    def integers(*shape: int) -> Tensor:
        return some(*shape, dtype=torch.int64)

    x, pre, h = some(rows, DIM), some(rows, 2 * HIDDEN), some(rows, HIDDEN)
    up, down, weight = some(EXPERTS, 2 * HIDDEN, DIM), some(EXPERTS, DIM, HIDDEN), some(rows, dtype=torch.float32)
    index, offsets, w_MK = integers(rows), integers(EXPERTS + 1), some(rows, 1, dtype=torch.float32)
    swiglu.gate_up(x, index, up, offsets, pre, h, LAUNCH)
    swiglu.hidden_grad(x, index, down, weight, offsets, pre, LAUNCH)
    products.grouped_rows(x, up.transpose(1, 2), offsets, pre, LAUNCH)
    products.weight_grad(x, h, offsets, down, LAUNCH)
    products.weight_grad(h, x, offsets, down.transpose(1, 2), LAUNCH, b_index_R=index)
    products.weight_grad(x, h, offsets, down, LAUNCH, a_index_R=index)
    glue.activate("swiglu", pre, w_MK, index)
    glue.activate_backward("swiglu", pre, h, w_MK, index, None, True)
    glue.write_gradient(up, offsets, torch.empty_like(up), True)
    moves.gather(x, index)
    moves.combine(x, Csr(indices=index, indptr=integers(rows + 1)))
    moves.place_slots(integers(rows, top_k), EXPERTS, alignment=alignment)


def test_every_kernel_is_launched_on_the_device_of_its_tensors(launched: list[Launched]) -> None:
    call_all(rows=256, top_k=2, alignment=1)
    assert {launch.kernel for launch in launched} == KERNELS
    assert {launch.device for launch in launched} == {1}
    assert DeviceOf.current == 0


def test_gemms_of_float32_take_its_tiles(launched: list[Launched]) -> None:
    call_all(256, 2, 1, torch.float32)
    gemms = [launch for launch in launched if "BM" in launch.options]
    assert len({launch.kernel for launch in gemms}) == 4
    for launch in gemms:
        assert launch.options.items() >= HOPPER.float32.options().items(), launch.kernel


def test_a_gathered_weight_gradient_takes_its_tiles(launched: list[Launched]) -> None:
    call_all(256, 2, 1)
    gemms = [launch for launch in launched if launch.kernel is products.weight_grad_kernel]
    stages = [launch.options["num_stages"] for launch in gemms]
    assert stages == [HOPPER.wgrad.stages, HOPPER.wgrad_gathered.stages, HOPPER.wgrad_gathered.stages]


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], torch.device]]:
    """Whose capability is set."""

    def of(major: int, minor: int) -> torch.device:
        found = SimpleNamespace(major=major, minor=minor, multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
        on.cache_clear()
        return torch.device("cuda")

    yield of
    on.cache_clear()


def test_as_many_programs_as_share_the_multiprocessors(a_gpu: Callable[[int, int], torch.device]) -> None:
    device, one = a_gpu(9, 0), HOPPER.rows
    two = replace(one, per_sm=2)
    grids = [Launch().grid(device, one, 1000), Launch().grid(device, two, 1000), Launch().grid(device, two, 200)]
    assert grids == [(132,), (264,), (200,)]
    assert LAUNCH.grid(device, two, 1000) == (3,)  # what was asked for
    assert two.options() == one.options()


@pytest.mark.parametrize(
    ("capability", "wanted"),
    [
        ((7, 5), AMPERE), ((8, 0), AMPERE), ((8, 6), WARPS), ((8, 9), WARPS), ((9, 0), HOPPER), ((10, 0), BLACKWELL),
        ((10, 3), BLACKWELL), ((11, 0), BLACKWELL), ((12, 0), WARPS), ((12, 1), WARPS),
    ],
)  # fmt: skip
def test_a_device_takes_the_tiles_of_the_last_one_before_it(
    capability: tuple[int, int], wanted: Gemms, a_gpu: Callable[[int, int], torch.device]
) -> None:
    assert on(a_gpu(*capability)) == (wanted, 132)


def test_amd_takes_its_own(a_gpu: Callable[[int, int], torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert on(a_gpu(9, 4))[0] is CDNA


def test_nothing_but_counts_is_kept_from_the_compiler() -> None:
    """A width that is a multiple of 16 makes loads wide; a count of experts is that of a layer, and of its ranks."""
    for kernel in KERNELS:
        kept = {p.name for p in kernel.params if p.do_not_specialize}
        assert kept <= COUNTS, kernel
        assert "experts" not in set(kernel.arg_names) - kept, kernel
