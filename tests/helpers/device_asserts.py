"""What PyTorch's grouped GEMM asserts on a GPU and not on the CPU, asserted around it on the CPU.

A group's part of an operand begins at a multiple of 16 bytes, so that groups of any size must not lie along the
contiguous axis; offsets are int32, fewer than 1024, do not fall, and end within the rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

BYTES, GROUPS = 16, 1024


def check(a: Tensor, b: Tensor, offs: Tensor) -> None:
    """a [R, C] or, groups along C, [A, R]; b [e, C, N] or [R, B]; offs: the groups' ends."""
    assert (offs.dtype, offs.ndim) == (torch.int32, 1), f"offsets {offs.dtype} of {offs.ndim} dims"
    assert len(offs) < GROUPS, f"{len(offs)} groups"
    for name, t in (("first", a), ("second", b)):
        begin = t.storage_offset() * t.element_size()  # a file in memory begins anywhere, a device's memory does not
        assert begin % BYTES == 0, f"the {name} operand begins at {begin}"
        assert 1 in t.stride()[-2:], f"the {name} operand has strides {t.stride()}"
        wide = [s * t.element_size() for s, n in zip(t.stride(), t.shape, strict=True) if s != 1 and n > 1]
        assert not any(s % BYTES for s in wide), f"the {name} operand has strides {t.stride()}"
    grouped = [(a, 1), (b, 0)] if b.ndim == 2 else [(a, 0)]
    ends = [0, *offs.tolist()]
    assert all(start <= end for start, end in itertools.pairwise(ends)), f"offsets {ends}"
    assert ends[-1] <= a.shape[grouped[0][1]], f"offsets end at {ends[-1]} of {a.shape[grouped[0][1]]} rows"
    for t, axis in grouped:
        along = t.stride(axis) == 1 and t.stride(1 - axis) != 1
        assert not along or not any(e * t.element_size() % BYTES for e in ends), f"groups lie along {t.stride()}"


@contextmanager
def device_asserts() -> Iterator[None]:
    """Within: every `grouped_mm` of values on the CPU is checked as a GPU would."""
    real = torch.nn.functional.grouped_mm

    def checked(a: Tensor, b: Tensor, *, offs: Tensor | None = None, **more: object) -> Tensor:
        if not torch.compiler.is_compiling() and type(offs) is Tensor and offs.device.type == "cpu":
            check(a, b, offs)
        return real(a, b, offs=offs, **more)  # type: ignore[arg-type]

    torch.nn.functional.grouped_mm = checked
    try:
        yield
    finally:
        torch.nn.functional.grouped_mm = real
