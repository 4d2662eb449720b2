"""One grouped product as a function: differentiable, its weight's gradients wherever they are to go.

    y[segment i] = x[segment i] W_i^T + b_i + scale * (x[segment i] a_i^T) b_i^T

Where autograd comes between products (a function of one's own, a norm) and for grouped linears; the expert MLP is one
function over two products, see `passes`.

Legend: S rows in segments, M rows before they are gathered, e groups, r rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trimtab.autograd import forward_of, functions_of, needed, without_autocast
from trimtab.experts import product_ops
from trimtab.experts.activations import activate
from trimtab.experts.lora import filled, seed_of
from trimtab.experts.plan import ExpertPlan
from trimtab.experts.segments import FromExperts
from trimtab.experts.weight import GroupedWeight
from trimtab.experts.weight_grad import (
    ORDINARY,
    Defer,
    Gradients,
    GradSink,
    Sink,
    WgradJob,
    handed,
    kinds_of,
    unchanged,
)
from trimtab.kernels.api import Backend
from trimtab.kernels.choose import name_of
from trimtab.kernels.rows import combine_rows, gather_padded

if TYPE_CHECKING:
    from trimtab.experts.low_precision import LowPrecisionProducts

RowFunction = Callable[[Tensor], Tensor]


def grouped_product(
    x: Tensor, weight: GroupedWeight, offsets_e: Tensor, *, plan: ExpertPlan | None = None,
    kernels: Backend | str = "auto", sink: GradSink = ORDINARY, low_precision: LowPrecisionProducts | None = None,
    name: str = "weight",
) -> Tensor:  # fmt: skip
    """The products of each group's rows: [S, out] in x's dtype. Differentiable in x and the weight's tensors, once.

    Every gradient has its tensor's full shape, zeros for a group without rows. Rows from offsets_e[-1] on may hold
    anything: their output is zero and so is their gradient. S may be 0. Autocast is not heeded.

    Args:
        x: [S, in], the groups' rows one after the other, in the dtype that is computed in; with `plan` [M, in].
        weight: in the parameters' own dtype, and so are its gradients.
        offsets_e: [e + 1] int64 on x's device, the start of each group's segment and the end of the last. Not read on
            the host but by kernels that run on the CPU, and by torch for other dtypes than bfloat16.
        plan: gathers rows for the product, and again for the weight's gradient: x is what is kept.
        kernels: those of a `KernelChoice`, or their names joined by commas, which `torch.compile` can trace.
        sink: where the weight's gradients go.
        low_precision: a recipe's products, made for this call, whose segments `offsets_e` are.
        name: what errors call the weight.
    """
    weight = filled(weight)
    tensors = weight.tensors()
    named, owner = (kernels, None) if isinstance(kernels, str) else (name_of(kernels), kernels)
    call = Call(
        plan, named, owner, weight.form, len(weight.values), len(tensors), weight.lora is not None,
        torch.is_grad_enabled(), sink, low_precision, name,
    )  # fmt: skip
    call.trained = [t.requires_grad for t in tensors]
    kind = _Grouped
    if not sink.ordinary or low_precision is not None:
        kind, call.owned = _GroupedWithState, tensors
    with without_autocast():
        y: Tensor = forward_of(kind, call, x.contiguous(), offsets_e, seed_of(weight), *handed(tensors, sink, x))
    return y


@dataclass(slots=True, eq=False)
class Call:
    """What is not differentiated.

    kernels: by name, which stands for them as long as they live; owner: keeps those alive that were given. values,
    count: tensors of the weight, the values first. keep: whether a backward may come. label: what errors call the
    weight. owned: the tensors themselves, where their attributes say where gradients go; else what autograd saves is
    all that lives, which a checkpoint may free. trained: which of them wanted a gradient when the call was made; later
    they may not say so.
    """

    plan: ExpertPlan | None
    kernels: str
    owner: Backend | None
    form: str
    values: int
    count: int
    adapted: bool
    keep: bool
    sink: GradSink
    low_precision: LowPrecisionProducts | None
    label: str
    owned: Sequence[Tensor] | None = None
    trained: Sequence[bool] = ()

    def rows(self, x: Tensor) -> Tensor:
        return x if self.plan is None else gather_padded(x, self.plan.row_R)

    def reads_rows(self, wanted: Sequence[bool]) -> bool:
        """Whether gradients are made of rows: those of values, and of an adapter's a."""
        return any(wanted[: self.values]) or (self.adapted and bool(wanted[-2]))

    def gradients(self, tensors: Sequence[Tensor], wanted: Sequence[bool]) -> Gradients:
        kinds = kinds_of(self.form, self.label)
        return Gradients(self.owned or tensors, kinds, wanted, self.sink.main_grad, torch.empty_like)


