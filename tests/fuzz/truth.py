"""What a block of cases must give, from dense matrices alone: no sort, no plan, no route.

    A[t, i] = sum over k of w[t, k] [ids[t, k] = i]            N[t, i] the same without w
    y = (A scale) x + A shift      dx = (A scale) dy      dw[t, k] = (scale x + shift)[ids[t, k]] . dy

The cases of a block lie side by side in one world: each has tokens and experts of its own, so with C cases each rank
has C * e experts, and expert j of rank r is expert r * C * e + c * e + j for case c.

All values are small whole numbers, exact in every dtype used, so results must be equal and not only close.

Legend: C cases, P ranks, T tokens of all cases and ranks, K experts per token, E experts of a case, e of a rank,
D width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from fuzz.cases import Case, Shape

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Inputs of a block and what must come out. Tokens are in the order of the cases.

    holder_T: the rank of each token; ids_TK: expert ids in the world of the block; local_TK: in that of the case.
    x_TD, w_TK hold NaN where nothing may be read; dy_TD is the gradient handed in.
    kept_TK: slots that reach an expert. counts_PCe: slots per rank, case and expert.
    """

    shape: Shape
    cases: int
    holder_T: Tensor
    case_T: Tensor
    ids_TK: Tensor
    local_TK: Tensor
    real_T: Tensor
    x_TD: Tensor
    w_TK: Tensor
    dy_TD: Tensor
    kept_TK: Tensor
    counts_PCe: Tensor
    scale_PCe: Tensor
    shift_PCeD: Tensor
    y_TD: Tensor
    dx_TD: Tensor
    dw_TK: Tensor


def truth_of(cases: Sequence[Case]) -> Truth:
    """The truth of cases of one shape."""
    shape = cases[0].shape
    P, e, K, D, C = shape.ranks, shape.experts, shape.top_k, shape.width, len(cases)
    narrow = shape.dtype == "bfloat16"
    f64 = torch.float64
    sizes = torch.tensor([len(case.holder) for case in cases])
    case_T = torch.repeat_interleave(torch.arange(C), sizes)
    number_T1 = (torch.arange(case_T.shape[0]) - (sizes.cumsum(0) - sizes)[case_T] + 1)[:, None]
    holder_T = torch.tensor(list(chain.from_iterable(case.holder for case in cases)), dtype=torch.int64)
    real_T = torch.tensor(list(chain.from_iterable(case.real for case in cases)), dtype=torch.bool)
    local_TK = _slots(case.ids for case in cases).view(-1, K)
    whole_TK = _slots(case.weights for case in cases).view(-1, K).to(f64)
    column_D = torch.arange(D)
    x = (number_T1 * (2 * column_D + 3) + column_D) % 5 - 2
    if not narrow:
        x[:, :1] = number_T1
    dy = (number_T1 * (3 * column_D + 2) + case_T[:, None]) % 5 - 2
    expert_E, case_C = torch.arange(P * e), torch.arange(C)[:, None]
    scale_CE = ((case_C + 3 * expert_E) % (2 if narrow else 5) + 1).to(f64)
    shift_CED = ((case_C[..., None] + 2 * expert_E[:, None] + column_D) % 3 - 1).to(f64)

    kept_TK = (local_TK >= 0) & real_T[:, None]
    column_TK = local_TK.clamp(min=0)
    x, dy = x.to(f64), dy.to(f64)
    used_TK = whole_TK.masked_fill(~kept_TK, 0)
    zeros_TE = torch.zeros(case_T.shape[0], P * e, dtype=f64)
    A_TE = zeros_TE.scatter_add(1, column_TK, used_TK)
    N_TE = zeros_TE.scatter_add(1, column_TK, kept_TK.to(f64))
    scale_TE, shift_TED = scale_CE[case_T], shift_CED[case_T]
    gain_T1 = (A_TE * scale_TE).sum(1, keepdim=True)
    gradient_TE = scale_TE * (x * dy).sum(1, keepdim=True) + (shift_TED * dy[:, None]).sum(2)
    counts_CE = torch.zeros(C, P * e, dtype=f64).index_add_(0, case_T, N_TE)
    read_T1 = kept_TK.any(1, keepdim=True)
    dtype = DTYPES[shape.dtype]
    return Truth(
        shape=shape,
        cases=C,
        holder_T=holder_T,
        case_T=case_T,
        ids_TK=torch.where(local_TK < 0, -1, (local_TK // e * C + case_T[:, None]) * e + local_TK % e),
        local_TK=local_TK,
        real_T=real_T,
        x_TD=x.masked_fill(~read_T1, float("nan")).to(dtype),
        w_TK=whole_TK.masked_fill(~kept_TK, float("nan")).to(torch.promote_types(dtype, torch.float32)),
        dy_TD=dy.to(dtype),
        kept_TK=kept_TK,
        counts_PCe=counts_CE.view(C, P, e).transpose(0, 1).long(),
        scale_PCe=scale_CE.view(C, P, e).transpose(0, 1).to(dtype),
        shift_PCeD=shift_CED.view(C, P, e, D).transpose(0, 1).to(dtype),
        y_TD=gain_T1 * x + (A_TE[..., None] * shift_TED).sum(1),
        dx_TD=gain_T1 * dy,
        dw_TK=gradient_TE.gather(1, column_TK).masked_fill(~kept_TK, 0),
    )


def _slots(rows: Iterable[tuple[tuple[int, ...], ...]]) -> Tensor:
    return torch.tensor(list(chain.from_iterable(chain.from_iterable(rows))), dtype=torch.int64)
