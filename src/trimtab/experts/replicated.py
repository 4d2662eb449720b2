"""Experts of other ranks, computed here for one call: replicas of their weights come in, and their gradients go home.

    forward     (home weights, x) -> (home weights, replicas, x)        replicas by the map C over the ranks' experts
    backward    home gradient += C^T gradients of replicas, then that of x

One autograd function has both, so that on every rank, replicas or none, weights' gradients are at home before the rows'
gradients leave, by data dependency. A replica is no parameter: hooks, norms, optimizers and reductions see the home
alone, once, and complete. Frozen weights and codes go out and nothing of them comes back; adapters go with experts.

Legend: e experts at home, n replicas on this rank, M rows, K slots per row, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.autograd import eager_backward, needed
from trimtab.errors import ConfigError
from trimtab.experts.adapters import Adapters, Pair
from trimtab.experts.expert_call import ExpertWeights
from trimtab.experts.grouped_module import GroupedModule
from trimtab.experts.quantized import Codes
from trimtab.experts.weight_grad import MainGradMode, WeightGradient

Run = Callable[[ExpertWeights, Tensor, Tensor, Tensor, int | None], Tensor]
"""(weights, x [M, D], ids [M, K], routing weights [M, K], slots at most) -> y [M, D]; ids of no expert are dropped."""
Empty = Callable[..., Tensor]
"""As `torch.empty_like(tensor, dtype=...)`."""


class Replicas(Protocol):
    """The way of one call's weights over the expert group. Both methods are collectives.

    number: n. num_home_slots, num_slots: kept slots of the experts at home and of the replicas, where known.
    """

    @property
    def number(self) -> int: ...

    @property
    def num_home_slots(self) -> int | None: ...

    @property
    def num_slots(self) -> int | None: ...

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Of the experts at home, [e, *] each -> of the replicas here, [n, *] each, contiguous."""

    def add_home(self, replicas: Sequence[Tensor], into: Sequence[Tensor], then: Sequence[Tensor] = ()) -> None:
        """What is there of the replicas, [n, *] each, is added in place to `into`, [e, *] each, where they are at home,
        in the order of ranks. then: outlines [0, *] of the rows whose gradients leave next in this call."""


def check_replicable(experts: GroupedModule, layer: str = "") -> None:
    """Raises ConfigError where experts have what replicas for one call cannot have."""
    for name, has in (("delay_wgrad", experts.delay_wgrad), ("a recipe", experts.recipe is not None)):
        if has:
            raise ConfigError(
                f"experts with {name} are not replicated: a replica lives for one call, and could not keep what that "
                "keeps. Leave one of the two out",
                layer=layer, phase="experts",
            )  # fmt: skip


def run_with_replicas(
    run: Run, weights: ExpertWeights, x_MD: Tensor, ids_MK: Tensor, w_MK: Tensor, replicas: Replicas, *,
    main_grad: MainGradMode = "off", empty_like: Empty = torch.empty_like, num_slots: int | None = None,
) -> Tensor:  # fmt: skip
    """`run` on the experts at home, ids 0 .. e - 1, plus `run` on the replicas, ids e .. e + n - 1. Collective,
    whatever this rank has.

    main_grad: where the gradients of up and down go. Those of replicas are made in its dtype, by `empty_like`.
    num_slots: a bound for each of both, where `replicas` does not know those of the rows.

    Which tensors are trained, and what a backward is asked for, must be the same on every rank.
    """
    home, of_others, x_MD = with_replicas(weights, x_MD, replicas, main_grad, empty_like)
    of_home = replicas.num_home_slots if num_slots is None else num_slots
    y = run(home, x_MD, ids_MK, w_MK, of_home)
    if not replicas.number:
        return y
    of_replicas = replicas.num_slots if num_slots is None else num_slots
    return y.add_(run(of_others, x_MD, ids_MK - weights.down.shape[0], w_MK, of_replicas))


def with_replicas(
    weights: ExpertWeights, x_MD: Tensor, replicas: Replicas, main_grad: MainGradMode = "off",
    empty_like: Empty = torch.empty_like,
) -> tuple[ExpertWeights, ExpertWeights, Tensor]:  # fmt: skip
    """The weights at home, those of the replicas, and the rows, tied. Collective.

    Neither of the weights keeps memory alive for a backward that autograd does not save: under recomputation replicas
    are gone between forward and backward.
    """
    parts = _parts(weights)
    experts = weights.down.shape[0]
    moved = [i for i, part in enumerate(parts) if part is not None and part.shape[0] == experts]  # no shared adapter
    trained = [i for i in moved if torch.is_grad_enabled() and parts[i].requires_grad]
    fused = [i for i in trained if i < 2 and main_grad != "off"]
    call = _Call(replicas=replicas, parts=parts, moved=moved, trained=trained)
    home, copies, x_MD = _tie(call, x_MD)
    owners = [_outline(copy, i in trained) for i, copy in enumerate(copies[:4])]
    for i in fused:
        main = call.fused[trained.index(i)] = _OfCopies(parts[i], owners[i], main_grad, empty_like)
        main.offer()
    call.forget()
    return _rebuilt(weights, home, parts[:4]), _rebuilt(weights, copies, owners), x_MD


def tied(weights: Sequence[Tensor], x_MD: Tensor, replicas: Replicas) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """As `with_replicas`, for experts of others, whose weights are any tensors [e, *]."""
    trained = [i for i, weight in enumerate(weights) if torch.is_grad_enabled() and weight.requires_grad]
    call = _Call(replicas=replicas, parts=list(weights), moved=list(range(len(weights))), trained=trained)
    found = _tie(call, x_MD)
    call.forget()
    return found


