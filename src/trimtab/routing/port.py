"""The seam of a router: observers decide other experts, or see what was decided and give a loss to carry.

    port.decide(run)       each observer in the order of arrival, the last word holds; a recompute takes its first run's
    loss = port.see(run)   joins the backward where the router's weights go (`carrying`), or the layer's own losses

`Router.port` is one, and so is that of Megatron's router; `integrations.transformers.routers.ports` puts one in front
of each router of a transformers model. `trimtab.observing(model, *observers)` adds observers to all of them.

Legend: B sequences, L positions, T tokens of this rank, E experts, K experts per token (E with expert choice).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import Function

from trimtab.autograd import in_backward, not_in_graphs
from trimtab.operators import exportable
from trimtab.routing.recompute import counted_before, replayed, replaying, running
from trimtab.routing.scores import count_ids

OWN = "trimtab"  # the family of our own routers


class Decision(NamedTuple):
    """The experts of each token, int64.

    chosen_TK: those picked, -1 for none. kept_TK: -1 also where an expert had no room; the same without a capacity.
    most_slots: how many of the kept are not -1 at most, where a capacity says so.
    complete: whether every pick is known to name an expert.
    """

    chosen_TK: Tensor
    kept_TK: Tensor
    most_slots: int | None = None
    complete: bool = False

    @property
    def coded(self) -> Tensor:
        """Both in one tensor: an expert, -1 for none, -2 - e for an expert e that was picked but had no room."""
        if self.kept_TK is self.chosen_TK:
            return self.chosen_TK
        return torch.where(self.kept_TK == self.chosen_TK, self.kept_TK, -2 - self.chosen_TK)


def decoded(ids_TK: Tensor) -> Decision:
    """The decision that `Decision.coded` gave, int64."""
    return Decision(torch.where(ids_TK < -1, -2 - ids_TK, ids_TK), ids_TK.clamp(min=-1))


@exportable
class Basis(NamedTuple):
    """What `Router.losses` takes the losses from. real_T: the token mask. batch: rows of one length. Then: packs."""

    ids_TK: Tensor
    chosen_TK: Tensor
    chosen_E: Tensor
    scores_TE: Tensor
    real_T: Tensor | None
    batch: int
    most_slots: int | None
    sequence_ids_T: Tensor | None = None
    num_sequences: int | None = None


@exportable
class Routing(NamedTuple):
    """One routing decision.

    ids_TK: int64 expert ids; -1 where a slot is dropped or the token is not real.
    weights_TK: float32 as logits_TE (float64 for float64 tokens); 0 where the id is -1, NaN for a token whose logits
        are not finite, so that dispatch raises on every rank.
    loads_E: int64, kept slots of real tokens of this rank; padding is not counted.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    loads_E: Tensor
    logits_TE: Tensor
    basis: Basis | None = None

    @property
    def most_slots(self) -> int | None:
        """How many ids are not -1 at most, where a capacity says so and they are still those that were decided."""
        return None if self.basis is None or self.ids_TK is not self.basis.ids_TK else self.basis.most_slots


@dataclass(frozen=True, kw_only=True)
class RouterInfo:
    """What is known of a router before it runs.

    name: of its module, without what DDP, peft, torch.compile and checkpointing add; of ours once it is observed.
    top_k: how many ids a decision has for a token.
    score: how logits become scores: a name of `trimtab.routing.scores.SCORES`, "given", or a family's own.
    family: for errors.
    partial: -1 is a decision: experts pick, or have a capacity. Else a token of -1 alone is decided live.
    holes: some ids of a token may be -1.
    """

    num_experts: int
    top_k: int
    name: str = ""
    score: str = "softmax"
    family: str = OWN
    partial: bool = False
    holes: bool = True


class RouterRun:
    """One run of a router.

    info: of the router. router: its module. training: its mode.
    logits_TE: live. scores: computes those of all experts, differentiable, without bias and group limits.
    shape: (B, L) of the forward that it is part of; None where it is part of none, as in a recompute of one's own.
    rows_T: bool [B * L], the tokens that the router sees; None for all.
    again: the second run of a checkpointed block.
    """

    def __init__(
        self, port: Port, router: nn.Module, *, ids: Tensor | Callable[[], Tensor], logits_TE: Tensor,
        scores: Callable[[], Tensor], shape: tuple[int, int] | None, rows_T: Tensor | None = None,
        real: Callable[[], Tensor | None] | None = None, turn: int = 1,
    ) -> None:  # fmt: skip
        self.port, self.info, self.router, self.training = port, port.info, router, router.training
        self.logits_TE, self.scores, self.shape = logits_TE, scores, shape
        self.rows_T, self._real, self._turn, self._ids = rows_T, real, turn, ids
        self.again, self._graded = replaying(), torch.is_grad_enabled()

    @property
    def name(self) -> str:
        """The router's name; NAME#2 where it decides for the second time in a forward."""
        return self.info.name if self._turn == 1 else f"{self.info.name}#{self._turn}"

    @property
    def ids_TK(self) -> Tensor:
        """The ids that hold; the router's own are computed when they are first asked for."""
        if not isinstance(self._ids, Tensor):
            self._ids = self._ids()
        return self._ids

    @ids_TK.setter
    def ids_TK(self, ids_TK: Tensor) -> None:
        self._ids = ids_TK
        for derived in ("chosen_TK", "chosen_E", "kept_E"):
            vars(self).pop(derived, None)

    @cached_property
    def real_T(self) -> Tensor | None:
        """The tokens that are no padding, bool; None for all."""
        return None if self._real is None else self._real()

    @cached_property
    def counts(self) -> bool:
        """Whether this run counts, see `CountOnce`. Not to be asked in a graph of `torch.compile`."""
        return self.port.counter.here(self.training and self._graded)

    @cached_property
    def chosen_TK(self) -> Tensor:
        """The picks, int64; -1 for none and for padding."""
        ids_TK = self.ids_TK.detach().long()
        return ids_TK if self.real_T is None else ids_TK.masked_fill(~self.real_T[:, None], -1)

    @cached_property
    def chosen_E(self) -> Tensor:
        """Slots that picked each expert, without padding."""
        return count_ids(self.chosen_TK, self.info.num_experts)

    @cached_property
    def kept_E(self) -> Tensor:
        """Of these, the slots for which the expert had room; the same tensor without a capacity."""
        return self.chosen_E