def _forward(ctx: Any, *given: Any) -> Tensor:
    """What is saved is the parameters, not what was made of them in x's dtype: others may want the memory (FSDP2).

    given: the call, x, offsets_e, the seed and the tensors; see `mlp._forward`."""
    call, x, offsets_e, seed, *inputs = given
    tensors, low = inputs[: call.count], call.low_precision
    rows, reads = call.rows(x), (list(tensors), low.offsets_e if low else offsets_e, seed, call.form, call.kernels)
    kept: Sequence[Tensor] = (x,) if call.keep and call.reads_rows(call.trained) else ()
    y: Tensor
    if low is None:
        y, *u = product_ops.product_op(rows, *reads, call.keep)
    else:
        y, *u = product_ops.run_forward(product_ops.product_of(rows, *reads, low), rows, call.keep)
        if kept and not call.adapted:  # one byte a value in place of the rows
            kept = low.keep(rows, "activation")
    ctx.call, ctx.adapted = call, len(u)
    ctx.save_for_backward(None if low else offsets_e, seed, *tensors, *u, *kept)
    return y


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    call: Call = ctx.call
    _, need_x, _, _, *needs = needed(ctx)
    offsets_e, seed, *rest = ctx.saved_tensors
    tensors, (*u,), kept = (
        rest[: call.count], rest[call.count : call.count + ctx.adapted], rest[call.count + ctx.adapted :],
    )  # fmt: skip
    later, low = call.sink.defer, call.low_precision
    wanted = needs if later is None else call.trained
    d, of_u = dy.contiguous(), next(iter(u), None)
    need_v = call.adapted and bool(wanted[-2])
    found: Sequence[Tensor | None] = [None] * len(needs)
    weight = (list(tensors), low.offsets_e if low else offsets_e, seed, call.form, call.kernels)
    if low is None:
        made = product_ops.product_back_op(d, *weight, need_x, need_v) if need_x or need_v else []
        v = made[-1] if need_v else None
        reads = [*kept, *([d] if any(wanted) else [])]

        def write(*buffers: Any) -> None:
            rows = call.rows(kept[0]) if call.reads_rows(wanted) else None
            product_ops.product_gradients_op(*buffers, rows, d, of_u, v, *weight)
    else:
        p, reads = product_ops.product_of(d, *weight, low), []  # what it makes now: scales belong to this step
        p.u = of_u
        made = product_ops.run_back(p, d, need_x, need_v)
        p.waits, p.sink = [], Sink(wanted)
        rows = tuple(kept) if not call.adapted or not kept else call.rows(kept[0])
        product_ops.run_gradients(p, rows, d, made[-1] if need_v else None)

        def write(*buffers: Any) -> None:
            assert p.sink is not None
            p.sink.fill(buffers[0], buffers[2])
            while p.waits:
                p.waits.pop(0)()

    def job(close: Callable[[Gradients], Any]) -> Any:
        grads = call.gradients(tensors, wanted)
        write(*grads.buffers())
        return close(grads)

    dx = made[0] if need_x else None
    if dx is not None and call.plan is not None:
        dx = combine_rows(dx, call.plan.row_csr)
    if later is not None:
        later(lambda: job(Gradients.deliver), reads)
    elif any(wanted):
        found = job(Gradients.close)
    return None, dx, None, None, *found


_Grouped, _GroupedWithState = functions_of("_Grouped", _forward, _backward)


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
