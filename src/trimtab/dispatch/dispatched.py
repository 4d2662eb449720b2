"""The rows of one layer call on the rank of their experts.

Legend: K experts per token, M' rows received, R kept slots received, D model dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.dispatch.route import DispatchSlots, Route, slots_of

if TYPE_CHECKING:
    from trimtab.dispatch.replication.route import ReplicaRoute


@dataclass(kw_only=True)
class Dispatched:
    """Input of a rank's experts, itself that of a small MoE layer, and the way home, of one layer call: any function
    that returns each row's weighted sum fits in between. With combine="ordered" a row per kept slot.

    x_MD: [M', D] in the tokens' dtype.
    ids_MK: [M', K] int local expert ids, -1 where a slot is not this rank's. [M', 1] with "ordered".
    weights_MK: [M', K] float32 (float64 for float64 tokens).
    num_slots: how many ids are not -1, or how many at most, where the host knows it.
    replicas: with replicated experts, the way of the weights; ids of replicas follow those of the rank's own experts.
    """

    x_MD: Tensor
    ids_MK: Tensor
    weights_MK: Tensor
    num_slots: int | None
    route: Route
    sent: Tensor
    slot_row_R: Tensor | None = None
    replicas: ReplicaRoute | None = None

    @property
    def known(self) -> dict[str, Any]:
        """Options of `ExpertMLP.forward` beside the rows; `replicas` where there are such, which other experts lack."""
        return {"num_slots": self.num_slots} | ({} if self.replicas is None else {"replicas": self.replicas})


def by_slot(rows: Dispatched) -> Dispatched:
    """One row per kept slot, which all come home."""
    slots, csr = slots_of(rows.ids_MK, rows.num_slots)
    row_R = slots.div(rows.ids_MK.shape[1], rounding_mode="floor")
    beyond = torch.arange(slots.shape[0], device=slots.device) >= csr.indptr[-1]
    return replace(
        rows,
        x_MD=DispatchSlots.apply(rows.x_MD, row_R, csr),  # type: ignore[no-untyped-call]
        ids_MK=rows.ids_MK.reshape(-1).index_select(0, slots).masked_fill(beyond, -1)[:, None],
        weights_MK=rows.weights_MK.reshape(-1).index_select(0, slots)[:, None],
        slot_row_R=row_R,
    )