class Observer:
    """Takes part in each run of the routers it is added to. A subclass overrides what it needs. Ids are coded as in
    `Decision.coded`.

    traced: `see` is traced in the graphs of `torch.compile`; without, it runs between two graphs. `decide` is traced.
    copied: a copy of the model keeps it; it has no state that changes then.
    """

    traced = False
    copied = False

    def begin(self, routers: Mapping[str, RouterInfo], device: torch.device) -> None:
        """The routers that it is added to, by name, each time that it is added."""

    def decide(self, run: RouterRun) -> Tensor | None:
        """Other ids [T, K] for `run.ids_TK`; None to leave them. Taken as they are: bias, groups and capacity
        are kept by changing `run.ids_TK`. No -1 but where `run.info.partial` or `holes` has it. Runs without gradients;
        not called where ids are given to the layer, nor in a recompute that has a tape of the first run."""

    def see(self, run: RouterRun) -> Tensor | None:
        """A scalar loss that joins the backward with weight 1, or None. Called in recomputes too (`run.again`); of a
        router of ours by `losses`, which `MoE` calls. What is kept is computed under `torch.no_grad()`, since both runs
        of a checkpoint must save the same tensors."""

    def missed(self, info: RouterInfo, shape: tuple[int, int]) -> None:
        """A forward of a transformers model over [B, L] has ended and did not come to this router."""


class CountOnce:
    """Counts each training forward once, also under activation checkpointing.

    Of a reentrant checkpoint the second run counts: the first one has no gradients. A checkpoint whose two runs are
    not told apart by a tape of `replay_in_recompute` is taken for the forward before it.
    """

    def __init__(self) -> None:
        self._counted = False

    def here(self, counting: bool) -> bool:
        """Whether the run that is under way counts. counting: it trains, and has gradients."""
        if running():
            return counting and not counted_before()
        if in_backward():
            return counting and not self._counted
        self._counted = counting
        return counting


class Port:
    """The observers of one router. A copy of the module has a port of its own, with the observers that are `copied`."""

    def __init__(self, info: RouterInfo, observers: Sequence[Observer] = ()) -> None:
        self.info = info
        self.observers = list(observers)
        self.counter = CountOnce()

    def decide(self, run: RouterRun, *, fixed: bool = False) -> bool:
        """Whether `run.ids_TK` has been replaced. fixed: no observer is asked."""
        told = False
        if not run.again and not fixed:
            for observer in self.observers:
                with torch.no_grad():
                    ids_TK = observer.decide(run)
                if ids_TK is not None:
                    run.ids_TK, told = ids_TK.long(), True
        if running():
            run.ids_TK, told = replayed([run.ids_TK.int()], "ids")[0].long(), True
        return told

    def see(self, run: RouterRun) -> Tensor | None:
        """The sum of the observers' losses, None for none."""
        losses = self._shown(run, True)
        if not all(observer.traced for observer in self.observers):
            losses += self._between_graphs(run)
        return sum(losses[1:], losses[0]) if losses else None

    @not_in_graphs
    def _between_graphs(self, run: RouterRun) -> list[Tensor]:
        return self._shown(run, False)

    def _shown(self, run: RouterRun, traced: bool) -> list[Tensor]:
        losses = [observer.see(run) for observer in self.observers if observer.traced == traced]
        return [loss for loss in losses if loss is not None]

    def __reduce__(self) -> tuple[Any, ...]:
        return Port, (self.info, self._copied())

    def _copied(self) -> list[Observer]:
        return [observer for observer in self.observers if observer.copied]

    def add(self, observers: Sequence[Observer]) -> None:
        self.observers = [*self.observers, *observers]

    def remove(self, observers: Sequence[Observer]) -> None:
        self.observers = [one for one in self.observers if not any(one is gone for gone in observers)]


class _WithLoss(Function):
    """A tensor whose backward is also that of a loss of weight 1, wherever the tensor goes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.like)


def carrying(tensor: Tensor, loss: Tensor | None) -> Tensor:
    """`tensor`, whose backward is also that of `loss`."""
    return tensor if loss is None else _WithLoss.apply(tensor, loss)  # type: ignore[no-untyped-call]
