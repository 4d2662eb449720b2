"""Moving rows: `gather_rows` is a 0/1 map with one 1 per row, `combine_rows` its transpose. And the parts of plans.

Legend: n rows, D row width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trimtab.kernels.tensor_checks import static_by_default

REST = 256
"""Bags that share what lies behind the last one, where the host does not know how much that is."""


@dataclass(frozen=True, kw_only=True)
class Csr:
    """For each of n outputs the rows that are summed into it, in order (CSR).

    indices: [rows used] int64, may be longer than indptr[-1] on a device (what lies beyond is in no sum).
    indptr: [n + 1] int64.
    whole: nothing lies beyond.
    """

    indices: Tensor
    indptr: Tensor
    whole: bool = False


class ExpertPlan(NamedTuple):
    """The expert of each of K slots of the M rows that one rank holds, all tensors int64; see `plan_experts`.

    slot_R: [R] slot (row * K + k) of each expert row, grouped by expert, in slot order within one; -1 in padding.
    row_R: [R] row of each expert row; -1 in padding.
    bag_index, bag_offsets: the expert rows of each row, in the order of k, see `row_csr`.
    counts_e: [e] kept slots per local expert.
    offsets_e: [e + 1] start of each expert's segment and the end of the last; multiples of the alignment, if any.
    """

    slot_R: Tensor
    row_R: Tensor
    bag_index: Tensor
    bag_offsets: Tensor
    counts_e: Tensor
    offsets_e: Tensor

    @property
    def row_csr(self) -> Csr:
        """One bag per row over the R expert rows."""
        return Csr(indices=self.bag_index, indptr=self.bag_offsets)


def gather_rows(x_nD: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """x[index]: [len(index), D]. The indices must be in range."""
    if out is None:
        return x_nD.index_select(0, index)
    return torch.index_select(x_nD, 0, index, out=out)


def gather_padded(x_nD: Tensor, index: Tensor) -> Tensor:
    """x[index], and a row of zeros where the index is -1: [len(index), D]."""
    # A zero row at the end serves padding, also where x has no rows at all.
    padded = torch.cat((x_nD, x_nD.new_zeros(1, x_nD.shape[1])))
    return gather_rows(padded, torch.where(index < 0, x_nD.shape[0], index))


def expand_rows(values_eD: Tensor, offsets_e: Tensor, rows: int) -> Tensor:
    """Each segment's row of values for each of its rows, zero behind the last segment: [rows, D]."""
    segment_R = torch.searchsorted(offsets_e[1:], torch.arange(rows, device=values_eD.device), right=True)
    return torch.cat((values_eD, values_eD.new_zeros(1, values_eD.shape[1]))).index_select(0, segment_R)


def combine_rows(rows_nD: Tensor, csr: Csr, weights_n: Tensor | None = None) -> Tensor:
    """Sum of each bag's rows, in the order of the bag, accumulated in at least float32: [n, D].

    With `weights_n` [n] in the rows' dtype, row i counts weights_n[i] times. An empty bag sums to zero; rows that
    no bag names are not read.
    """
    each = None if weights_n is None else weights_n[csr.indices]
    # The last offset opens one bag more, for what lies behind it; some kernels would add that to the last real bag.
    offsets = csr.indptr if csr.whole or rows_nD.device.type == "cpu" else cut_rest(csr)
    summed = torch.nn.functional.embedding_bag(csr.indices, rows_nD, offsets, mode="sum", per_sample_weights=each)
    return summed[: csr.indptr.shape[0] - 1].detach()  # to autograd no view: it may be changed in place


def cut_rest(csr: Csr) -> Tensor:
    """Offsets that share what lies behind the last bag among many: a GPU adds up one bag's rows one by one."""
    last, end = csr.indptr[-1:], max(csr.indices.shape[0], 1)
    # last + (end - last) * part // REST, in few launches
    ends, left = (torch.arange(*of, device=last.device) for of in ((end, end * REST, end), (REST - 1, 0, -1)))
    return torch.cat((csr.indptr, ends.addcmul_(last, left).div_(REST, rounding_mode="floor")))


def narrow(key_N: Tensor, groups: int) -> Tensor:
    """Sort keys 0..groups in the narrowest dtype that holds them: radix sorts cost by the byte."""
    return key_N.to(torch.int16 if groups < 2**15 else torch.int32)


def inverse_of(order_N: Tensor) -> Tensor:
    """The inverse of a permutation [N]."""
    return torch.empty_like(order_N).scatter_(0, order_N, torch.arange(order_N.shape[0], device=order_N.device))


def compact(values_N: Tensor, keep_N: Tensor, size: int | None = None, *, static: bool | None = None) -> Tensor:
    """The kept values in order.

    Static (the default on a device and under `torch.compile`): nothing is read back to the host, so the result has
    `size` elements, the number of kept values where it is known and N where it is not, filled up with zeros.
    """
    if not (static_by_default(values_N) if static is None else static):
        return values_N[keep_N]
    n = values_N.shape[0] if size is None else size
    place_N = keep_N.cumsum(0).mul_(keep_N).clamp_(max=n + 1)  # from 1; the first and the last place are for the others
    return values_N.new_zeros(n + 2).scatter_(0, place_N, values_N)[1 : n + 1]


def csr_of(
    rows_N: Tensor, keep_N: Tensor, bags: int, size: int | None = None, *, static: bool | None = None,
    whole: bool = False,
) -> Csr:  # fmt: skip
    """Csr from slot-ordered row numbers: slots are dealt to `bags` equal runs, those not kept are left out. whole: they
    are `size`."""
    kept_per_bag = keep_N.view(bags, rows_N.shape[0] // max(bags, 1)).sum(1)
    offsets = torch.zeros(bags + 1, dtype=torch.int64, device=rows_N.device)
    torch.cumsum(kept_per_bag, 0, out=offsets[1:])
    return Csr(indices=compact(rows_N, keep_N, size, static=static), indptr=offsets, whole=whole)
