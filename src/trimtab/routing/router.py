"""The router: tokens to (expert ids, weights), balance losses and loads.

    jitter -> logits -> scores -> select -> weights -> capacity -> losses

Legend: T tokens of this rank, D model dim, E experts, K experts per token (E with expert choice, more with padding).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.errors import InputError
from trimtab.kernels.memory import dense, described
from trimtab.routing.capacity import drop_over, most_slots, padding
from trimtab.routing.config import RouterConfig
from trimtab.routing.ids import holds_ids
from trimtab.routing.losses import LossGroups, StepTotals, balance_losses
from trimtab.routing.outcome import Pending, Routing
from trimtab.routing.recompute import Choice, Memory, Remembered, sum_of, unseen
from trimtab.routing.scores import count_ids, pick_weights, router_logits, score
from trimtab.routing.select import capacity, select
from trimtab.validation import VALUES, check_dtype, check_sizes, holds_values

MANY = 1000
"""Micro-batches that are unlikely to be of one step."""


class Router(nn.Module):
    """Routing decisions for any number of tokens.

    Parameter: weight [E, D], drawn as `nn.Linear` draws its own. Buffer: expert_bias [E], or None; it stays float32.

    Attributes that may be set:
        groups: the ranks over which losses are summed; every rank of them must call.
        totals: of this optimiser step, for losses over several micro-batches.
        generator: draws the jitter, on the tokens' device; None for the default one.

    Forwards in training mode add to the loads that `take_loads` gives; see `trimtab.routing.bias`. A forward that is
    run again by activation checkpointing repeats its decisions and is not counted, see `trimtab.routing.recompute`. It
    is told by running inside a backward on nearly the same logits: so does another forward there, as of a hook, if its
    logits are as near as rounding may leave them (in sum within 20 %, in float64 within 1e-4).
    A stage of torch.distributed.pipelining that is not given `input_args` and `output_args` runs a first forward and
    backward on memory that nobody has set: its tokens are counted, and raise where they are not finite.

    Raises:
        ConfigError: `dim` is no size, or `dtype` none of parameters.
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        config: RouterConfig,
        dim: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        layer: str = "",
    ) -> None:
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
        self.memory = Memory()
        self.tap: Callable[[Choice, int], None] | None = None
        self.source: Callable[[int, int], Choice] | None = None
        # Of this step; not buffers: DDP would give every rank those of rank 0.
        self._loads = torch.zeros(config.num_experts, dtype=torch.int64, device=device)
        self._counts = torch.zeros(config.num_experts, dtype=torch.float64, device=device)
        self._forwards = 0
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight; the expert bias is zero."""
        bound = 1 / math.sqrt(self.dim)
        self.weight.uniform_(-bound, bound)
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def take_loads(self) -> Tensor:
        """How many slots picked each expert since the last call: [E] int64, this rank's. Ends the optimiser step."""
        self._bring(self.weight.device)
        taken = self._loads.clone()
        self._loads.zero_()
        self._counts.zero_()
        self._forwards = 0
        return taken

    def forward(
        self,
        x_TD: Tensor,
        *,
        token_mask_T: Tensor | None = None,
        ids_TK: Tensor | None = None,
        batch: int = 1,
        later: bool = False,
    ) -> Routing:
        """Route this rank's tokens.

        Args:
            x_TD: in float64, float32, bfloat16 or float16.
            token_mask_T: bool, True for a real token; the others are not read.
            ids_TK: decisions to replay instead of making them; scores, weights and losses stay live.
            batch: sequences among the tokens, which come in the order (sequence, position).
            later: leave the losses, for which ranks meet, and what is counted in `pending` for `take_losses`, as `MoE`
                does: once the experts' ranks have compared their calls, none waits there for one that is elsewhere.
                Hooks on the router see no losses then.

        Raises:
            InputError: shapes or dtypes other than these. Ids and weights are checked by dispatch, on every rank.
        """
        self._check(x_TD, token_mask_T, ids_TK, batch)
        self._bring(x_TD.device)
        c, tokens = self.config, x_TD.shape[0]
        real_T = token_mask_T
        x = x_TD if real_T is None else x_TD.masked_fill(~real_T[:, None], 0)
        remembers = (self.training or torch.is_grad_enabled()) and not torch.compiler.is_compiling()
        noise, sum_E, again = self._noise(), None, None
        logits = None if noise is not None else router_logits(self._jittered(x, None), self.weight)
        if remembers:
            with unseen():
                plain = router_logits(x.detach(), self.weight.detach()) if logits is None else logits
                sum_E = sum_of(plain)
                again = self.memory.recall(x, sum_E, real_T)
        if logits is None:
            logits = router_logits(self._jittered(x, noise if again is None else again.noise), self.weight)
        scores = score(logits, c.score)
        with unseen():
            before_E = self._counts.clone() if again is None else again.counts_before_E
            if again is not None and ids_TK is None:
                choice = self._unchanged(again)
            else:
                given = self._given(ids_TK, real_T, tokens, batch)
                choice = given or self._choose(logits.detach(), scores.detach(), real_T)
        weights = pick_weights(logits, scores, choice.chosen, c, whole=choice.whole)
        if choice.kept is not choice.chosen:
            weights = weights.masked_fill(choice.kept < 0, 0)
        weights = weights + (logits.detach() * 0.0).sum(-1, keepdim=True)  # NaN where one of them is not finite
        chosen_E = count_ids(choice.chosen, c.num_experts)
        if again is None and self.tap is not None:
            with unseen():
                self.tap(choice, batch)
        if sum_E is not None:
            noise = noise if again is None else again.noise
            mask_T = None if real_T is None else real_T.clone()
            made = Remembered(
                choice=choice, changes=choice.changes, sum_E=sum_E, real_T=mask_T, noise=noise, counts_before_E=before_E
            )  # fmt: skip
            weights = self.memory.hold(made, weights, self.training)
        ids = choice.kept
        loads = chosen_E if ids is choice.chosen else count_ids(ids, c.num_experts)
        most = choice.most
        if c.pad:
            room = capacity(tokens, c)
            filled = padding(ids, c, room)
            ids, weights = torch.cat((ids, filled), 1), F.pad(weights, (0, filled.shape[1]))
            most = None if most is None else most_slots(ids, c, room)
        counted = None if torch.compiler.is_compiling() else again is not None
        pending = Pending(ids, logits, scores, choice.chosen, chosen_E, real_T, batch, before_E, counted)
        losses = {} if later else self.take_losses(pending)
        if torch.compiler.is_exporting():
            from trimtab.routing.compiled import storable

            storable(Routing)
        return Routing(
            ids_TK=ids, weights_TK=weights, losses=losses, loads_E=loads, logits_TE=logits, most_slots=most,
            pending=pending if later else None,
        )  # fmt: skip

    def take_losses(self, pending: Pending) -> dict[str, Tensor]:
        """The losses of a forward that left them for later, once. Every rank of `groups` must call."""
        p = pending
        losses, counts_E = balance_losses(
            p.logits_TE, p.scores_TE, p.chosen_TK, p.chosen_E, p.real_T,
            config=self.config, batch=p.batch, groups=self.groups, totals=self.totals,
            counts_before_E=p.counts_before_E,
        )  # fmt: skip
        if self.training and not p.again:
            with unseen():
                self._count(p.chosen_E, counts_E, unknown=p.again is None)
        return losses

    def _unchanged(self, again: Remembered) -> Choice:
        """What was decided before, whose ids may have been given out."""
        if again.choice.changes == again.changes:
            return again.choice.to(torch.int64)
        raise InputError(
            "the ids_TK of a forward that activation checkpointing runs again were changed in place since: change a "
            "clone of them",
            layer=self.layer, phase="route",
        )  # fmt: skip

    def _given(self, ids_TK: Tensor | None, real_T: Tensor | None, tokens: int, batch: int) -> Choice | None:
        """A decision to replay, if there is one."""
        if ids_TK is not None:
            ids = ids_TK.long()
            given = Choice(chosen=ids, kept=ids)
        elif self.source is not None:
            given = self.source(tokens, batch)
        else:
            return None

        def own(t_TK: Tensor) -> Tensor:  # whoever changes ids in place does not change those that were given
            return t_TK.clone() if real_T is None else t_TK.masked_fill(~real_T[:, None], -1)

        chosen = own(given.chosen)
        return Choice(chosen=chosen, kept=chosen if given.kept is given.chosen else own(given.kept))

    def _choose(self, logits_TE: Tensor, scores_TE: Tensor, real_T: Tensor | None) -> Choice:
        c = self.config
        chosen = select(logits_TE, scores_TE, self.expert_bias, real_T, c, self.training)
        whole = real_T is None and c.select != "expert_choice"
        if c.select != "expert_choice" and c.capacity_factor is None:
            return Choice(chosen=chosen, kept=chosen, whole=whole)
        room = capacity(chosen.shape[0], c)
        most = most_slots(chosen, c, room)
        if c.select == "expert_choice":
            return Choice(chosen=chosen, kept=chosen, most=most)
        weights = pick_weights(logits_TE, scores_TE, chosen, c, whole=whole)
        kept = drop_over(chosen, weights, c.num_experts, room, c.drop)
        return Choice(chosen=chosen, kept=kept, most=most, whole=whole)

    def _count(self, chosen_E: Tensor, counts_E: Tensor | None, *, unknown: bool) -> None:
        """chosen_E: of this rank. counts_E: of all, where a loss counted them. unknown: whether they were before."""
        of_step = self.config.global_aux_loss > 0 and (self.totals is None or self.totals.counts_E is None)
        if unknown:
            from trimtab.routing.compiled import counted_once

            chosen_E = counted_once(chosen_E, False)
            counts_E = None if counts_E is None else counted_once(counts_E, of_step)
        else:
            self._forwards += 1
            if self._forwards == MANY and of_step:
                warnings.warn(
                    f"{MANY} forwards, and no step has ended: global_aux_loss is taken from the loads of them all. "
                    "Call trimtab.update_bias(model) after each optimizer step",
                    stacklevel=2,
                )
        self._loads.add_(chosen_E)
        if counts_E is not None:
            self._counts.add_(counts_E)

    def _noise(self) -> Tensor | None:
        """The state of the generator handed in; the default one is restored by checkpointing itself."""
        jitters = self.training and self.config.jitter > 0
        return self.generator.get_state() if jitters and self.generator is not None else None

    def _jittered(self, x_TD: Tensor, noise: Tensor | None) -> Tensor:
        jitter = self.config.jitter
        if not (self.training and jitter):
            return x_TD
        generator = self.generator
        with unseen():  # the second run compares for itself, and draws in place
            if generator is not None and noise is not None and not torch.equal(noise, generator.get_state()):
                generator = torch.Generator(device=generator.device)  # a repeated draw leaves the generator where it is
                generator.set_state(noise)
            wide = torch.promote_types(x_TD.dtype, torch.float32)  # as the logits; bfloat16 has few numbers about 1
            by_TD = torch.empty_like(x_TD, dtype=wide).uniform_(1 - jitter, 1 + jitter, generator=generator)
        return x_TD * by_TD

    def _bring(self, device: torch.device) -> None:
        """The step's counts follow the parameters; what was on the meta device begins at zero."""
        if self._loads.device != device:
            with torch.inference_mode(False):  # training goes on with them
                self._loads, self._counts = (
                    torch.zeros_like(t, device=device) if t.is_meta else t.to(device)
                    for t in (self._loads, self._counts)
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

    def _check(self, x: Tensor, mask: Tensor | None, ids: Tensor | None, batch: int) -> None:
        problems = []
        if not dense(x) or x.dim() != 2 or x.shape[1] != self.dim or not holds_values(x.dtype):
            wanted = f"floating [T, {self.dim}], dense, in {VALUES}"
            raise InputError(f"tokens must be {wanted}, got {described(x)}", layer=self.layer, phase="route")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:1]):
            problems.append(f"the token mask must be bool [{x.shape[0]}], got {mask.dtype} {tuple(mask.shape)}")
        decided = (x.shape[0], self.config.columns)
        if ids is not None and (tuple(ids.shape) != decided or not holds_ids(ids)):
            padded = " (without the columns of padding)" if self.config.pad else ""
            problems.append(f"ids to replay must be int {list(decided)}{padded}, got {ids.dtype} {tuple(ids.shape)}")
        if batch < 0 or x.shape[0] % max(batch, 1) or (batch == 0 and x.shape[0]):
            problems.append(f"{x.shape[0]} tokens are not {batch} sequences of one length")
        if problems:
            raise InputError("; ".join(problems), layer=self.layer, phase="route")

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        c = self.config
        return f"{self.dim} -> {c.top_k} of {c.num_experts} experts, {c.score}, select={c.select!r}"
