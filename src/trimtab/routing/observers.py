"""Observers of routers: those that decide (`Replayer`, `SelectionBias`), and those that see (`Recorder`, `Loads`,
`Quantiles`, `BalanceLosses`). `trimtab.observing(model, *observers)` adds them to a model's routers.

Legend: B sequences, L positions, T tokens of this rank, E experts, K experts per token, H bins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import ConfigError, InputError
from trimtab.routing.config import RouterConfig
from trimtab.routing.loads import load_metrics
from trimtab.routing.losses import Groups, LossGroups, StepTotals, balance_losses, take_sums
from trimtab.routing.port import Basis, Decision, Observer, RouterInfo, RouterRun, Routing
from trimtab.routing.quantile import BINS, add_required
from trimtab.routing.recompute import noted
from trimtab.routing.replay import Decisions
from trimtab.routing.select import top

ADDED = "selection_bias"


class Recorder(Observer):
    """Keeps what the routers of a model decide, forward by forward.

    calls: by router name, the ids [B, L, K] of each forward.
    """

    traced = True

    def __init__(self) -> None:
        self.calls: dict[str, list[Tensor]] = {}
        self._num_experts: dict[str, int] = {}
        self._outside: set[str] = set()

    def begin(self, routers: Mapping[str, RouterInfo], device: torch.device) -> None:
        self._num_experts = {name: info.num_experts for name, info in routers.items()}
        self.calls = {name: [] for name in routers}

    def see(self, run: RouterRun) -> None:
        if run.again:
            return
        if run.shape is None:
            self._outside.add(run.info.name)
            return
        ids_TK, rows_T = run.ids_TK, run.rows_T
        if rows_T is not None:
            everywhere = ids_TK.new_full((rows_T.shape[0], ids_TK.shape[1]), -1)
            ids_TK = everywhere.masked_scatter(rows_T[:, None], ids_TK)
        self._keep(run.name, ids_TK, run.shape[0])

    def missed(self, info: RouterInfo, shape: tuple[int, int]) -> None:
        self._keep(info.name, torch.full((shape[0] * shape[1], info.top_k), -1), shape[0])

    def _keep(self, name: str, ids_TK: Tensor, batch: int) -> None:
        ids = ids_TK.view(batch, ids_TK.shape[0] // max(batch, 1), ids_TK.shape[1])
        self.calls.setdefault(name, []).append(ids)

    def decisions(self, call: int = -1) -> Decisions:
        """Those of one forward of the model, by default the last.

        Raises:
            InputError: there was no such forward in some layer, or layers differ in tokens, K or E.
        """
        counts = {name: len(calls) for name, calls in self.calls.items()}
        if not any(counts.values()) and self._outside:
            raise InputError(
                f"nothing is recorded: {sorted(self._outside)[0]} ran outside of a forward of the model or of a part "
                "that takes input_ids or inputs_embeds, so [B, L] is not known: call one of these"
            )
        if not all(-count <= call < count for count in counts.values()) or len(set(counts.values())) > 1:
            raise InputError(f"no decisions of forward {call} in every layer; forwards recorded by layer: {counts}")
        picked = {name: calls[call] for name, calls in self.calls.items()}
        kinds = {name: (self._num_experts[base_of(name)], tuple(ids.shape)) for name, ids in picked.items()}
        if len(set(kinds.values())) > 1:
            raise InputError(f"layers differ in (experts, [B, L, K]) and do not make one [B, L, layers, K]: {kinds}")
        ids = torch.stack(list(picked.values()), dim=2)
        return Decisions(ids=ids, num_experts=next(iter(self._num_experts.values())), layers=tuple(picked))


class Replayer(Observer):
    """Decides what was recorded.

    Raises:
        InputError: decisions for other layers, or another number of experts, of all or per token; where -1 is no
            decision, tokens of which some experts are -1 and others not; in the forward, decisions for other tokens.
    """

    traced = True

    def __init__(self, decisions: Decisions) -> None:
        self._decisions = decisions
        self._shape = (decisions.ids.shape[0], decisions.ids.shape[1])
        self._ids: dict[str, Tensor] = {}
        self._live: dict[str, bool] = {}

    def begin(self, routers: Mapping[str, RouterInfo], device: torch.device) -> None:
        self._check_fits(routers)
        for i, name in enumerate(self._decisions.layers):
            info, ids_TK = routers[base_of(name)], self._decisions.ids[:, :, i].flatten(0, 1).long().to(device)
            if not info.holes:
                ids_TK = ids_TK.clamp(min=-1)
            none = ids_TK == -1
            if not info.holes and bool((none.any(-1) & ~none.all(-1)).any()):
                problem = f"{info.family}: a token has either all its experts recorded, or none (-1)"
                raise InputError(problem, layer=name, phase="route")
            self._ids[name], self._live[name] = ids_TK, not info.partial and bool(none.all(-1).any())

    def _check_fits(self, routers: Mapping[str, RouterInfo]) -> None:
        decisions, K = self._decisions, self._decisions.ids.shape[3]
        if set(map(base_of, decisions.layers)) != set(routers):
            raise InputError(f"decisions for the layers {decisions.layers}, but the model's are {tuple(routers)}")
        told = f"decisions among {decisions.num_experts} experts, {K} per token"
        sizes = {name: (info.num_experts, info.top_k) for name, info in routers.items()}
        if wrong := {name: size for name, size in sizes.items() if size != (decisions.num_experts, K)}:
            raise InputError(f"{told}, but the model has (experts, per token) {wrong}")

    def decide(self, run: RouterRun) -> Tensor:
        name, family, tokens = run.name, run.info.family, run.logits_TE.shape[0]
        whole_TK = self._ids.get(name)
        if whole_TK is None:
            problem = f"{family} decides again in one forward, and there are no decisions for that"
            raise InputError(problem, layer=name, phase="route")
        if whole_TK.device != run.logits_TE.device:
            whole_TK = self._ids[name] = whole_TK.to(run.logits_TE.device)
        rows_T = run.rows_T
        given_TK = whole_TK if rows_T is None or rows_T.shape[0] != whole_TK.shape[0] else whole_TK[rows_T]
        if given_TK.shape[0] != tokens or run.shape not in (None, self._shape):
            got = f"{tokens} tokens" if run.shape is None else list(run.shape)
            problem = f"{family}: decisions for [B, L] = {list(self._shape)}, but the layer got {got}"
            raise InputError(problem, layer=name, phase="route")
        if not self._live[name]:
            return given_TK
        return torch.where((given_TK == -1).all(-1, keepdim=True), run.ids_TK, given_TK)


class SelectionBias(Observer):
    """Decides the K largest of scores + bias in routers that have a buffer `selection_bias` [E], and in no others."""

    traced = copied = True

    @torch.no_grad()
    def decide(self, run: RouterRun) -> Tensor | None:
        bias_E = getattr(run.router, ADDED, None)
        return None if bias_E is None else top(run.scores() + bias_E, run.info.top_k)


class Loads(Observer):
    """Counts slots per expert on the device: no host sync, one all-reduce for all layers.

    Counts what each router gives, whoever decided it, in training mode and with gradients, once under recompute and
    without padding. Slots for which an expert had no room are counted apart.

    every: counts every run but recomputes instead, as for an evaluation.
    """

    def __init__(self, *, every: bool = False) -> None:
        self._every = every
        self._counts: dict[str, Tensor] = {}

    def begin(self, routers: Mapping[str, RouterInfo], device: torch.device) -> None:
        self._counts = {name: _zeros(info.num_experts + 1, device=device) for name, info in routers.items()}

    def see(self, run: RouterRun) -> None:
        if run.counts if not self._every else not run.again and run.shape is not None:
            counts = self._counts[run.info.name]
            counts[:-1] += run.kept_E.to(counts.device)
            if run.kept_E is not run.chosen_E:
                counts[-1] += (run.chosen_E.sum() - run.kept_E.sum()).to(counts.device)

    def take(self, group: Groups = None) -> dict[str, Tensor]:
        """By router, [E + 1] int64 since the last call: slots of each expert, then those for which it had no room;
        summed over the ranks of the group, all of which call."""
        return take_sums(self._counts, group)

    def records(self, group: Groups = None, times: int = 1) -> dict[str, dict[str, Any]]:
        """`trimtab.routing.loads.load_metrics` by router, of what `take` gives. times: how many ranks of the group hold
        the same tokens."""
        taken = self.take(group)
        counted = (torch.cat([*taken.values()]) // times).cpu()
        parts = torch.split(counted, [counts.numel() for counts in taken.values()])
        return {name: load_metrics(part[:-1].tolist(), int(part[-1])) for name, part in zip(taken, parts, strict=True)}


class Quantiles(Observer):
    """Counts what tokens require of each expert's bias, see `trimtab.routing.quantile`.

    bias: by router name, what reads its selection bias [E].
    """

    def __init__(self, bias: Mapping[str, Callable[[], Tensor]]) -> None:
        self._bias = bias
        self._histograms: dict[str, Tensor] = {}

    def begin(self, routers: Mapping[str, RouterInfo], device: torch.device) -> None:
        self._histograms = {name: _zeros(routers[name].num_experts, BINS, device=device) for name in self._bias}

    def see(self, run: RouterRun) -> None:
        read = self._bias.get(run.info.name)
        if read is not None and run.counts:
            # Without a graph: a checkpoint's second run, which saves the same tensors as the first, does not come here.
            with torch.no_grad():
                add_required(self._histograms[run.info.name], run.scores(), read(), run.info.top_k, run.real_T)

    def take(self, group: Groups) -> dict[str, Tensor]:
        """By router, [E, H] int64 since the last call, summed over the ranks of the group: all of them call."""
        return take_sums(self._histograms, group)


class BalanceLosses(Observer):
    """Gives each router its balance loss and z-loss, averaged over the routers; see `trimtab.routing.losses`.

    aux_loss: coefficient of E * sum of f * p, f the share of tokens of the step's global batch so far, or of all of it
        where `totals` say. z_loss: of the mean square of logsumexp(logits).
    group: gives the ranks that share the global batch; every rank of them must run the routers in the same order.

    Attributes:
        micro_batches: of a step, over which losses are averaged; with `totals` they are added up.
        totals: of the coming step, by router name.
        values: name -> value of the step, without a graph, coefficients included.
    """

    def __init__(self, *, aux_loss: float, z_loss: float, group: Callable[[], Groups]) -> None:
        self._coefficients, self._group = (aux_loss, z_loss), group
        self._configs: dict[str, RouterConfig] = {}
        self.micro_batches = 1
        self.reset()

    def reset(self) -> None:
        """A step begins."""
        self.values: dict[str, Tensor] = {}
        self.totals: dict[str, StepTotals] = {}
        self._so_far_E: dict[str, Tensor] = {}

    def begin(self, routers: Mapping[str, RouterInfo], device: torch.device) -> None:
        aux_loss, z_loss = self._coefficients
        for name, info in routers.items():
            if z_loss and info.score == "given":
                raise ConfigError(f"{name} ({info.family}): z_loss needs logits, and this router gives scores")
            score = "softmax" if info.score == "softmax" else "sigmoid"  # whether scores are a distribution
            self._configs[name] = RouterConfig(
                num_experts=info.num_experts, top_k=info.top_k, score=score,
                global_aux_loss=aux_loss * info.top_k / len(routers), z_loss=z_loss / len(routers),
            )  # fmt: skip

    def see(self, run: RouterRun) -> Tensor | None:
        if not (run.training and torch.is_grad_enabled() and run.logits_TE.requires_grad):
            return None
        name, totals = run.info.name, self.totals.get(run.info.name)
        before_E = noted(self._so_far_E.get(name), (self, name))
        logits_TE = run.logits_TE.to(torch.promote_types(run.logits_TE.dtype, torch.float32))
        scores_TE = run.scores().to(logits_TE.dtype)
        basis = Basis(run.chosen_TK, run.chosen_TK, run.chosen_E, scores_TE, run.real_T, 1, None)
        found, counts_E = balance_losses(
            Routing(run.chosen_TK, scores_TE, run.chosen_E, logits_TE, basis),
            config=self._configs[name], groups=LossGroups(batch=self._group()), totals=totals, counts_before_E=before_E,
        )  # fmt: skip
        if totals is None:
            found = {kind: loss / self.micro_batches for kind, loss in found.items()}
        if run.counts and counts_E is not None:
            self._so_far_E[name] = counts_E if before_E is None else before_E + counts_E
            for kind, loss in found.items():
                self.values[kind] = self.values.get(kind, 0) + loss.detach()
        return sum(found.values(), logits_TE.new_zeros(())) if found else None


def base_of(name: str) -> str:
    """The router of a layer's name, which ends in #2 where it decides for the second time in a forward."""
    return name.partition("#")[0]


def _zeros(*size: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dtype=torch.int64, device=device)


def own_copy(given: Decision, real_T: Tensor | None) -> Decision:
    """A copy, for whoever changes ids in place, with -1 for tokens that are not real."""

    def own(ids_TK: Tensor) -> Tensor:
        return ids_TK.clone() if real_T is None else ids_TK.masked_fill(~real_T[:, None], -1)

    chosen = own(given.chosen_TK)
    return Decision(chosen, chosen if given.kept_TK is given.chosen_TK else own(given.kept_TK))
