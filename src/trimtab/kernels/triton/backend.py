"""The backend "triton": all experts at once, sizes on the device.

Expert MLPs with SwiGLU take the fused kernels of `trimtab.experts.on_triton`, all else these.

Never run on a GPU: run in Triton's interpreter against float64, and compiled for compute capability 9.0.

Legend: R expert rows, e experts, A and B the widths of a GEMM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.errors import BackendError
from trimtab.kernels.api import Block
from trimtab.kernels.grouped_mm import GroupedMMBackend
from trimtab.kernels.triton.language import Launch
from trimtab.kernels.triton.moves import gather
from trimtab.kernels.triton.products import grouped_rows, weight_grad

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonBackend(GroupedMMBackend):
    """Grouped GEMMs in Triton for CUDA devices; sums and expansions as in `GroupedMMBackend`."""

    name = "triton"

    def __init__(self, launch: Launch | None = None) -> None:
        self.launch = Launch() if launch is None else launch

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype not in DTYPES:
            raise BackendError(f"kernels 'triton' have no {dtype}: use kernels 'torch' on the CPU")
        return dtype

    def gather(self, x: Tensor, index_R: Tensor) -> Tensor:
        return gather(x.contiguous(), index_R)

    def grouped_mm(self, x_RA: Tensor, w_eAB: Tensor, block: Block, out: Tensor | None = None) -> Tensor:
        y = x_RA.new_empty(x_RA.shape[0], w_eAB.shape[2]) if out is None or not out.is_contiguous() else out
        grouped_rows(x_RA.contiguous(), w_eAB.to(x_RA.dtype), block.offsets_e, y, self.launch, zero_tail=True)
        return y if out is None or out is y else out.copy_(y)

    def grouped_wgrad(self, a_RA: Tensor, b_RB: Tensor, block: Block, out_eAB: Tensor, *, add: bool = False) -> None:
        weight_grad(a_RA.contiguous(), b_RB.contiguous(), block.offsets_e, out_eAB, self.launch, add=add)
