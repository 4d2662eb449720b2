"""The plans: P = SpreadExperts . Exchange . SpreadRanks, as indices. Built once per layer call, immutable.

    SpreadRanks    T tokens -> M rows, one per (token, rank that owns one of its experts), grouped by rank
    Exchange       M rows -> M' rows on those ranks                                    (the transports)
    SpreadExperts  M' rows -> R rows, one per kept (row, slot), grouped by local expert, segments aligned

Both groupings are one stable sort of narrow keys over the slots; nothing of size T x E or T x P is made. A slot
that is dropped (id -1, or a masked token) gets the key behind the last group and so falls off the end: there is
no other treatment of it. A stable sort leaves the slots of one token adjacent within a rank, so the rows of a
rank are the places where the token changes.

The transpose of either stage is a sum over bags (CSR): bag t of `token_csr` lists the rows of token t.

Legend: T local tokens, K experts per token, N = T * K slots, P ranks, M rows sent, R expert rows (with padding),
E experts, e local experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.errors import ConfigError, InputError
from trimtab.kernels.compiled import CompiledKernels
from trimtab.kernels.memory import no_values
from trimtab.kernels.rows import Csr
from trimtab.kernels.slot_places import SlotPlaces
from trimtab.layout import ALIGNMENTS
from trimtab.routing.ids import wide_ids


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """SpreadRanks for one call on one rank.

    row_token_M: [M] token of each row; rows are grouped by rank, in token order within a rank.
    token_csr: T bags over the M rows, the ranks of a token in the order of its slots.
    slot_csr: T bags over the kept slots grouped by (rank, token, k), the order in which slots come back; or None.
    """

    row_token_M: Tensor
    token_csr: Csr
    slot_csr: Csr | None


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """SpreadExperts for the rows that one rank holds.

    slot_R: [R] slot (row * K + k) of each expert row, grouped by expert, in slot order within one; -1 in padding.
    row_R: [R] row of each expert row; -1 in padding.
    row_csr: one bag per row over the R expert rows, in the order of k.
    counts_e: [e] kept slots per local expert.
    offsets_e: [e + 1] start of each expert's segment and the end of the last; multiples of the alignment, if any.
    top_k: K.
    """

    slot_R: Tensor
    row_R: Tensor
    row_csr: Csr
    counts_e: Tensor
    offsets_e: Tensor
    top_k: int

    @classmethod
    def of(cls, places: SlotPlaces, top_k: int) -> ExpertPlan:
        """As kernels placed the slots."""
        bags = Csr(indices=places.bag_index, indptr=places.bag_offsets)
        return cls(
            slot_R=places.slot_R, row_R=places.row_R, row_csr=bags, counts_e=places.counts_e,
            offsets_e=places.offsets_e, top_k=top_k,
        )  # fmt: skip


def narrow(key_N: Tensor, groups: int) -> Tensor:
    """Sort keys 0..groups in the narrowest dtype that holds them: radix sorts cost by the byte."""
    return key_N.to(torch.int16 if groups < 2**15 else torch.int32)


def inverse_of(order_N: Tensor) -> Tensor:
    """The inverse of a permutation [N]."""
    return torch.empty_like(order_N).scatter_(0, order_N, torch.arange(order_N.shape[0], device=order_N.device))


def static_by_default(t: Tensor) -> bool:
    """Whether sizes must not depend on what `t` holds."""
    return t.device.type != "cpu" or torch.compiler.is_compiling() or no_values(t.device)


def compact(values_N: Tensor, keep_N: Tensor, size: int | None = None, *, static: bool | None = None) -> Tensor:
    """The kept values in order.

    Static (the default on a device and under `torch.compile`): nothing is read back to the host, so the result has
    `size` elements, the number of kept values where it is known and N where it is not, filled up with zeros.
    """
    if not (static_by_default(values_N) if static is None else static):
        return values_N[keep_N]
    n = values_N.shape[0] if size is None else size
    place_N = torch.where(keep_N, keep_N.cumsum(0) - 1, n).clamp_(max=n)
    return values_N.new_zeros(n + 1).scatter_(0, place_N, values_N)[:n]


def csr_of(rows_N: Tensor, keep_N: Tensor, bags: int, size: int | None = None, *, static: bool | None = None) -> Csr:
    """Csr from slot-ordered row numbers: slots are dealt to `bags` equal runs, those not kept are left out."""
    kept_per_bag = keep_N.view(bags, rows_N.shape[0] // max(bags, 1)).sum(1)
    offsets = torch.zeros(bags + 1, dtype=torch.int64, device=rows_N.device)
    torch.cumsum(kept_per_bag, 0, out=offsets[1:])
    return Csr(indices=compact(rows_N, keep_N, size, static=static), indptr=offsets)


@dataclass(frozen=True, kw_only=True)
class RankSort:
    """The part of a `RankPlan` that needs no count from the host: what is sent to be counted, and the sort.

    rows_P, slots_P: [P] int64 rows and kept slots for each rank.
    """

    rows_P: Tensor
    slots_P: Tensor
    order_N: Tensor
    token_N: Tensor
    row_N: Tensor
    new_row_N: Tensor
    kept_N: Tensor
    tokens: int


def sort_by_rank(ids_TK: Tensor, experts_per_rank: int, ranks: int) -> RankSort:
    """Group the slots of `ids_TK` [T, K] (global expert ids, negative = dropped) by the rank that owns them."""
    tokens, top_k = ids_TK.shape
    ids_N = ids_TK.reshape(-1)
    kept_N = ids_N >= 0
    key_N = torch.where(kept_N, ids_N.div(experts_per_rank, rounding_mode="floor"), ranks)
    sorted_key_N, order_N = torch.sort(narrow(key_N, ranks), stable=True)
    # Each sorted slot's token: looked up, for a division of 64-bit integers takes ten times as long.
    token_N = torch.arange(tokens, device=ids_N.device)[:, None].expand(tokens, top_k).reshape(-1)
    sorted_token_N = token_N.index_select(0, order_N)
    # A row begins where the token or the rank changes; -1 differs from every token.
    before = torch.full((1,), -1, dtype=torch.int64, device=ids_N.device)
    new_row_N = sorted_token_N != torch.cat((before, sorted_token_N))[:-1]
    new_row_N |= sorted_key_N != torch.cat((before.to(sorted_key_N.dtype), sorted_key_N))[:-1]
    new_row_N &= sorted_key_N < ranks
    rows_N = new_row_N.cumsum(0)
    # Where each rank's slots begin, and how many rows lie before.
    cuts_P1 = torch.searchsorted(sorted_key_N, torch.arange(ranks + 1, device=ids_N.device, dtype=sorted_key_N.dtype))
    rows_before_P1 = torch.cat((before + 1, rows_N)).index_select(0, cuts_P1)
    return RankSort(
        rows_P=rows_before_P1.diff(),
        slots_P=cuts_P1.diff(),
        order_N=order_N,
        token_N=sorted_token_N,
        row_N=rows_N - 1,
        new_row_N=new_row_N,
        kept_N=kept_N,
        tokens=tokens,
    )


def plan_ranks(sort: RankSort, num_rows: int, num_slots: int, *, ordered: bool = True) -> RankPlan:
    """The `RankPlan` of a sort, once the host knows how many rows and kept slots leave this rank.

    ordered: whether slots come back one by one, so that `slot_csr` are needed.
    """
    order_N = sort.order_N
    first_N = torch.empty_like(sort.new_row_N).scatter_(0, order_N, sort.new_row_N)
    slot_row_N = torch.empty_like(sort.row_N).scatter_(0, order_N, sort.row_N)
    return RankPlan(
        row_token_M=compact(sort.token_N, sort.new_row_N, num_rows),
        token_csr=csr_of(slot_row_N, first_N, sort.tokens, num_rows),
        slot_csr=csr_of(inverse_of(order_N), sort.kept_N, sort.tokens, num_slots) if ordered else None,
    )


def _in_memory(t: Tensor) -> bool:
    """Whether its values lie where the host can read them: no subclass, nothing fake, nothing on a device."""
    return type(t) is Tensor and type(t.new_empty(0)) is Tensor and t.device.type == "cpu"


def plan_experts(
    ids_MK: Tensor,
    num_experts: int,
    *,
    alignment: int = 1,
    num_slots: int | None = None,
    static: bool | None = None,
    kernels: object = None,
) -> ExpertPlan:
    """Group the slots of `ids_MK` [M, K] by local expert.

    Ids outside 0..num_experts - 1 are dropped: -1 and the sentinel `num_experts` of other libraries alike.
    `num_slots` is the number of kept slots, or a bound of it, where the caller knows one. Without it a static plan (the
    default on a device, of tensors without values and under `torch.compile`: nothing is read back) takes the bound N
    (+ padding); its expert rows beyond offsets_e[-1] are padding too.
    `kernels`: those that the plan is for, if they are known; the compiled ones make it themselves.

    Raises:
        ConfigError: no such alignment.
        InputError: more slots are kept than `num_slots`; a static plan does not see it.
    """
    if alignment not in ALIGNMENTS:
        raise ConfigError(f"alignment {alignment} is not one of {ALIGNMENTS}")
    ids_MK = wide_ids(ids_MK)
    rows, top_k = ids_MK.shape
    static = static_by_default(ids_MK) if static is None else static
    if isinstance(kernels, CompiledKernels) and not static and _in_memory(ids_MK):
        places = kernels.place_slots(ids_MK, num_experts, alignment)
        _check_slots(num_slots, places.bag_index.shape[0])
        return ExpertPlan.of(places, top_k)
    ids_N = ids_MK.reshape(-1)
    kept_N = (ids_N >= 0) & (ids_N < num_experts)
    key_N = torch.where(kept_N, ids_N, num_experts)
    order_N = torch.argsort(narrow(key_N, num_experts), stable=True)
    counts_e = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids_N.device)
    counts_e = counts_e.scatter_add(0, key_N.long(), torch.ones_like(order_N))[:num_experts]
    aligned_e = (counts_e + alignment - 1).div(alignment, rounding_mode="floor") * alignment
    offsets_e = torch.nn.functional.pad(aligned_e.cumsum(0), (1, 0))
    # An aligned segment starts later than a dense one by the padding of the experts before it.
    shift_e = offsets_e[:-1] - (counts_e.cumsum(0) - counts_e)
    place_N = inverse_of(order_N) + shift_e[key_N.clamp(max=num_experts - 1).long()]
    bound = (ids_N.shape[0] if num_slots is None else num_slots) + num_experts * (alignment - 1)
    total = bound if static else int(offsets_e[-1])
    slot_R = order_N.new_full((total + 1,), -1)
    slots_N = torch.arange(ids_N.shape[0], device=ids_N.device)
    slot_R = slot_R.scatter_(0, torch.where(kept_N, place_N, total), slots_N)[:total]
    row_R = slot_R.div(max(top_k, 1), rounding_mode="floor")
    row_csr = csr_of(place_N, kept_N, rows, num_slots, static=static)
    if not static:
        _check_slots(num_slots, row_csr.indices.shape[0])
    return ExpertPlan(
        slot_R=slot_R,
        row_R=row_R,
        row_csr=row_csr,
        counts_e=counts_e,
        offsets_e=offsets_e,
        top_k=top_k,
    )


def _check_slots(num_slots: int | None, kept: int) -> None:
    if num_slots is not None and kept > num_slots:
        raise InputError(f"num_slots is {num_slots}, but {kept} slots are kept", phase="experts")
