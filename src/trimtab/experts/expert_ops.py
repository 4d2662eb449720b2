"""The expert MLP as operators of `torch.library`: eager mode, graphs, tensors without values, FLOP counters see these.

    trimtab::experts             y, and what is kept    from x, the routing weights and the weights' tensors
    trimtab::experts_backward    dx, dw, and the tensors' gradients, or d_pre where these come later
    trimtab::experts_gradients   the tensors' gradients, later

up, down: `GroupedWeight.tensors()` of each, with their `form`. Each hands a `Pass` to the first backend that covers it.

Legend: M rows, K slots per row, R expert rows, D model dim, I width of the pre-activations, r rank of an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trimtab.autograd import without_autocast
from trimtab.experts.plan import ExpertPlan
from trimtab.experts.weight import GroupedWeight, gradient_flops, row_flops
from trimtab.kernels.choose import kernels_of
from trimtab.operators import operator

if TYPE_CHECKING:
    from trimtab.experts.passes import Pass

READS = (
    "Tensor x, Tensor w, Tensor[] up, Tensor[] down, Tensor[] plan, Tensor? seed, str activation, str up_form, "
    "str down_form, str kernels"
)
WRITES = "Tensor(a!)[] out, bool[] wanted, bool[] adds"


def pass_of(
    x: Tensor, w: Tensor, up: Sequence[Tensor], down: Sequence[Tensor], plan: Sequence[Tensor], seed: Tensor | None,
    word: str, up_form: str, down_form: str, kernels: str,
) -> Pass:  # fmt: skip
    """From what all three operators read. What computes is loaded when it does."""
    from trimtab.experts.passes import Pass

    of = GroupedWeight.of
    chosen = kernels_of(kernels, x.device, x.dtype)
    return Pass(x, w, of(up, up_form), of(down, down_form), word, ExpertPlan(*plan), chosen, seed)


def backend_of(p: Pass, later: bool = False) -> Any:
    """The module that computes it: the first that covers it. later: weight gradients come in a call of their own."""
    if p.kernels.name == "cpu":
        from trimtab.experts import on_cpu

        if on_cpu.covers(p):
            return on_cpu
    if p.kernels.name == "triton" and not later:
        from trimtab.experts import on_triton

        if on_triton.covers(p):
            return on_triton
    from trimtab.experts import passes

    return passes


def _forward(*args: Any) -> list[Tensor]:
    *reads, keep = args
    p = pass_of(*reads)
    with without_autocast():
        u = p.keep_u() if keep and (p.up.lora or p.down.lora) else []
        y, pre = backend_of(p).forward(p, keep)
    return [y, pre, *u] if keep else [y]


def _forward_fake(x: Tensor, w: Tensor, up: Sequence[Tensor], down: Any, plan: Any, *rest: Any) -> list[Tensor]:
    *_, up_form, down_form, _, keep = rest
    y = x.new_empty(x.shape)
    if not keep:
        return [y]
    both, rows = [GroupedWeight.of(up, up_form), GroupedWeight.of(down, down_form)], plan[0].shape[0]
    thin = [x.new_empty(rows, weight.lora.rank) for weight in both if weight.lora is not None]
    return [y, x.new_empty(rows, both[0].outs), *thin]


def _backward(
    dy: Tensor, kept: Sequence[Tensor], out: Any, wanted: Any, adds: Any, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *reads, need_x, later = args
    p = pass_of(*reads)
    pre, *u = kept
    p.u = p.placed(u)
    d_pre = p.kernels.empty_like(pre) if later else None
    if later:
        p.v = p.placed(out)
    else:
        p.write_to(out, wanted, adds)
    with without_autocast():
        dx, dw = backend_of(p, later).backward(p, dy, pre, need_x, d_pre)
    nothing = p.x.new_empty(0)
    return nothing if dx is None else dx, dw, nothing if d_pre is None else d_pre


def _backward_fake(
    dy: Tensor, kept: Sequence[Tensor], out: Any, wanted: Any, adds: Any, x: Tensor, w: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, need_x, later = rest
    pre = kept[0]
    return x.new_empty(x.shape if need_x else 0), w.new_empty(w.shape), pre.new_empty(pre.shape if later else 0)


def _gradients(dy: Tensor, kept: Sequence[Tensor], out: Any, wanted: Any, adds: Any, *reads: Any) -> None:
    p = pass_of(*reads)
    pre, *thin = kept
    count = len(thin) // 2  # u, then d_pre, then v
    p.u, p.v = p.placed(thin[:count]), p.placed(thin[count + 1 :])
    p.write_to(out, wanted, adds)
    backend_of(p, later=True).gradients(p, dy, pre, thin[count])


def _forward_flops(x: Any, w: Any, up: Any, down: Any, plan: Any, *rest: Any, **kwargs: Any) -> int:
    _, _, up_form, down_form, *_ = rest
    each = sum(row_flops(up, up_form)) + sum(row_flops(down, down_form))
    return 2 * int(plan[0][0]) * each


def _backward_flops(dy: Any, kept: Any, out: Any, wanted: Any, adds: Any, *args: Any, **kwargs: Any) -> int:
    _, _, up, down, plan, _, _, up_form, down_form, _, need_x, _ = args
    down_back, up_back = sum(row_flops(down, down_form)), sum(row_flops(up, up_form)) if need_x else 0
    return 2 * int(plan[0][0]) * (down_back + up_back) + _gradients_flops(dy, kept, out, wanted, adds, *args)


def _gradients_flops(dy: Any, kept: Any, out: Any, wanted: Any, adds: Any, *args: Any, **kwargs: Any) -> int:
    _, _, up, down, plan, _, _, up_form, down_form, *_ = args
    of_up, of_down = wanted[: len(up)], wanted[len(up) :]
    return 2 * int(plan[0][0]) * (gradient_flops(up, up_form, of_up) + gradient_flops(down, down_form, of_down))


experts_op = operator(f"experts({READS}, bool keep) -> Tensor[]", _forward, _forward_fake, _forward_flops)
"""y [M, D]; with `keep` also the pre-activations [R, I], and scale * x a^T [R, r] of each adapter. x in the dtype to
compute in, w float32 or wider."""

experts_backward_op = operator(
    f"experts_backward(Tensor dy, Tensor[] kept, {WRITES}, {READS}, bool need_x, bool later) "
    "-> (Tensor, Tensor, Tensor)",
    _backward, _backward_fake, _backward_flops,
)  # fmt: skip
"""dx, empty unless `need_x`; dw; and, with `later`, d_pre [R, I]. kept: what `experts` kept.

wanted: whether there is one of each tensor of up, then of down, in `out`. adds: of those in `out`, which are added to.
With `later` no gradient is made, and `out` takes scale * d b [R, r] of each adapter, which is wanted then.
"""

experts_gradients_op = operator(
    f"experts_gradients(Tensor dy, Tensor[] kept, {WRITES}, {READS}) -> ()",
    _gradients, lambda *args: None, _gradients_flops,
)  # fmt: skip
"""The tensors' gradients in `out`, from what `experts` kept and then what `experts_backward` left: d_pre, and scale *
d b of each adapter. Of the weights only shapes are read, which FSDP2 leaves when it takes their memory."""
