"""`use(spec, router="trimtab")`: our router behind Megatron's parameters, whose losses are those of the global batch.

    load_balancing_loss, seq_load_balancing_loss, global_load_balancing_loss, z_loss     see `trimtab.routing.losses`

over all ranks that hold parts of the micro-batch, by the tokens that there are: ranks may have any number, none or
padding alone. Megatron's own take as many for granted on each rank, average over data-parallel ranks what is of each,
and take the fractions of a plain top-k, without expert bias and groups, which these take of the experts chosen.

Legend: T tokens of this rank, K experts per token, E experts, H hidden size, S positions, B sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimtab.autograd import in_backward
from trimtab.errors import ConfigError
from trimtab.integrations.megatron.packs import documents
from trimtab.integrations.megatron.protocol import TopKRouter, asked
from trimtab.routing.config import RouterConfig
from trimtab.routing.losses import LossGroups, StepTotals, balance_losses
from trimtab.routing.port import Port, carrying

LOSSES = {
    "aux": ("aux_loss", "load_balancing_loss"),
    "sequence_aux": ("seq_aux_loss", "seq_load_balancing_loss"),
    "global_aux": ("global_aux_loss", "global_load_balancing_loss"),
    "z": ("z_loss", "z_loss"),
}
"""Ours: what Megatron's configuration calls it, and its log."""
REFUSED = {
    "add_bias_linear": "a bias on the router's logits",
    "moe_enable_routing_replay": "Megatron's record and replay of routes",
    "moe_router_force_load_balancing": "random logits",
    "moe_router_force_biased": "random logits",
}


class Router(TopKRouter):  # type: ignore[misc]
    """In the place of TopKRouter: its parameter, buffers, flags and state dict, with our decision and losses.

    Every rank of the group tp_dp_cp must call while training, once per forward and in the same order; nothing is
    exchanged where no loss has a coefficient. Logits are computed in float32 at least. Jitter is for training alone.

    Args:
        config, pg_collection, kwargs: as Megatron's TopKRouter takes it.

    Raises:
        ConfigError: the configuration asks for what this router does not have.
    """

    expert_bias: Tensor | None

    def __init__(self, config: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **kwargs)
        self.coefficients = {ours: self.get_aux_loss_coeff(theirs) for ours, (theirs, _) in LOSSES.items()}
        self.coefficients["z"] = config.moe_z_loss_coeff or 0.0
        # Not a submodule: its parameter and its buffer are ours, and are looked up in each forward.
        self._decides = [router_config(config, self.coefficients).build(config.hidden_size, device="meta")]
        parts, cut = self.tp_dp_cp_group.size(), self.tp_cp_group.size()
        # Gradients are averaged over dp * cp ranks, where the losses' come times cp, and summed over tp; of losses that
        # are sums, which a number of tokens divides later, they are summed over all.
        self.groups = LossGroups(
            batch=self.tp_dp_cp_group if parts > 1 else None, sequence=self.tp_cp_group if cut > 1 else None,
            divisor=1 if config.calculate_per_token_loss else parts // cut,
        )  # fmt: skip
        self.calculate_per_token_loss = False  # Megatron's factors for it: these losses are sums already

    def forward(self, input: Tensor, padding_mask: Tensor | None = None, *, packs: Any = None) -> tuple[Tensor, Tensor]:
        """Tokens [S, B, H] and where they are padding, bool [S, B] -> weights and ids [T, K], -1 for none. packs:
        Megatron's `packed_seq_params`, whose documents are the sequences of `seq_aux_loss`."""
        if self.expert_bias is not None:
            self.expert_bias = self.expert_bias.float()  # its steps are below bfloat16's resolution
        decides = self._decides[0].train(self.training)
        decides.weight, decides.expert_bias = self.weight, self.expert_bias
        positions, sequences = input.shape[:2]
        x_TH = input.transpose(0, 1).flatten(0, 1)
        if self.config.moe_router_dtype == "fp64":
            x_TH = x_TH.double()
        real_T = None if padding_mask is None else ~padding_mask.transpose(0, 1).flatten()
        tp = (self.tp_group.rank(), self.tp_group.size()) if self.config.sequence_parallel else (0, 1)
        found = documents(packs, input, tp, self.cp_group.size()) if self.coefficients["sequence_aux"] else None
        packed = {} if found is None else {"sequence_ids_T": found[0], "num_sequences": found[1]}
        routing = decides(x_TH, token_mask_T=real_T, batch=1 if packed else sequences, **packed)
        weights_TK = routing.weights_TK
        if self.training and torch.is_grad_enabled():
            weights_TK = self._with_losses(weights_TK, routing)
            if self.enable_expert_bias:
                self.local_tokens_per_expert += routing.basis.chosen_E
        # Megatron's recompute has no tape: what runs in a backward is none of the model's forwards.
        weights_TK = carrying(weights_TK, decides.observed(routing, inside=not in_backward()))

        def by_position(t_TK: Tensor) -> Tensor:
            return t_TK.view(sequences, positions, t_TK.shape[1]).transpose(0, 1).flatten(0, 1)

        return by_position(weights_TK), by_position(routing.ids_TK)

    @property
    def port(self) -> Port:
        """Of the router that decides: `trimtab.observing`, record and replay find it here."""
        port: Port = self._decides[0].port
        return port

    def _with_losses(self, weights_TK: Tensor, routing: Any) -> Tensor:
        """The weights, whose backward is that of the losses too; and the losses in Megatron's log."""
        by_token = self.config.calculate_per_token_loss
        sums = StepTotals(tokens=torch.ones((), device=weights_TK.device)) if by_token else None
        found, counts_E = balance_losses(
            routing, config=self._decides[0].config, groups=self.groups, totals=sums,
            counts_before_E=self.global_tokens_per_expert,
        )  # fmt: skip
        if counts_E is None:
            return weights_TK
        if self.global_tokens_per_expert is not None:
            self.global_tokens_per_expert += counts_E
        # Megatron adds up what the ranks of tp_cp log. A sum is logged as the mean that it is of.
        share = 1 / self.tp_cp_group.size()
        if by_token:
            share = share * self.topk / counts_E.sum().clamp(min=1)
        for ours, loss in found.items():
            logged = loss + loss.detach() * (share - 1)
            weights_TK = self.attach_and_log_load_balancing_loss(
                weights_TK, self.coefficients[ours], logged, LOSSES[ours][1], self.tp_cp_group
            )
        return weights_TK


