"""Grouped GEMMs: one matrix per expert, each over its own segment of rows. An empty segment is a segment.

    grouped_mm      y[segment i] = x[segment i] @ w[i]
    grouped_wgrad   dw[i]        = a[segment i]^T @ b[segment i]       or +=; zeros where the segment is empty
    grouped_sum     db[i]        = sum of the rows of segment i

`LoopKernels` make one `mm` per expert, `CompiledKernels` are in C++ (both for the CPU), `StockKernels` are PyTorch's
grouped GEMM with offsets on the device, `TritonKernels` are our own for CUDA. An expert MLP runs in blocks of experts;
`blocks` says which.

Legend: R expert rows, e experts (of a block), A and B the widths of a GEMM, I width of the pre-activations,
F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from trimtab.errors import BackendError
from trimtab.kernels.block import Block as Block
from trimtab.kernels.block import put as put
from trimtab.kernels.compiled import compiled_kernels, switched_off
from trimtab.kernels.loop import LoopKernels as LoopKernels
from trimtab.kernels.stock import StockKernels as StockKernels


class Kernels(Protocol):
    """What grouped layers and expert MLPs need. The results belong to the caller, who may change them in place."""

    name: str
    weighs_sums: bool
    """Whether weights are to be taken into the combine rather than into hidden rows."""

    whole: bool
    """Whether one block holds all experts and rows."""

    def blocks(
        self, offsets_e: Tensor, rows: int, together: int = 0, dtype: torch.dtype | None = None
    ) -> Iterator[Block]:
        """The blocks of the segments at `offsets_e` [e + 1] of `rows` rows.

        In order; together they hold each expert once and each row of a segment once. Rows behind the last segment
        may or may not be in a block.

        together: kernels that take the experts one by one may give a block several of so many rows in all.
        dtype: of the products, for kernels that compute some in larger blocks.
        """

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a block of products in `dtype` is best computed; never narrower."""

    def empty_like(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Like `torch.empty_like`, perhaps in memory that was used before."""

    def gather(self, x: Tensor, index_R: Tensor) -> Tensor:
        """x[index] for the rows of one block; zeros where the index is -1."""

    def empty_rows(self, rows: int, width: int, dtype: torch.dtype, offsets_e: Tensor) -> Tensor:
        """[rows, width] of `dtype` for the blocks' results: not initialised, but zero where no block reaches."""

    def grouped_mm(self, x_RA: Tensor, w_eAB: Tensor, block: Block, out: Tensor | None = None) -> Tensor:
        """[R, B]. Rows of the block behind its last segment come out zero, whatever `x_RA` holds there.

        x_RA: in `compute_dtype` of the weight's dtype.
        """

    def grouped_wgrad(self, a_RA: Tensor, b_RB: Tensor, block: Block, out_eAB: Tensor, *, add: bool = False) -> None:
        """Into `out_eAB`, of any strides and dtype, whatever it held; with `add` on top of what it held."""

    def grouped_sum(self, rows_RA: Tensor, block: Block) -> Tensor:
        """[e, A]."""

    def expand(self, values_eA: Tensor, block: Block) -> Tensor:
        """Each expert's row of values for each of its rows, zero behind the last segment: broadcastable to [R, A]."""


def triton_kernels() -> Kernels:
    """Raises:
    BackendError: there is no Triton here.
    """
    from trimtab.kernels.triton.kernels import TritonKernels

    return TritonKernels()


KERNELS: dict[str, Callable[[], Kernels]] = {
    "compiled": compiled_kernels,
    "loop": LoopKernels,
    "stock": StockKernels,
    "triton": triton_kernels,
}


def names_for(name: str, device: torch.device) -> tuple[str, ...]:
    """What `name` stands for on `device`, in the order of preference: "auto" for the fastest there."""
    if name != "auto":
        return (name,)
    if device.type != "cpu":
        return ("stock",)
    return ("loop",) if switched_off() else ("compiled", "loop")


def get_kernels(name: str, device: torch.device) -> Kernels:
    """The kernels called `name`: "compiled", "loop", "stock", "triton", or "auto" for the fastest on `device`.

    Raises:
        BackendError: no such kernels, or they cannot run on the device.
    """
    names = names_for(name, device)
    for other in names[:-1]:
        try:
            return get_kernels(other, device)
        except BackendError:
            continue  # `KernelChoice` says so
    last = names[-1]
    if last not in KERNELS:
        raise BackendError(f"no kernels named {last!r}: choose one of {['auto', *KERNELS]}")
    if last in ("compiled", "loop") and device.type != "cpu":
        raise BackendError(f"kernels {last!r} read counts on the host and run on the CPU only, not on {device}")
    if last == "triton" and device.type != "cuda":
        raise BackendError(f"kernels 'triton' run on CUDA devices only, not on {device}")
    return KERNELS[last]()
