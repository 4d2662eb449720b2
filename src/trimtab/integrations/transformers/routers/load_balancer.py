"""Balance of the experts of transformers' models: by the selection bias, by losses over the global batch, or both.

Legend: T tokens, E experts, K experts per token, H bins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import Function

from trimtab.errors import ConfigError
from trimtab.integrations.transformers.routers.find import RouterPlace, find_routers
from trimtab.integrations.transformers.routers.selection_bias import (
    ADDED,
    SelectionBias,
    add_selection_bias,
    check_quantile,
)
from trimtab.integrations.transformers.routers.watch import Look, Seen, Watch
from trimtab.routing.balance import stepped_bias
from trimtab.routing.config import BIAS_RULES, RouterConfig
from trimtab.routing.decision import Basis, Routing
from trimtab.routing.losses import Groups, LossGroups, StepTotals, all_sum, balance_losses
from trimtab.routing.quantile import BINS, add_required, quantile_bias
from trimtab.validation import check_flags


class _WithLoss(Function):
    """A tensor whose backward is also that of a loss of weight 1, wherever the tensor goes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.like)


class LoadBalancer:
    """Keeps the experts of a model of transformers evenly loaded. In a loop of one's own:

        balance = LoadBalancer(model, bias="sign", aux_loss=0.001)     # before DDP and FSDP, and before the optimizer
        for micro-batches: (loss / balance.micro_batches).backward()
        optimizer.step()
        loads = balance.step()

    In a Trainer `LoadBalancerCallback` does so. Counted is what is routed in training mode and with gradients, once
    under gradient checkpointing, on all ranks, without the padding that a 2-d `attention_mask` shows.

    Args:
        model: before it is wrapped.
        bias: how the selection bias of each router moves at the end of an optimizer step: "sign" by `rate` towards
            the mean load (arXiv 2408.15664); "quantile" to what would have balanced the step (see
            `trimtab.routing.quantile`); None leaves it.
        rate: of "sign".
        add_bias: give routers that have no selection bias a buffer `selection_bias`, which is saved with the model.
            transformers alone does not read it: who loads such a model hands the folder in here, with bias=None to
            run it as it is. Without it, routers that have none are left as they are.
        aux_loss: coefficient of the families' own balance loss, E * sum of f * p per layer with f the share of tokens
            (it is K where even), averaged over layers. f are the global batch's: of all ranks, and of the step's
            micro-batches so far, or of all of them behind a `first_pass`; transformers takes one rank's micro-batch,
            and pools layers. Its own is turned off.
        z_loss: coefficient of the mean square of logsumexp(logits) (arXiv 2202.08906), averaged over layers.
        group: the ranks that share the global batch, over which gradients are averaged; all if not given.

    Losses join the backward where the router's weights are used, and not the number that the model gives as its loss:
    `losses` has their values, of the last step, coefficients included. They are in the scale of a loss that is
    averaged over tokens; a loss that is scaled (float16's scaler) has to be unscaled.

    Attributes:
        micro_batches: of an optimizer step, over which losses are averaged.
        losses: name -> value of the last step, a scalar on the device.

    Raises:
        ConfigError: no router, none with a bias where it is to move, options that do not fit the family.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        bias: str | None = "sign",
        rate: float = 1e-3,
        add_bias: bool | str | Path = False,
        aux_loss: float = 0.0,
        z_loss: float = 0.0,
        group: Groups = None,
    ) -> None:
        if bias is not None and bias not in BIAS_RULES:
            raise ConfigError(f"bias={bias!r} is not one of {BIAS_RULES}, or None")
        places = find_routers(model)
        if not places:
            raise ConfigError(f"no router in {type(model).__name__}: there is nothing to balance")
        self.rule, self.rate, self.micro_batches = bias, rate, 1
        self.losses: dict[str, Tensor] = {}
        self.first_passing = False
        self._given = group
        self._off = _own_losses_off(model) if aux_loss else (lambda: None)
        if isinstance(add_bias, bool):
            check_flags(add_bias=add_bias)
        self._selecting = add_selection_bias(places, None if add_bias is True else Path(add_bias)) if add_bias else []
        self._layers = [_Layer(self, place, len(places), aux_loss, z_loss, bool(add_bias)) for place in places]
        if bias is not None and not any(layer.bias for layer in self._layers):
            raise ConfigError(
                f"the routers of {type(model).__name__} have no selection bias: add_bias=True gives them one, which is "
                "saved with the model; or balance by aux_loss= with bias=None"
            )
        see = {layer.place.name: layer.see for layer in self._layers}
        self._leave = Watch.of(model, places).add(Look(lambda seen: see[seen.place.name](seen)))

    @property
    def group(self) -> Groups:
        """The ranks over which counts and losses are summed."""
        if self._given is None and dist.is_initialized() and dist.get_world_size() > 1:
            return dist.group.WORLD
        return self._given

    @contextmanager
    def first_pass(self) -> Iterator[None]:
        """Within, run the model on every micro-batch of the coming step: loads of the whole step are then known before
        its first backward, and the step's losses are those of one batch, however it is cut, also into micro-batches of
        different sizes. It costs a forward for each, without gradients, and is exact where the model draws nothing (no
        dropout or jitter) in front of a router. Every rank comes here; one all-reduce. `step` forgets them.
        """
        self.first_passing = True
        try:
            with torch.no_grad():
                yield
        finally:
            self.first_passing = False
        for layer, loads_E in zip(self._layers, self._global_loads(), strict=True):
            layer.totals = StepTotals(tokens=loads_E.sum() / layer.place.top_k, counts_E=loads_E)
            layer.counts_E.zero_()

    def _global_loads(self) -> tuple[Tensor, ...]:
        counts = all_sum(torch.cat([layer.counts_E for layer in self._layers]), self.group)
        return torch.split(counts, [layer.place.num_experts for layer in self._layers])

    @torch.no_grad()
    def step(self) -> dict[str, Tensor]:
        """End an optimizer step: move the biases, forget the step's counts, and return them: slots per expert on all
        ranks, [E] int64 by router. Every rank calls; one all-reduce, with "quantile" two."""
        loads = self._global_loads()
        histograms = [layer.histogram_EH for layer in self._layers if layer.histogram_EH is not None]
        sums: Any = iter(())
        if histograms:
            whole = all_sum(torch.cat([histogram.flatten() for histogram in histograms]), self.group)
            sums = iter(torch.split(whole, [histogram.numel() for histogram in histograms]))
        for layer, loads_E in zip(self._layers, loads, strict=True):
            if layer.histogram_EH is not None and layer.bias is not None:
                required_EH = next(sums).view_as(layer.histogram_EH)
                layer.bias.write(quantile_bias(required_EH, layer.bias.read(), layer.place.top_k))
            elif layer.bias is not None and self.rule == "sign":
                layer.bias.write(stepped_bias(layer.bias.read(), loads_E, self.rate))
        values: dict[str, Tensor] = {}
        for layer in self._layers:
            for name, value in layer.values.items():
                values[name] = values[name] + value if name in values else value
            layer.reset()
        self.losses = values
        return {layer.place.name: loads_E for layer, loads_E in zip(self._layers, loads, strict=True)}

    def remove(self) -> None:
        """The model routes, and computes its losses, as before; biases stay where they are."""
        self._leave()
        for wrapped in self._selecting:
            wrapped.remove()
        self._off()


class _Layer:
    """One router: its counts in this step, its bias, its losses."""

    def __init__(
        self, balance: LoadBalancer, place: RouterPlace, layers: int, aux_loss: float, z_loss: float, added: bool
    ) -> None:
        self.balance, self.place = balance, place
        E, K = place.num_experts, place.top_k
        device = next(place.module.parameters()).device
        has_bias = bool(place.bias) or (added and hasattr(place.module, ADDED))
        self.bias = SelectionBias(place) if has_bias and balance.rule else None
        if z_loss and place.rule.score == "given":
            raise ConfigError(f"{place.name} ({place.family}): z_loss needs logits, and this router gives scores")
        self.config = RouterConfig(
            num_experts=E, top_k=K, score="softmax" if place.rule.score == "softmax" else "sigmoid",
            global_aux_loss=aux_loss * K / layers, z_loss=z_loss / layers,
        )  # fmt: skip
        self.counts_E = torch.zeros(E, dtype=torch.int64, device=device)
        self.histogram_EH: Tensor | None = None
        if self.bias is not None and balance.rule == "quantile":
            check_quantile(place)
            self.histogram_EH = torch.zeros(E, BINS, dtype=torch.int64, device=device)
        self.reset()

    def reset(self) -> None:
        """A step begins."""
        self.counts_E.zero_()
        if self.histogram_EH is not None:
            self.histogram_EH.zero_()
        self.values: dict[str, Tensor] = {}
        self.totals: StepTotals | None = None
        self._before_E: Tensor | None = None
        self._so_far_E: Tensor | None = None

    def see(self, seen: Seen) -> None:
        """Count one run of the router, and let its losses join the backward."""
        if self.balance.first_passing:
            self.counts_E += seen.chosen_E
            return
        if not self.place.module.training or not torch.is_grad_enabled():
            return
        if seen.first:
            self.counts_E += seen.chosen_E
            self._before_E = self._so_far_E
            if self.histogram_EH is not None and self.bias is not None:
                # Detached: a checkpoint's second run, which saves the same tensors as the first, does not come here.
                scores_TE = self.place.rule.scores(self.place.module, seen.logits_TE.detach())
                add_required(self.histogram_EH, scores_TE, self.bias.read(), self.place.top_k, seen.real_T)
        if (self.config.global_aux_loss or self.config.z_loss) and seen.logits_TE.requires_grad:
            self._join_losses(seen)

    def _join_losses(self, seen: Seen) -> None:
        logits_TE = seen.logits_TE.to(torch.promote_types(seen.logits_TE.dtype, torch.float32))
        chosen_TK, chosen_E = seen.chosen_TK, seen.chosen_E
        basis = Basis(chosen_TK, chosen_TK, chosen_E, seen.scores_TE.to(logits_TE.dtype), seen.real_T, 1, None)
        found, counts_E = balance_losses(
            Routing(chosen_TK, seen.weights_TK, chosen_E, logits_TE, basis),
            config=self.config, groups=LossGroups(batch=self.balance.group), totals=self.totals,
            counts_before_E=self._before_E,
        )  # fmt: skip
        if self.totals is None:
            found = {name: loss / self.balance.micro_batches for name, loss in found.items()}
        if seen.first and counts_E is not None:
            self._so_far_E = counts_E if self._before_E is None else self._before_E + counts_E
            for name, loss in found.items():
                self.values[name] = self.values.get(name, 0) + loss.detach()
        loss, outputs = sum(found.values(), logits_TE.new_zeros(())), seen.outputs
        carrier = next((i for i, output in enumerate(outputs) if output is seen.weights_TK), 0)
        seen.outputs = tuple(_WithLoss.apply(o, loss) if i == carrier else o for i, o in enumerate(outputs))  # type: ignore[no-untyped-call]


def _own_losses_off(model: nn.Module) -> Callable[[], None]:
    """Take the model's own balance loss out of its loss; returns what puts it back.

    Raises:
        ConfigError: it asks for one with a coefficient that is only in its configuration.
    """
    found = {
        module: module.router_aux_loss_coef for module in model.modules() if hasattr(module, "router_aux_loss_coef")
    }
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not found and getattr(text, "output_router_logits", False):
        raise ConfigError(f"{type(model).__name__} adds a balance loss of its own: set output_router_logits=False")

    def put(values: dict[Any, Any]) -> None:
        for module, value in values.items():
            module.router_aux_loss_coef = value

    put(dict.fromkeys(found, 0.0))
    return partial(put, found)
