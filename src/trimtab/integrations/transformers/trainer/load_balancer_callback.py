"""`LoadBalancer` in a `transformers.Trainer`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from trimtab.errors import ConfigError
from trimtab.integrations.transformers.routers.load_balancer import LoadBalancer


class LoadBalancerCallback(TrainerCallback):  # type: ignore[misc]
    """Balances the experts of the model that any `Trainer` (TRL's too) trains:

        trainer.add_callback(LoadBalancerCallback(trainer, bias="quantile", add_bias=True))

    The arguments are those of `LoadBalancer`, which is the attribute `balance`. Add it before `trainer.train()`.

    Raises:
        ConfigError: as `LoadBalancer`; losses with fp16, whose scaler does not know of them.
    """

    def __init__(self, trainer: Any, **options: Any) -> None:
        if trainer.args.fp16 and (options.get("aux_loss") or options.get("z_loss")):
            raise ConfigError("balance losses join the backward unscaled: train with bf16 instead of fp16")
        self.trainer, self.balance = trainer, LoadBalancer(trainer.model, **options)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Losses are averaged over the step's micro-batches, of which an epoch's last step may have fewer."""
        self.balance.micro_batches = self.trainer.current_gradient_accumulation_steps

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Every rank comes here."""
        self.balance.step()
