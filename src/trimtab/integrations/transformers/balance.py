"""Balance of the experts of transformers' models: by the selection bias, by losses over the global batch, or both.

Legend: T tokens, E experts, K experts per token, H bins.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import Function

from trimtab.backward import not_in_graphs
from trimtab.errors import ConfigError
from trimtab.integrations.transformers.router_loads import FirstRuns, RealTokens
from trimtab.integrations.transformers.routers import RouterPlace, find_routers
from trimtab.integrations.transformers.selection_bias import ADDED, SelectionBias, add_selection_bias, check_quantile
from trimtab.routing.balance import stepped_bias
from trimtab.routing.config import RouterConfig
from trimtab.routing.decision import Basis, Routing
from trimtab.routing.losses import Groups, LossGroups, all_sum, balance_losses
from trimtab.routing.quantile import BINS, add_required, quantile_bias
from trimtab.routing.scores import count_ids
from trimtab.validation import check_flags

RULES = ("sign", "quantile")


class _WithLoss(Function):
    """A tensor whose backward is also that of a loss of weight 1, wherever the tensor goes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones_like(ctx.like)


class Balance:
    """Keeps the experts of a model of transformers evenly loaded. In a loop of one's own:

        balance = Balance(model, bias="sign", aux_loss=0.001)     # before DDP and FSDP, and before the optimizer
        for micro-batches: (loss / balance.micro_batches).backward()
        optimizer.step()
        loads = balance.step()

    In a Trainer `BalanceCallback` does so. Counted is what is routed in training mode and with gradients, once under
    gradient checkpointing, on all ranks, without the padding that a 2-d `attention_mask` shows.

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
            (it is K where even), averaged over layers. f are the global batch's: of all ranks, and of the micro-batches
            so far; transformers takes one rank's micro-batch, and pools layers. Its own is turned off.
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
        if bias is not None and bias not in RULES:
            raise ConfigError(f"bias={bias!r} is not one of {RULES}, or None")
        places = find_routers(model)
        if not places:
            raise ConfigError(f"no router in {type(model).__name__}: there is nothing to balance")
        self.rule, self.rate, self.micro_batches = bias, rate, 1
        self.losses: dict[str, Tensor] = {}
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
        self.tokens = RealTokens(model)

    @property
    def group(self) -> Groups:
        """The ranks over which counts and losses are summed."""
        if self._given is None and dist.is_initialized() and dist.get_world_size() > 1:
            return dist.group.WORLD
        return self._given

    @torch.no_grad()
    def step(self) -> dict[str, Tensor]:
        """End an optimizer step: move the biases, forget the step's counts, and return them: slots per expert on all
        ranks, [E] int64 by router. Every rank calls; one all-reduce, with "quantile" two."""
        counts = all_sum(torch.cat([layer.counts_E for layer in self._layers]), self.group)
        loads = torch.split(counts, [layer.place.num_experts for layer in self._layers])
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
        self.tokens.remove()
        for layer in self._layers:
            layer.hook.remove()
        for wrapped in self._selecting:
            wrapped.remove()
        self._off()


class _Layer:
    """One router: its counts in this step, its bias, its losses."""

    def __init__(
        self, balance: Balance, place: RouterPlace, layers: int, aux_loss: float, z_loss: float, added: bool
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
        self._first = FirstRuns()
        self.reset()
        # First among the hooks: transformers' own for expert parallelism makes ids local.
        self.hook = place.module.register_forward_hook(partial(self._see), prepend=True)

    def reset(self) -> None:
        """A step begins."""
        self.counts_E.zero_()
        if self.histogram_EH is not None:
            self.histogram_EH.zero_()
        self.values: dict[str, Tensor] = {}
        self._before_E: Tensor | None = None
        self._so_far_E: Tensor | None = None

    @not_in_graphs
    def _see(self, module: nn.Module, _args: Any, outputs: Any) -> Any:
        if not module.training or not torch.is_grad_enabled():
            return None
        first = self._first.here(module)
        logits_TE, weights_TK, ids_TK = self.place.rule.read(module, outputs)
        real_T = self.balance.tokens.among(ids_TK.shape[0])
        chosen_TK = ids_TK.detach().long()
        if real_T is not None:
            chosen_TK = chosen_TK.masked_fill(~real_T[:, None], -1)
        chosen_E = count_ids(chosen_TK, self.place.num_experts)
        if first:
            self.counts_E += chosen_E
            if self.histogram_EH is not None and self.bias is not None:
                scores_TE = self.place.rule.scores(module, logits_TE.detach())
                add_required(self.histogram_EH, scores_TE, self.bias.read(), self.place.top_k, real_T)
        if not (self.config.global_aux_loss or self.config.z_loss) or not logits_TE.requires_grad:
            return None
        if first:
            self._before_E = self._so_far_E
        wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        scores_TE = self.place.rule.scores(module, logits_TE).to(wide_TE.dtype)
        basis = Basis(chosen_TK, chosen_TK, chosen_E, scores_TE, real_T, 1, None)
        found, counts_E = balance_losses(
            Routing(chosen_TK, weights_TK, chosen_E, wide_TE, basis),
            config=self.config, groups=LossGroups(batch=self.balance.group), totals=None,
            counts_before_E=self._before_E,
        )  # fmt: skip
        found = {name: loss / self.balance.micro_batches for name, loss in found.items()}
        if first and counts_E is not None:
            self._so_far_E = counts_E if self._before_E is None else self._before_E + counts_E
            for name, loss in found.items():
                self.values[name] = self.values.get(name, 0) + loss.detach()
        carrier = next((i for i, output in enumerate(outputs) if output is weights_TK), 0)
        loss = sum(found.values(), wide_TE.new_zeros(()))
        return tuple(_WithLoss.apply(o, loss) if i == carrier else o for i, o in enumerate(outputs))  # type: ignore[no-untyped-call]


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
