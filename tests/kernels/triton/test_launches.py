"""How the Triton kernels are launched, without a device: tensors that say they are on one, kernels that only record.

Legend: n rows, R expert rows, e experts, D model dim, F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from trimtab.kernels import fp8_blockwise
from trimtab.kernels.rows import Bags
from trimtab.kernels.triton import gate_up, hidden_grad, metadata, moves, rows_gemm, weight_grad
from trimtab.kernels.triton.language import Launch

MODULES = (gate_up, hidden_grad, metadata, moves, rows_gemm, weight_grad, fp8_blockwise)
LAUNCH = Launch(programs=3)
ROWS, EXPERTS, DIM, HIDDEN = 256, 3, 128, 256


class DeviceOf:
    """In place of `torch.cuda.device_of`: which device is current."""

    current = 0

    def __init__(self, tensor: Tensor) -> None:
        self.device, self.before = tensor.get_device(), self.current

    def __enter__(self) -> None:
        DeviceOf.current = self.device

    def __exit__(self, *error: object) -> None:
        DeviceOf.current = self.before


def kernels() -> dict[tuple[ModuleType, str], Any]:
    """Every kernel by its module and name there."""
    return {(m, name): kernel for m in MODULES for name, kernel in vars(m).items() if name.endswith("_kernel")}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, int]]]:
    """(module, kernel, current device) of each launch."""
    found: list[tuple[str, str, int]] = []

    class Recorder:
        def __init__(self, module: ModuleType, name: str) -> None:
            self.who = (module.__name__, name)

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: found.append((*self.who, DeviceOf.current))

    monkeypatch.setattr(torch.cuda, "device_of", DeviceOf)
    for module, name in kernels():
        monkeypatch.setattr(module, name, Recorder(module, name))
    with FakeTensorMode():
        yield found


def call_all(device: str) -> None:
    """Every function that launches a kernel."""

    def some(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def integers(*shape: int) -> Tensor:
        return some(*shape, dtype=torch.int64)

    x, pre, h, index, offsets = (
        some(ROWS, DIM), some(ROWS, 2 * HIDDEN), some(ROWS, HIDDEN), integers(ROWS), integers(EXPERTS + 1),
    )  # fmt: skip
    up, down, weight = some(EXPERTS, 2 * HIDDEN, DIM), some(EXPERTS, DIM, HIDDEN), some(ROWS, dtype=torch.float32)
    gate_up.gate_up(x, index, up, offsets, pre, h, LAUNCH)
    hidden_grad.hidden_grad(x, index, down, weight, offsets, pre, LAUNCH)
    rows_gemm.grouped_rows(x, up.transpose(1, 2), offsets, pre, LAUNCH)
    weight_grad.weight_grad(x, h, offsets, down, LAUNCH)
    moves.gather(x, index)
    moves.combine(x, Bags(index=index, offsets=integers(ROWS + 1)))
    metadata.place_slots(integers(ROWS, 2), EXPERTS)
    scale = some(ROWS, dtype=torch.float32)
    fp8_blockwise.blockwise_rows(x, scale, up, scale, offsets)
    fp8_blockwise.blockwise_groups(x, scale, x, scale, offsets)


def test_every_kernel_is_launched_on_the_device_of_its_tensors(launched: list[tuple[str, str, int]]) -> None:
    call_all("cuda:1")
    assert {(module, name) for module, name, _ in launched} == {(m.__name__, name) for m, name in kernels()}
    assert {device for *_, device in launched} == {1}
    assert DeviceOf.current == 0