def router_config(config: Any, coefficients: dict[str, float]) -> RouterConfig:
    """Raise ConfigError if there is none."""
    problems = asked(config, REFUSED)
    kinds = config.moe_router_load_balancing_type
    known = ("none", *(theirs for theirs, _ in LOSSES.values()))
    kinds = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind not in known]
    problems += [f"moe_router_load_balancing_type={kind!r}" for kind in kinds]
    groups, score, top_k = config.moe_router_num_groups or 1, config.moe_router_score_function, config.moe_router_topk
    top_groups = config.moe_router_group_topk or 1
    normalize = not config.moe_router_pre_softmax if score == "softmax" else top_k > 1
    best = top_k // top_groups
    if groups > 1 and best not in (1, 2):
        problems.append(f"groups of experts chosen by their best {best}")
    if groups > 1 and best == 2 and score == "softmax" and normalize:
        problems.append("groups of experts chosen by sums of logits")
    if problems:
        raise ConfigError(f"router='trimtab' does not have: {'; '.join(problems)}. Leave router='megatron'")
    losses: dict[str, Any] = {f"{ours}_loss": value for ours, value in coefficients.items()}
    return RouterConfig(
        num_experts=config.num_moe_experts, top_k=top_k, score=score, normalize=normalize,
        scale=config.moe_router_topk_scaling_factor or 1.0, groups=groups, top_groups=top_groups,
        group_score="top2" if best == 2 else "max", bias=bool(config.moe_router_enable_expert_bias),
        capacity_factor=config.moe_expert_capacity_factor,
        drop="position" if config.moe_token_drop_policy == "position" else "probability",
        jitter=config.moe_input_jitter_eps or 0.0, **losses,
    )  # fmt: skip
