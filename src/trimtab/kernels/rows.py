"""Moving rows: `gather_rows` is a 0/1 map with one 1 per row, `sum_bags` its transpose.

Legend: n rows, D row width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.dispatch.plan import Bags


def gather_rows(x_nD: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """x[index]: [len(index), D]. The indices must be in range."""
    if out is None:
        return x_nD.index_select(0, index)
    return torch.index_select(x_nD, 0, index, out=out)


def sum_bags(rows_nD: Tensor, bags: Bags) -> Tensor:
    """Sum of each bag's rows, in the order of the bag, accumulated in at least float32: [bags, D].

    An empty bag sums to zero; rows that no bag names are not read.
    """
    # The last offset opens one bag more, for what lies behind it; some kernels would add that to the last real bag.
    summed = torch.nn.functional.embedding_bag(bags.index, rows_nD, bags.offsets, mode="sum")
    return summed[:-1]