def _tie(call: _Call, x_MD: Tensor) -> tuple[list[Any], list[Any], Tensor]:
    """The call's parts at home, those of the replicas, and the rows."""
    home, copied, trained = list(call.parts), list(call.parts), call.trained
    if trained:
        x_MD, *made = _Tied.apply(call, x_MD, *(call.parts[i] for i in trained))  # type: ignore[no-untyped-call]
        for i, own, copy in zip(trained, made[: len(trained)], made[len(trained) :], strict=True):
            home[i], copied[i] = own, copy
    else:
        call.send()
    for i, copy in call.frozen.items():
        copied[i] = copy
    return home, copied, x_MD


def _parts(weights: ExpertWeights) -> list[Any]:
    """All tensors, None where there is none: up, down, their biases; the pairs of up and of down; the codes' scales."""
    pairs, codes = weights.adapters or Adapters(), weights.codes
    thin = [t for pair in (pairs.up, pairs.down) for t in ((None, None) if pair is None else (pair.a, pair.b))]
    return [*weights.each, *thin, *((None, None) if codes is None else (codes.up, codes.down))]


def _rebuilt(weights: ExpertWeights, parts: Sequence[Any], owners: Sequence[Tensor | None]) -> ExpertWeights:
    """Weights of other tensors, in the order of `_parts`."""
    up, down, up_bias, down_bias, up_a, up_b, down_a, down_b, of_up, of_down = parts

    def pair(old: Pair | None, a: Any, b: Any) -> Pair | None:
        return None if old is None else replace(old, a=a, b=b)

    adapters, codes = weights.adapters, weights.codes
    if adapters is not None:
        adapters = replace(adapters, up=pair(adapters.up, up_a, up_b), down=pair(adapters.down, down_a, down_b))
    if codes is not None:
        codes = Codes(format=codes.format, up=of_up, down=of_down, dtype=codes.dtype)
    return replace(
        weights, up=up, down=down, up_bias=up_bias, down_bias=down_bias, adapters=adapters, codes=codes,
        owners=tuple(owners),
    )  # fmt: skip


def _outline(copy: Tensor | None, trained: bool) -> Tensor | None:
    """A tensor like `copy` with memory for one value: what a gradient must know of it, and may keep."""
    return None if copy is None else copy.new_zeros(()).expand(copy.shape).requires_grad_(trained)


@dataclass(eq=False)
class _OfCopies:
    """The gradient of replicas of a weight whose own goes into `main_grad`: in its dtype, made when a backward asks.

    owner: the weight at home. outline: of its replicas, at which the gradient is left.
    """

    owner: Tensor
    outline: Any
    mode: MainGradMode
    empty_like: Empty

    def offer(self) -> None:
        """Be asked, as parameters whose buffers are made by somebody else are."""
        self.outline.__fsdp_param__, self.outline.overwrite_main_grad = True, True
        self.outline.get_main_grad = self._made

    def _made(self) -> Tensor:
        return self.empty_like(self.outline, dtype=self.home().dtype)

    def home(self) -> Tensor:
        """The owner's `main_grad`."""
        return WeightGradient(self.owner, self.mode, "weight").buffer

    def take(self) -> Tensor:
        """The replicas' gradient, which is forgotten here."""
        found: Tensor | None = self.outline.__dict__.pop("main_grad", None)
        return self._made() if found is None else found


class _Call:
    """What is not differentiated. moved, trained: which of `parts` have replicas, and whose replicas have gradients.

    frozen: the others' replicas, by place. fused: for each trained one, where its `main_grad` is.
    """

    def __init__(self, replicas: Replicas, parts: list[Any], moved: list[int], trained: list[int]) -> None:
        self.replicas, self.parts, self.moved, self.trained = replicas, parts, moved, trained
        self.frozen: dict[int, Tensor] = {}
        self.fused: list[_OfCopies | None] = [None] * len(trained)

    def send(self) -> list[Tensor]:
        """The replicas of what is trained."""
        made = self.replicas.send([self.parts[i].detach() for i in self.moved])
        by_place = dict(zip(self.moved, made, strict=True))
        trained = [by_place.pop(i) for i in self.trained]
        self.frozen = by_place
        return trained

    def forget(self) -> None:
        """What a backward does not need: the memory of replicas is autograd's to keep, or a checkpoint's to free."""
        self.parts, self.frozen = [], {}


class _Tied(Function):
    """(x, trained weights at home) -> (x, the same weights, their replicas).

    behind: for each output, the input that its gradient goes on to.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, *home: Tensor) -> tuple[Tensor, ...]:
        inputs = range(2, 2 + len(home))
        ctx.call, ctx.behind, ctx.rows = call, (1, *inputs, *inputs), x.new_empty(0, *x.shape[1:])
        ctx.set_materialize_grads(False)
        return x.view_as(x), *(weight.view_as(weight) for weight in home), *call.send()

    @staticmethod
    @eager_backward
    def backward(ctx: Any, dx: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        _, want_rows, *wanted = needed(ctx)
        d_home, d_copies = grads[: len(wanted)], grads[len(wanted) :]
        replicas: list[Tensor] = []
        into: list[Tensor] = []
        for want, fused, d_own, d_copy in zip(wanted, call.fused, d_home, d_copies, strict=True):
            if want and fused is not None:
                replicas.append(fused.take())
                into.append(fused.home())
            elif want:
                assert d_own is not None
                replicas.append(d_own.new_empty(0, *d_own.shape[1:]) if d_copy is None else d_copy)
                into.append(d_own)
        if into:
            call.replicas.add_home(replicas, into, [ctx.rows] * want_rows)
        return None, dx, *(d if want else None for want, d in zip(wanted, d_home, strict=True))
