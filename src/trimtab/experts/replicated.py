"""Experts of other ranks, computed here for one call: replicas of their weights come in, and their gradients go home.

    forward     (home weights, x) -> (home weights, replicas, x)        replicas by the map C over the ranks' experts
    backward    home gradient += C^T gradients of replicas, then that of x

One autograd function has both, so that on every rank, replicas or none, weights' gradients are at home before the rows'
gradients leave, by data dependency. A replica is no parameter: hooks, norms, optimizers and reductions see the home
alone, once, and complete. A weight's tensors are moved, whatever they are: frozen ones go out and nothing of
them comes back, factors that all experts share stay.

Legend: e experts at home, n replicas on this rank, D model dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import Function

from trimtab.autograd import eager_backward, needed, not_in_graphs
from trimtab.errors import ConfigError
from trimtab.experts.grouped_module import GroupedModule
from trimtab.experts.weight import GroupedWeight, Weights
from trimtab.experts.weight_grad import MAIN_GRAD_NAMES, MainGradMode, WeightGradient


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
        """What is there of the replicas, [n, *] each, is added in place to `into`, [e, *] each and of the same dtype,
        where they are at home, in the order of ranks. then: outlines [0, *] of the rows whose gradients leave next in
        this call."""


def check_replicable(experts: GroupedModule, layer: str = "") -> None:
    """Raises ConfigError where experts have what replicas for one call cannot have."""
    for name, has in (("delay_wgrad", experts.delay_wgrad), ("a recipe", experts.recipe is not None)):
        if has:
            raise ConfigError(
                f"experts with {name} are not replicated: a replica lives for one call, and could not keep what that "
                "keeps. Leave one of the two out",
                layer=layer, phase="experts",
            )  # fmt: skip


def replicate(
    route: Replicas, x_MD: Tensor, up: GroupedWeight, down: GroupedWeight, main_grad: MainGradMode = "off"
) -> tuple[Tensor, Weights, Weights]:
    """The rows, tied; the weights at home, of ids 0 .. e - 1; those of the replicas, of ids e .. e + n - 1. Collective,
    whatever this rank has.

    main_grad: where the gradients of values go at home. Those of replicas are ordinary, and are added there.

    Which tensors are trained, and what a backward is asked for, must be the same on every rank.

    Raises:
        ConfigError: weights of one tensor for each expert.
    """
    if not (up.stacked and down.stacked):
        raise ConfigError("experts whose weights lie in a tensor each are not replicated", phase="experts")
    tensors, first = [*up.tensors(), *down.tensors()], len(up.tensors())
    values = [t for weight in (up, down) for t in weight.values] if main_grad != "off" else []
    moved = [i for i, t in enumerate(tensors) if t.shape[0] == up.groups]
    fused = [main_grad if any(tensors[i] is value for value in values) else "off" for i in moved]
    own, replicas, x_MD = tied([tensors[i] for i in moved], x_MD, route, fused)
    home, others = list(tensors), list(tensors)
    for i, here, copy in zip(moved, own, replicas, strict=True):
        home[i], others[i] = here, copy
    of_home, of_replicas = ((up.rebuilt(each[:first]), down.rebuilt(each[first:])) for each in (home, others))
    return x_MD, of_home, of_replicas


@not_in_graphs
def run_with_replicas(
    experts: Any, weights: Weights, x_MD: Tensor, ids_MK: Tensor, w_MK: Tensor, replicas: Replicas,
    num_slots: int | None = None,
) -> Tensor:  # fmt: skip
    """`run` of an `ExpertMLP` with the weights at home plus that with the replicas'. Collective.

    num_slots: a bound for each of both, where `replicas` does not know those of the rows.
    """
    check_replicable(experts)
    x_MD, home, others = replicate(replicas, x_MD, *weights, experts.main_grad)
    y: Tensor = experts.run(home, x_MD, ids_MK, w_MK, replicas.num_home_slots if num_slots is None else num_slots)
    if not replicas.number:
        return y
    bound = replicas.num_slots if num_slots is None else num_slots
    return y.add_(experts.run(others, x_MD, ids_MK - home[0].groups, w_MK, bound, "off"))


def tied(
    tensors: Sequence[Tensor], x_MD: Tensor, route: Replicas, main_grad: Sequence[MainGradMode] = ()
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """`replicate` of any tensors [e, *]: those at home, those of the replicas, and the rows. main_grad: of each."""
    modes = main_grad or ["off"] * len(tensors)
    trained = [i for i, t in enumerate(tensors) if torch.is_grad_enabled() and t.requires_grad]
    home, replicas = list(tensors), route.send([t.detach() for t in tensors])
    if not trained:
        return home, replicas, x_MD
    owners = [tensors[i] if modes[i] != "off" else None for i in trained]
    call = SimpleNamespace(route=route, replicas=[replicas[i] for i in trained], owners=owners)
    x_MD, *made = _Tied.apply(call, x_MD, *(tensors[i] for i in trained))  # type: ignore[no-untyped-call]
    call.replicas = []  # their memory is autograd's to keep, or a checkpoint's to free
    for place, i in enumerate(trained):
        home[i], replicas[i] = made[place], made[place + len(trained)]
        for name in MAIN_GRAD_NAMES if owners[place] is not None else ():
            if hasattr(tensors[i], name):
                setattr(home[i], name, getattr(tensors[i], name))
    return home, replicas, x_MD


class _Tied(Function):
    """(x, trained tensors at home) -> (x, the same tensors, their replicas).

    call: the route, the replicas of what is trained, and as `owners` the tensors at home whose gradient goes into
    `main_grad`, None for the others. behind: for each output, the input that its gradient goes on to.
    """

    @staticmethod
    def forward(ctx: Any, call: Any, x: Tensor, *home: Tensor) -> tuple[Tensor, ...]:
        inputs = range(2, 2 + len(home))
        ctx.call, ctx.behind, ctx.rows = call, (1, *inputs, *inputs), x.new_empty(0, *x.shape[1:])
        ctx.set_materialize_grads(False)
        return x.view_as(x), *(weight.view_as(weight) for weight in home), *call.replicas

    @staticmethod
    @eager_backward
    def backward(ctx: Any, dx: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call, (_, want_rows, *wanted) = ctx.call, needed(ctx)
        d_home, d_replicas = grads[: len(wanted)], grads[len(wanted) :]
        replicas: list[Tensor] = []
        into: list[Tensor] = []
        for want, owner, d_own, d_copy in zip(wanted, call.owners, d_home, d_replicas, strict=True):
            if not want:
                continue
            assert d_own is not None
            there = d_own if owner is None else _main_grad(owner)
            into.append(there)
            found = there.new_empty(0, *d_own.shape[1:]) if d_copy is None else d_copy.to(there.dtype)
            replicas.append(found)
        if into:
            call.route.add_home(replicas, into, [ctx.rows] * want_rows)
        return None, dx, *(d if want else None for want, d in zip(wanted, d_home, strict=True))


def _main_grad(owner: Tensor) -> Tensor:
    """The memory that the experts at home have written; its owner is told so."""
    found = WeightGradient(owner, "accumulate", "weight").buffer
    owner.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return found
