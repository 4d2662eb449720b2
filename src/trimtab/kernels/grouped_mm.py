"""The backend "grouped_mm": PyTorch's own grouped GEMM, on any device.

Legend: R expert rows, e experts, A and B the widths of a GEMM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trimtab.errors import BackendError
from trimtab.kernels.api import Block, as_it_lies, put
from trimtab.kernels.rows import Csr, combine_rows, gather_padded
from trimtab.kernels.tensor_checks import row_major


class GroupedMMBackend:
    """PyTorch's own grouped GEMM over all experts at once, sizes on the device (in bfloat16)."""

    name = "grouped_mm"
    weighs_sums = False
    whole = True

    def empty_like(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty_like(like, dtype=dtype)

    def blocks(self, offsets_e: Tensor, rows: int, together: int = 0) -> Iterator[Block]:
        yield Block(slice(0, offsets_e.shape[0] - 1), slice(0, rows), offsets_e)

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise BackendError(f"torch.nn.functional.grouped_mm has no {dtype}: use kernels 'torch' on the CPU")
        return dtype

    def gather(self, x: Tensor, index_R: Tensor) -> Tensor:
        return gather_padded(x, index_R)

    def empty_rows(self, rows: int, width: int, dtype: torch.dtype, offsets_e: Tensor) -> Tensor:
        return torch.empty(rows, width, dtype=dtype, device=offsets_e.device)  # the one block holds all rows

    def grouped_mm(self, x_RA: Tensor, w_eAB: Tensor, block: Block, out: Tensor | None = None) -> Tensor:
        self._check_widths(w_eAB.shape[1:] if w_eAB.stride(2) == 1 else w_eAB.shape[1:2], x_RA)
        y = torch.nn.functional.grouped_mm(row_major(x_RA), w_eAB.to(x_RA.dtype), offs=block.offsets_e[1:].int())
        y.masked_fill_(self._tail(y, block), 0)
        return y if out is None else out.copy_(y)

    def grouped_wgrad(self, a_RA: Tensor, b_RB: Tensor, block: Block, out_eAB: Tensor, *, add: bool = False) -> None:
        self._check_widths(out_eAB.shape[1:], a_RA)
        offs = block.offsets_e[1:].int()
        out_eAB, a_RA, b_RB = as_it_lies(out_eAB, a_RA, b_RB)
        dw = torch.nn.functional.grouped_mm(row_major(a_RA).t(), row_major(b_RB), offs=offs)
        empty_e = block.offsets_e[1:] == block.offsets_e[:-1]  # some GPUs leave these as they were
        nothing, zero = empty_e[:, None, None], dw.new_zeros(())
        if not add and out_eAB.dtype is dw.dtype:
            torch.where(nothing, zero, dw, out=out_eAB)  # one pass over the weights
        else:
            put(out_eAB, dw.masked_fill_(nothing, 0), add)

    def grouped_sum(self, rows_RA: Tensor, block: Block) -> Tensor:
        index = torch.arange(rows_RA.shape[0], device=rows_RA.device)
        return combine_rows(rows_RA, Csr(indices=index, indptr=block.offsets_e))

    def expand(self, values_eA: Tensor, block: Block) -> Tensor:
        rows = torch.arange(block.rows.stop, device=values_eA.device)
        expert_R = torch.searchsorted(block.offsets_e[1:], rows, right=True)
        return torch.cat((values_eA, values_eA.new_zeros(1, values_eA.shape[1]))).index_select(0, expert_R)

    def _check_widths(self, widths: Sequence[int], rows: Tensor) -> None:
        """torch takes rows of multiples of 16 bytes alone, and says so in the middle of a call."""
        if odd := [width for width in widths if width * rows.element_size() % 16]:
            raise BackendError(
                f"torch.nn.functional.grouped_mm takes widths of multiples of 16 bytes, not {odd[0]} of {rows.dtype}: "
                "use kernels 'torch' or 'auto' on the CPU, or other widths. Under autocast its dtype is what counts",
                phase="experts",
            )

    def _tail(self, rows: Tensor, block: Block) -> Tensor:
        return (torch.arange(rows.shape[0], device=rows.device) >= block.offsets_e[-1])[:, None]
