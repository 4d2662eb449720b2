"""The router: jitter -> logits -> scores -> select -> weights -> capacity, and behind dispatch losses and loads.

Legend: T tokens of this rank, D model dim, E experts, K experts per token (E with expert choice).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.errors import InputError
from trimtab.kernels.tensor_checks import dense, described
from trimtab.routing.config import RouterConfig
from trimtab.routing.losses import LossGroups, StepTotals, balance_losses, nan_unless_named, problems_of_packs
from trimtab.routing.observers import own_copy
from trimtab.routing.port import Basis, Decision, Port, RouterInfo, RouterRun, Routing, decoded
from trimtab.routing.quantile import BINS, add_required
from trimtab.routing.recompute import counted_before, replayed, replaying, running
from trimtab.routing.scores import SCORES, count_ids, pick_weights, router_logits
from trimtab.routing.select import Choosing, drop_over, most_slots, select
from trimtab.validation import VALUES, check_dtype, check_sizes, holds_ids, holds_values


class Router(nn.Module):
    """Routing decisions for any number of tokens.

    Parameter: weight [E, D], drawn as `nn.Linear` draws its own. Buffer: expert_bias [E], or None; it stays float32.

    Attributes that may be set:
        groups: the ranks over which losses are summed; every rank of them must call.
        totals: of this optimizer step, for losses over several micro-batches.
        generator: draws the jitter, on the tokens' device; None for the default one.

    `losses` in training mode and with gradients adds to the loads that `take_loads` gives and `trimtab.update_bias`
    sums up. Under activation checkpointing see `trimtab.replay_in_recompute`.
    A stage of torch.distributed.pipelining that is not given `input_args` and `output_args` runs a first forward and
    backward on memory that nobody has set: its tokens are counted, and raise where they are not finite.

    Args:
        config: the routing decision.
        dim: D, the width of a token.
        dtype, device: as in `ExpertMLP`.
        layer: the layer's name, for errors.

    Raises:
        ConfigError: `dim` is no size, or `dtype` none of parameters.
    """

    expert_bias: Tensor | None

    def __init__(
        self, config: RouterConfig, dim: int, *, dtype: torch.dtype | None = None,
        device: torch.device | str | None = None, layer: str = "",
    ) -> None:  # fmt: skip
        super().__init__()
        check_sizes(dim=dim)
        check_dtype(dtype)
        self.config, self.dim = config, dim
        self.groups = LossGroups()
        self.totals: StepTotals | None = None
        self.generator: torch.Generator | None = None
        self.layer = layer
        self.weight = nn.Parameter(torch.empty(config.num_experts, dim, dtype=dtype or torch.float32, device=device))
        bias = torch.zeros(config.num_experts, dtype=torch.float32, device=device) if config.bias else None
        self.register_buffer("expert_bias", bias)
        partial = config.experts_pick or config.capacity_factor is not None
        experts, columns = config.num_experts, config.columns
        self.port = Port(RouterInfo(num_experts=experts, top_k=columns, score=config.score, partial=partial))
        # Of this step; not buffers: DDP would give every rank those of rank 0.
        self._loads = torch.zeros(config.num_experts, dtype=torch.int64, device=device)
        self._counts = torch.zeros(config.num_experts, dtype=torch.float64, device=device)
        bins = BINS if config.bias_rule == "quantile" else 0
        self._required = torch.zeros(config.num_experts, bins, dtype=torch.int64, device=device)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight; the expert bias is zero."""
        bound = 1 / math.sqrt(self.dim)
        self.weight.uniform_(-bound, bound)
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def take_loads(self) -> Tensor:
        """How many slots picked each expert since the last call: [E] int64, this rank's. Ends the optimizer step."""
        self._bring(self.weight.device)
        taken = self._loads.clone()
        self._loads.zero_()
        self._counts.zero_()
        self._required.zero_()
        return taken

    def required(self) -> Tensor:
        """What the tokens since then require of the bias, for "quantile": [E, bins] int64, else [E, 0]."""
        self._bring(self.weight.device)
        return self._required.clone()

    def forward(
        self, x_TD: Tensor, *, token_mask_T: Tensor | None = None, ids_TK: Tensor | None = None, batch: int = 1,
        sequence_ids_T: Tensor | None = None, num_sequences: int | None = None,
    ) -> Routing:  # fmt: skip
        """Route this rank's tokens. `losses` takes the balance losses of what comes out.

        Args:
            x_TD: tokens, in float64, float32, bfloat16 or float16.
            token_mask_T: bool, True for a real token; the others are not read.
            ids_TK: decisions to replay instead of making them; scores, weights and losses stay live.
            batch: sequences among the tokens, which come in the order (sequence, position).
            sequence_ids_T: int, where these are packs: another id begins another sequence, for `sequence_aux_loss`.
            num_sequences: of each pack, at most; ids 0..num_sequences - 1 then name them, on all ranks of
                `groups.sequence`. Weights of real tokens with another id are NaN.

        Raises:
            InputError: shapes or dtypes other than these. Ids and weights are checked by dispatch, on every rank.
        """
        self._check(x_TD, token_mask_T, ids_TK, batch, sequence_ids_T, num_sequences)
        self._bring(x_TD.device)
        c, real_T = self.config, token_mask_T
        x = x_TD if real_T is None else x_TD.masked_fill(~real_T[:, None], 0)
        logits = router_logits(self._jittered(x), self.weight)
        scores = SCORES[c.score].of(logits)
        plain = logits.detach()
        decision = self._decide(plain, scores.detach(), real_T, ids_TK, batch)
        chosen, ids = decision.chosen_TK, decision.kept_TK
        weights = self._weights(logits, scores, chosen, decision.complete)
        if ids is not chosen:
            weights = weights.masked_fill(ids < 0, 0)
        if sequence_ids_T is not None and num_sequences is not None:
            weights = nan_unless_named(weights, sequence_ids_T, num_sequences)
        weights = weights.add(plain.sum(-1, keepdim=True), alpha=0)  # NaN where one of them is not finite
        chosen_E = count_ids(chosen, c.num_experts, complete=decision.complete)
        loads_E = chosen_E if ids is chosen else count_ids(ids, c.num_experts)
        basis = Basis(ids, chosen, chosen_E, scores, real_T, batch, decision.most_slots, sequence_ids_T, num_sequences)
        return Routing(ids_TK=ids, weights_TK=weights, loads_E=loads_E, logits_TE=logits, basis=basis)

    def losses(self, routing: Routing) -> dict[str, Tensor]:
        """The balance losses of a forward, by name, coefficients included: their sum joins the training loss. Counts
        the forward's loads, but for one without gradients: it trains nothing, or reentrant checkpointing will run it
        again.

        Every rank of `groups` must call, once per forward and in the same order; nothing is exchanged where no
        coefficient is set. `MoE` calls it once the experts' ranks have compared their calls.
        """
        so_far = self.config.global_aux_loss > 0 and (self.totals is None or self.totals.counts_E is None)
        before_E = replayed([self._counts], "counts")[0] if so_far else None
        found, counts_E = balance_losses(
            routing, config=self.config, groups=self.groups, totals=self.totals, counts_before_E=before_E
        )
        if routing.basis is None:
            return found
        basis = routing.basis
        if self.training and torch.is_grad_enabled():
            once = 0 if counted_before() else 1
            self._loads.add_(basis.chosen_E, alpha=once)
            if self._required.shape[1] and self.expert_bias is not None and once:
                add_required(self._required, basis.scores_TE, self.expert_bias, self.config.top_k, basis.real_T)
            if so_far and counts_E is not None:
                self._counts.add_(counts_E, alpha=once)
        loss = self.observed(routing)
        return found if loss is None else found | {"observers": loss}

    def observed(self, routing: Routing, *, inside: bool = True) -> Tensor | None:
        """Shows a forward to the observers, as `losses` does; the sum of their losses, None for none. inside: it is one
        of the model's, not run again by a checkpoint that has no tape."""
        if routing.basis is None or not self.port.observers:
            return None
        basis = routing.basis
        decision = Decision(basis.chosen_TK, basis.ids_TK)
        run = self._run(lambda: decision.coded, routing.logits_TE, basis.scores_TE, basis.real_T, basis.batch)
        run.chosen_TK, run.chosen_E, run.kept_E = basis.chosen_TK, basis.chosen_E, routing.loads_E
        run.shape = run.shape if inside else None
        return self.port.see(run)

    def _run(
        self, ids: Tensor | Callable[[], Tensor], logits_TE: Tensor, scores_TE: Tensor, real_T: Tensor | None,
        batch: int,
    ) -> RouterRun:  # fmt: skip
        shape = (batch, logits_TE.shape[0] // max(batch, 1))
        return RouterRun(
            self.port, self, ids=ids, logits_TE=logits_TE, scores=lambda: scores_TE, shape=shape, real=lambda: real_T
        )

    def _decide(
        self, logits_TE: Tensor, scores_TE: Tensor, real_T: Tensor | None, ids_TK: Tensor | None, batch: int
    ) -> Decision:
        """The decision given, that of an observer or of the first run in a recompute, or the one made here."""
        given = None if ids_TK is None else ids_TK.long()
        made: list[Decision] = []

        def choose() -> Tensor:
            made.append(self._choose(logits_TE, scores_TE, real_T))
            return made[0].coded

        if self.port.observers or running():
            run = self._run(choose if given is None else given, logits_TE, scores_TE, real_T, batch)
            if self.port.decide(run, fixed=given is not None) and given is None:
                return own_copy(decoded(run.ids_TK), real_T)
            given = None if given is None else run.ids_TK
        if given is not None:
            return own_copy(Decision(given, given), real_T)
        return made[0] if made else self._choose(logits_TE, scores_TE, real_T)

    def _choose(self, logits_TE: Tensor, scores_TE: Tensor, real_T: Tensor | None) -> Decision:
        c = self.config
        chosen = select(Choosing(logits_TE, scores_TE, self.expert_bias, real_T, c, self.training))
        complete = real_T is None and not c.experts_pick
        if not c.experts_pick and c.capacity_factor is None:
            return Decision(chosen, chosen, complete=complete)
        room = c.room(chosen.shape[0])
        most = most_slots(chosen, c.num_experts, room)
        if c.experts_pick:
            return Decision(chosen, chosen, most)
        weights = self._weights(logits_TE, scores_TE, chosen, complete)
        return Decision(chosen, drop_over(chosen, weights, c.num_experts, room, c.drop), most, complete)

    def _weights(self, logits_TE: Tensor, scores_TE: Tensor, ids_TK: Tensor, complete: bool) -> Tensor:
        c = self.config
        return pick_weights(
            logits_TE, scores_TE, ids_TK, SCORES[c.score], normalize=c.normalize, scale=c.scale, complete=complete
        )

    def _jittered(self, x_TD: Tensor) -> Tensor:
        jitter, generator = self.config.jitter, self.generator
        if not (self.training and jitter):
            return x_TD
        if generator is not None:
            state = replayed([generator.get_state()], "noise")[0]  # checkpointing restores the default generator itself
            if replaying():
                generator = torch.Generator(device=generator.device)
                generator.set_state(state)
        wide = torch.promote_types(x_TD.dtype, torch.float32)  # as the logits; bfloat16 has few numbers about 1
        by_TD = torch.empty_like(x_TD, dtype=wide).uniform_(1 - jitter, 1 + jitter, generator=generator)
        return x_TD * by_TD

    def _bring(self, device: torch.device) -> None:
        """The step's counts follow the parameters; what was on the meta device begins at zero."""
        if self._loads.device != device:
            with torch.inference_mode(False):  # training goes on with them
                self._loads, self._counts, self._required = (
                    torch.zeros_like(t, device=device) if t.is_meta else t.to(device)
                    for t in (self._loads, self._counts, self._required)
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        bias = self.expert_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if bias is not None and self.expert_bias is not None and self.expert_bias.dtype != bias.dtype:
            self.expert_bias = bias.to(self.expert_bias.device)  # its steps are below bfloat16's resolution
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """The bias stays float32 where tensors are assigned too."""
        bias = state_dict.get(f"{prefix}expert_bias")
        if isinstance(bias, Tensor) and bias.is_floating_point():
            state_dict[f"{prefix}expert_bias"] = bias.float()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _check(
        self, x: Tensor, mask: Tensor | None, ids: Tensor | None, batch: int, packed: Tensor | None, most: int | None
    ) -> None:
        problems = []
        if not dense(x) or x.dim() != 2 or x.shape[1] != self.dim or not holds_values(x.dtype):
            wanted = f"floating [T, {self.dim}], dense, in {VALUES}"
            raise InputError(f"tokens must be {wanted}, got {described(x)}", layer=self.layer, phase="route")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:1]):
            problems.append(f"the token mask must be bool [{x.shape[0]}], got {mask.dtype} {tuple(mask.shape)}")
        decided = (x.shape[0], self.config.columns)
        if ids is not None and (tuple(ids.shape) != decided or not holds_ids(ids)):
            problems.append(f"ids to replay must be int {list(decided)}, got {ids.dtype} {tuple(ids.shape)}")
        if batch < 0 or x.shape[0] % max(batch, 1) or (batch == 0 and x.shape[0]):
            problems.append(f"{x.shape[0]} tokens are not {batch} sequences of one length")
        cut = bool(self.config.sequence_aux_loss and self.groups.sequence)
        problems += problems_of_packs(x.shape[0], packed, most, cut=cut)
        if problems:
            raise InputError("; ".join(problems), layer=self.layer, phase="route")

    def extra_repr(self) -> str:
        c = self.config
        return f"{self.dim} -> {c.top_k} of {c.num_experts} experts, {c.score}, select={c.select!r}"
