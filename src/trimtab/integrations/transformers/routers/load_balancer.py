"""Balance of the experts of transformers' models: by the selection bias, by losses over the global batch, or both.

Legend: E experts.
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

from trimtab.errors import ConfigError
from trimtab.integrations.transformers.routers import selection_bias
from trimtab.integrations.transformers.routers.find import find_routers
from trimtab.integrations.transformers.routers.observe import Observed, observing
from trimtab.routing.balance import stepped_bias
from trimtab.routing.config import BIAS_RULES
from trimtab.routing.losses import Groups, StepTotals
from trimtab.routing.observers import ADDED, BalanceLosses, Loads, Quantiles, SelectionBias
from trimtab.routing.port import Observer
from trimtab.routing.quantile import quantile_bias
from trimtab.validation import check_flags


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
            the mean load (arXiv 2408.15664); "quantile" to what would have evened out the step (see
            `trimtab.routing.quantile`); None leaves it.
        rate: how far "sign" moves a bias in a step.
        add_bias: give routers that have no selection bias a buffer `selection_bias`, which is saved with the model.
            transformers alone does not read it: who loads such a model hands the folder in here, with bias=None to
            run it as it is. Without it, routers that have none are left as they are.
        aux_loss: coefficient of the families' own balance loss, E * sum of f * p per layer with f the share of tokens
            (it is K where even), averaged over layers. f are the global batch's: of all ranks, and of the step's
            micro-batches so far, or of all of them behind a `first_pass`; transformers takes one rank's micro-batch,
            and pools layers. Its own is turned off.
        z_loss: coefficient of the mean square of logsumexp(logits) (arXiv 2202.08906), averaged over layers.
        group: the ranks that share the global batch, over which gradients are averaged; all if not given.

    With peft make it of the PeftModel, whose `save_pretrained` then puts the biases into its file as well. peft reads
    them back, also where a Trainer resumes. It makes no buffers: for added biases hand in its folder as `add_bias`.

    Losses join the backward where the router's weights are used, and not the number that the model gives as its loss:
    `losses` has their values, of the last step, coefficients included. They are in the scale of a loss that is
    averaged over tokens; a loss that is scaled (float16's scaler) has to be unscaled.

    Attributes:
        losses: name -> value of the last step, a scalar on the device.

    Raises:
        ConfigError: no router, none with a bias where it is to move, options that do not fit the family.
    """

    def __init__(
        self, model: nn.Module, *, bias: str | None = "sign", rate: float = 1e-3, add_bias: bool | str | Path = False,
        aux_loss: float = 0.0, z_loss: float = 0.0, group: Groups = None,
    ) -> None:  # fmt: skip
        if bias is not None and bias not in BIAS_RULES:
            raise ConfigError(f"bias={bias!r} is not one of {BIAS_RULES}, or None")
        places = find_routers(model)
        if not places:
            raise ConfigError(f"no router in {type(model).__name__}: there is nothing to balance")
        self.rule, self.rate = bias, rate
        self.losses: dict[str, Tensor] = {}
        self._model, self._given = model, group
        if isinstance(add_bias, bool):
            check_flags(add_bias=add_bias)
        if add_bias:
            selection_bias.add_selection_bias(places, None if add_bias is True else Path(add_bias))
        biased = [place for place in places if place.bias or (add_bias and hasattr(place.module, ADDED))]
        if bias is not None and not biased:
            raise ConfigError(
                f"the routers of {type(model).__name__} have no selection bias: add_bias=True gives them one, which is "
                "saved with the model; or balance by aux_loss= with bias=None"
            )
        if bias == "quantile":
            for place in biased:
                selection_bias.check_quantile(place)
        held = {place.name: selection_bias.HeldBias(place) for place in biased if bias or not place.bias}
        selection_bias.save_with_peft(model, held.values())
        self._biases = held if bias else {}
        self._loads = Loads()
        self._quantiles = Quantiles({name: b.read for name, b in self._biases.items()} if bias == "quantile" else {})
        self._balance = BalanceLosses(aux_loss=aux_loss, z_loss=z_loss, group=lambda: self.group)
        observers: list[Observer] = [SelectionBias()] if add_bias else []
        observers += [self._loads, *([self._quantiles] if bias == "quantile" else [])]
        self._observed = Observed(model, *observers, *([self._balance] if aux_loss or z_loss else []))
        self._off = own_losses_off(model) if aux_loss else (lambda: None)

    @property
    def micro_batches(self) -> int:
        """Of an optimizer step, over which losses are averaged."""
        return self._balance.micro_batches

    @micro_batches.setter
    def micro_batches(self, number: int) -> None:
        self._balance.micro_batches = number

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
        loads = Loads(every=True)
        with observing(self._model, loads), torch.no_grad():
            yield
        for name, counts in loads.take(self.group).items():
            tokens = counts.sum() / self._observed.routers[name].top_k
            self._balance.totals[name] = StepTotals(tokens=tokens, counts_E=counts[:-1])

    @torch.no_grad()
    def step(self) -> dict[str, Tensor]:
        """End an optimizer step: move the biases, forget the step's counts, and return them: slots per expert on all
        ranks, [E] int64 by router. Every rank calls; one all-reduce, with "quantile" two."""
        if self._biases:
            selection_bias.check_saved(self._model)
        loads = {name: counts[:-1] for name, counts in self._loads.take(self.group).items()}
        required = self._quantiles.take(self.group)
        for name, bias in self._biases.items():
            if self.rule == "quantile":
                bias.write(quantile_bias(required[name], bias.read(), self._observed.routers[name].top_k))
            else:
                bias.write(stepped_bias(bias.read(), loads[name], self.rate))
        self.losses = self._balance.values
        self._balance.reset()
        return loads

    def remove(self) -> None:
        """The model routes, and computes its losses, as before; biases stay where they are."""
        self._observed.remove()
        self._off()


def own_losses_off(model: nn.Module) -> Callable[[], None]:
    """Take the model's own balance loss out of its loss; returns what puts it back.

    Raises:
        ConfigError: it asks for one with a coefficient that is only in its configuration.
    """
    found = {own: own.router_aux_loss_coef for own in model.modules() if hasattr(own, "router_aux_loss_coef")}
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not found and getattr(text, "output_router_logits", False):
        raise ConfigError(f"{type(model).__name__} adds a balance loss of its own: set output_router_logits=False")

    def put(values: dict[Any, Any]) -> None:
        for module, value in values.items():
            module.router_aux_loss_coef = value

    put(dict.fromkeys(found, 0.0))
    return partial(put, found)
