"""The MoE layer: router -> dispatch -> experts -> combine, and what every token gets (shared experts).

    y = from_latent(sum over k of  w[k] * expert[id[k]](to_latent(x)))  +  shared(x)

Legend: T tokens of this rank, D model dim, K experts per token, E experts, F expert hidden dim.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from trimtab.autograd import autocast_at_work, detached_reshape, narrowed, refuse_transforms
from trimtab.dispatch.checks import shape_problems
from trimtab.dispatch.dispatcher import Dispatcher
from trimtab.dispatch.facts import NO_FACTS, Facts
from trimtab.dispatch.options import CombineMode, check_combine
from trimtab.errors import ConfigError, InputError
from trimtab.experts.activations import check_activation
from trimtab.experts.grouped_module import check_options
from trimtab.experts.module import ExpertMLP
from trimtab.experts.shared import Projection, SharedExperts
from trimtab.experts.weight_grad import MainGradMode
from trimtab.kernels.choose import KernelChoice
from trimtab.kernels.tensor_checks import dense, described
from trimtab.operators import exportable
from trimtab.routing.config import RouterConfig
from trimtab.routing.recompute import hidden_from_ac_policy
from trimtab.validation import VALUES, check_flags, check_sizes, holds_values

if TYPE_CHECKING:
    from trimtab.experts.recipes.base import Recipe


@exportable
class MoEOutput(NamedTuple):
    """y: x's shape and dtype; zeros where the token mask is False.
    losses: name -> scalar, coefficient included, see `trimtab.routing.losses`. What a block under reentrant activation
        checkpointing returns must be their sum: torch tracks no tensor inside a dict there.
    loads_E: int64, kept slots of the tokens that this rank routes.
    ids_TK: int64 expert ids of the tokens that this rank routes, -1 where dropped.
    """

    y: Tensor
    losses: dict[str, Tensor]
    loads_E: Tensor
    ids_TK: Tensor


class _Own(NamedTuple):
    """The tokens that this rank routes, flat, zeros for masked ones; their shape, how many rows, and what packs say."""

    x_TD: Tensor
    mask_T: Tensor | None
    ids_TK: Tensor | None
    shape: torch.Size
    batch: int
    packed: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """One MoE layer. `build` makes it, with all experts on this rank.

    Args:
        dim: D, the width of a token.
        hidden: F, the width inside an expert.
        router: the routing decision; its weight is built in float32 at least. Casting it is fine: logits are computed
            in float32.
        activation, bias, main_grad, delay_wgrad, recipe, kernels, dtype, device: as in `ExpertMLP`.
        shared_hidden: hidden dim of the shared experts together, 0 for none.
        shared_gate: whether each token has a gate on the shared experts.
        latent_dim: tokens are projected to so many dims before dispatch and back after combine; experts live there.
        combine: as in `Dispatcher`.

    Raises:
        ConfigError: sizes, names, flags or a dtype that no layer can have, a router, recipe or kernels that are none,
            or a gate on shared experts that are not there.
    """

    dim: int
    hidden: int
    router: RouterConfig
    activation: str = "swiglu"
    bias: bool = False
    shared_hidden: int = 0
    shared_gate: bool = False
    latent_dim: int | None = None
    combine: CombineMode = "sum"
    main_grad: MainGradMode = "off"
    delay_wgrad: bool = False
    recipe: Recipe | None = None
    kernels: KernelChoice | str = "auto"
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.router, RouterConfig):
            raise ConfigError(f"router={self.router!r} must be a RouterConfig, as RouterConfig(num_experts=8, top_k=2)")
        check_sizes(dim=self.dim, hidden=self.hidden)
        check_sizes(least=0, shared_hidden=self.shared_hidden or 0)
        if self.latent_dim is not None:
            check_sizes(latent_dim=self.latent_dim)
        check_flags(bias=self.bias, shared_gate=self.shared_gate)
        check_activation(self.activation)
        check_options(
            dtype=self.dtype, main_grad=self.main_grad, delay_wgrad=self.delay_wgrad, recipe=self.recipe,
            kernels=self.kernels,
        )  # fmt: skip
        check_combine(self.combine)
        if self.shared_gate and not self.shared_hidden:
            raise ConfigError("shared_gate=True is a gate on shared experts: set shared_hidden")

    def build(self, layer: str = "") -> MoE:
        """The module.

        Args:
            layer: its name, for errors.

        Raises:
            BackendError: the recipe cannot run on the device.
        """
        return MoE(self, layer)


class MoE(nn.Module):
    """The layer that `MoEConfig` describes.

    `dispatcher` says where the experts are, and `_share` and `_whole` where the tokens: `trimtab.parallel` replaces
    them. `router` may be replaced by a module with the `forward` and `losses` of `Router`.

    `torch.compile` takes it as one graph, forward and backward, where the experts are all on this rank, and
    `torch.export` the same layers for any number of tokens from two on; a process that loads what was exported imports
    `trimtab.moe` first (`trimtab.experts.linear` for a `GroupedLinear`), for its operators. Graphs break around an
    exchange between ranks, and around what has state that a graph does not see: `main_grad`, `delay_wgrad`, a recipe,
    kernels of one's own, a generator for jitter.

    Under activation checkpointing hand in `context_fn=trimtab.replay_in_recompute`.

    Args:
        config: sizes and options.
        layer: the layer's name, for errors.
    """

    def __init__(self, config: MoEConfig, layer: str = "") -> None:
        super().__init__()
        c = self.config = config
        made: dict[str, Any] = {"dtype": c.dtype, "device": c.device}
        width = c.dim if c.latent_dim is None else c.latent_dim
        dtype = torch.promote_types(c.dtype or torch.get_default_dtype(), torch.float32)
        self.router = c.router.build(c.dim, dtype=dtype, device=c.device, layer=layer)
        self._own_router = type(self.router)
        self.experts = ExpertMLP(
            c.router.num_experts, width, c.hidden, activation=c.activation, bias=c.bias,
            main_grad=c.main_grad, delay_wgrad=c.delay_wgrad, recipe=c.recipe, kernels=c.kernels, **made,
        )  # fmt: skip
        self.fingerprint = _fingerprint(config)
        self.dispatcher = Dispatcher(c.router.num_experts, combine=c.combine, layer=layer, fingerprint=self.fingerprint)
        self.to_latent = None if c.latent_dim is None else Projection(c.dim, width, **made)
        self.from_latent = None if c.latent_dim is None else Projection(width, c.dim, **made)
        self.shared = None if not c.shared_hidden else SharedExperts(
            c.dim, c.shared_hidden, activation=c.activation, gated=c.shared_gate, **made
        )  # fmt: skip

    def forward(
        self, x: Tensor, *, token_mask: Tensor | None = None, ids: Tensor | None = None,
        sequence_ids: Tensor | None = None, num_sequences: int | None = None,
    ) -> MoEOutput:  # fmt: skip
        """Route, run the experts, add up. Every rank of the expert group must call.

        Args:
            x: [..., D] in float64, float32, bfloat16 or float16; of three dims and more the first is the batch.
            token_mask: bool [...], True for a real token; the others are not read and get zero output and gradient.
            ids: int [..., K] (E for K with expert choice), decisions to replay; scores and weights stay live.
            sequence_ids: int [...], where rows are packs of sequences: where the id changes another one begins; see
                `trimtab.sequence_ids`.
            num_sequences: how many a pack has at most. Each id 0..num_sequences - 1 is then one sequence of its row,
                wherever its positions lie. Needed for a `sequence_aux_loss` where ranks have positions of the same
                rows (tensor, context parallel), which give the same number.

        Raises:
            InputError: shapes or dtypes other than these, ids out of range, logits not finite (on CUDA without a group
                the last two are asserted on the device, see `Dispatcher.dispatch`); under a transform of `torch.func`.
            DesyncError: the ranks of the group are not in the same call.
        """
        refuse_transforms("MoE", self.dispatcher.layer)
        self.dispatcher.begin()
        own = self._take(x, token_mask, ids, sequence_ids, num_sequences)
        sent = self._sent(own.x_TD)
        with hidden_from_ac_policy():
            route = self.router(own.x_TD, token_mask_T=own.mask_T, ids_TK=own.ids_TK, batch=own.batch, **own.packed)
            rows = self.dispatcher._dispatch(
                sent, route.ids_TK, route.weights_TK, most_slots=route.most_slots,
                facts=self._facts(x, num_sequences or 0),
                problems=() if isinstance(self.router, self._own_router)
                else shape_problems(sent, route.ids_TK, route.weights_TK, None),
            )  # fmt: skip
            losses = self.router.losses(route)
            out = self.experts(rows.x_MD, rows.ids_MK, rows.weights_MK, **rows.known)
            combined = self.dispatcher.combine(out, rows)
        y_TD = combined if self.from_latent is None else self.from_latent(combined)
        if self.shared is not None:
            y_TD = y_TD + self.shared(own.x_TD)
        y = self._whole(detached_reshape(y_TD, own.shape, own.mask_T), x).to(x.dtype)
        return MoEOutput(y=y, losses=losses, loads_E=route.loads_E, ids_TK=route.ids_TK)

    def _take(
        self, x: Tensor, mask: Tensor | None, ids: Tensor | None, sequence_ids: Tensor | None, most: int | None
    ) -> _Own:
        """Check a call's arguments, and take what this rank routes of them."""
        self._check(x, mask, ids, sequence_ids)
        mine = self._share(x)
        packed: dict[str, Any] = {} if most is None else {"num_sequences": most}
        if sequence_ids is not None:
            packed["sequence_ids_T"] = self._share(sequence_ids[..., None]).flatten()
        x_TD, mask_T, ids_TK = mine.flatten(0, -2), None, None
        if ids is not None:
            ids_TK = self._share(ids).flatten(0, -2)
        if mask is not None:
            mask_T = self._share(mask[..., None]).flatten()
            x_TD = x_TD.masked_fill(~mask_T[:, None], 0)
        return _Own(x_TD, mask_T, ids_TK, mine.shape, mine.shape[0] if mine.dim() > 2 else 1, packed)

    def _share(self, t: Tensor) -> Tensor:
        """The tokens of the input that this rank routes, [*lead, any] -> [*lead', any]: of x [*lead, D], mask
        [*lead, 1] and ids [*lead, K]."""
        return t

    def _whole(self, y: Tensor, like: Tensor) -> Tensor:
        """This rank's [*lead', D] -> the output of all tokens, in the shape of the input `like` [*lead, D]."""
        return y

    def _sent(self, x_TD: Tensor) -> Tensor:
        """The tokens for the experts, in the dtype that ours will multiply them in."""
        sent = x_TD if self.to_latent is None else self.to_latent(x_TD)
        return narrowed(sent, self.experts) if autocast_at_work() and isinstance(self.experts, ExpertMLP) else sent

    def _facts(self, x: Tensor, num_sequences: int) -> Facts:
        """Facts of the call that the ranks of the expert group compare. num_sequences: 0 where it is not given."""
        return NO_FACTS

    def _check(self, x: Tensor, mask: Tensor | None, ids: Tensor | None, sequence_ids: Tensor | None) -> None:
        if not dense(x) or x.dim() < 2 or x.shape[-1] != self.config.dim or not holds_values(x.dtype):
            wanted = f"floating [..., {self.config.dim}], dense, in {VALUES}"
            raise InputError(f"x must be {wanted}, got {described(x)}", layer=self.dispatcher.layer, phase="route")
        lead, problems = tuple(x.shape[:-1]), []
        if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != lead):
            problems.append(f"token_mask must be bool {lead} as x is, got {mask.dtype} {tuple(mask.shape)}")
        if ids is not None and tuple(ids.shape[:-1]) != lead:
            problems.append(f"ids must be {(*lead, 'K')} as x is, got {tuple(ids.shape)}")
        if sequence_ids is not None and tuple(sequence_ids.shape) != lead:
            problems.append(f"sequence_ids must be int {lead} as x is, got {tuple(sequence_ids.shape)}")
        if problems:
            raise InputError("; ".join(problems), layer=self.dispatcher.layer, phase="route")


def _fingerprint(config: MoEConfig) -> str:
    """The configuration in words, as far as it must be the same on every rank and is not the default."""
    own = ("main_grad", "delay_wgrad", "kernels", "device", "router")

    def said(config: MoEConfig | RouterConfig) -> str:
        named = [(f, getattr(config, f.name)) for f in fields(config) if f.name not in own]
        return ", ".join(f"{f.name} {getattr(value, 'name', value)}" for f, value in named if value != f.default)

    return f"{said(config)}, router: {said(config.router)}"
