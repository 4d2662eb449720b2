"""The expert MLP with a function of one's own between its products, or a norm behind them, under ordinary autograd:

    gather -> grouped product -> function -> grouped product -> norm -> weighted sum

Every parameter that a function uses gets its gradient by autograd itself; what autograd saves for it is kept.

Legend: M rows, K slots per row, R expert rows, D model dim, I width of the pre-activations, F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trimtab.autograd import forward_of
from trimtab.experts.activations import activate
from trimtab.experts.expert_rows import FromExperts
from trimtab.experts.grad_sink import GradSink
from trimtab.experts.grouped_product import grouped_product
from trimtab.experts.plan import ExpertPlan
from trimtab.experts.weight import GroupedWeight
from trimtab.experts.weight_grad import Defer, WgradJob, unchanged
from trimtab.kernels.api import Backend

if TYPE_CHECKING:
    from trimtab.experts.low_precision import LowPrecisionProducts

RowFunction = Callable[[Tensor], Tensor]


def by_products(
    x_MD: Tensor, w_MK: Tensor, plan: ExpertPlan, up: GroupedWeight, down: GroupedWeight,
    activation: str | RowFunction, norm: RowFunction | None, kernels: Backend | str, sink: GradSink,
    low_precision: tuple[LowPrecisionProducts, LowPrecisionProducts] | None,
) -> Tensor:  # fmt: skip
    """As `expert_mlp`. The functions run under the autocast of the caller, on all expert rows at once."""
    low_up, low_down = low_precision or (None, None)
    together = None if sink.defer is None else DelayedTogether(sink.defer)
    each: dict[str, Any] = {"kernels": kernels, "sink": GradSink(sink.main_grad, together)}
    pre_RI = grouped_product(x_MD, up, plan.offsets_e, plan=plan, low_precision=low_up, name="up", **each)
    h_RF = activation(pre_RI) if callable(activation) else activate(pre_RI, activation)
    if low_down is not None:  # what a function makes of padding must not take part in a scale
        h_RF = h_RF.masked_fill(plan.slot_R[:, None] < 0, 0)
    h_RF = h_RF.to(x_MD.dtype)
    out_RD = grouped_product(h_RF, down, plan.offsets_e, low_precision=low_down, name="down", **each)
    y: Tensor = forward_of(FromExperts, out_RD if norm is None else norm(out_RD), w_MK, plan)
    if together is not None and y.requires_grad:
        y.register_hook(together.begin)  # type: ignore[no-untyped-call]
    return y


class DelayedTogether:
    """One job of what several functions of one call leave in a backward.

    Args:
        defer: takes it.
    """

    def __init__(self, defer: Defer) -> None:
        self._defer, self._jobs = defer, list[WgradJob]()

    def begin(self, dy: Tensor) -> None:
        """Called with the gradient of the call's result, before any of its functions."""
        jobs = self._jobs = []
        self._defer(lambda: [found for job in jobs for found in job()], ())

    def __call__(self, job: WgradJob, reads: Sequence[Tensor]) -> None:
        self._jobs.append(unchanged(job, reads))
