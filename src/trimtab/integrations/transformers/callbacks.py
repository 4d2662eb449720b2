"""A `transformers.Trainer` that balances experts, and that reports their loads wherever it reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from trimtab.atomic_write import write_whole
from trimtab.errors import ConfigError
from trimtab.integrations.transformers.model_loads import ModelLoads
from trimtab.integrations.transformers.routers.load_balancer import LoadBalancer
from trimtab.routing.loads import draw_loads, load_scalars, read_metrics
from trimtab.validation import check_sizes

LOADS, PICTURE = "loads.jsonl", "load.png"


class LoadCallback(TrainerCallback):  # type: ignore[misc]
    """How evenly the experts of a model are loaded while any `Trainer` (TRL's too) trains it:

        trainer.add_callback(LoadCallback(trainer))

    Every `every` steps and behind the last, what was routed since the last report, summed over all ranks, goes

    * to wherever the Trainer reports (tensorboard, wandb, trackio, mlflow, …) and into `state.log_history`: at most
      `most_keys` numbers, `loads/max_vio` (of the worst layer), `loads/max_vio_mean`, `loads/dead_experts` (all),
      `loads/entropy` (the least), `loads/drop_rate` (the largest), and `loads/NAME/LAYER` of single layers; trackers
      show them as `train/loads/…`;
    * to `folder/loads.jsonl`: one line, every layer's `max_vio`, `dead_experts`, `entropy`, `drop_rate` and
      `tokens_per_expert`, as `trimtab.routing.loads.load_metrics` has them, by the name of its router.

    At the end `folder/load.png` shows load by layer and expert, and imbalance by step (with matplotlib).

    Counted are the routers' decisions in training mode and with gradients, once under gradient checkpointing, without
    the padding that `attention_mask` shows. Evaluation and generation under `no_grad` are not.

    Args:
        trainer: the one that it is added to, from which reports go. Every rank adds one.
        every: steps between two reports.
        folder: the Trainer's `output_dir` if not given.
        most_keys: at least 5.

    Raises:
        ConfigError: numbers that are no sizes; when training begins, a model without routers whose decisions can be
            seen.
    """

    def __init__(self, trainer: Any, *, every: int = 10, folder: str | Path | None = None, most_keys: int = 64) -> None:
        check_sizes(every=every, most_keys=most_keys)
        if most_keys < 5:
            raise ConfigError(f"most_keys={most_keys}: there are five numbers of the model as a whole")
        self.trainer, self.every, self.most_keys = trainer, every, most_keys
        self.folder = Path(trainer.args.output_dir if folder is None else folder)
        self._loads: ModelLoads | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count from now on. Of a run that goes on, the lines up to its step stay."""
        self._stop()
        self._loads = ModelLoads(self.trainer.model)
        self._written = state.global_step
        if state.is_world_process_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / LOADS
            before = read_metrics(path) if state.global_step and path.exists() else ()
            lines = [json.dumps(record) + "\n" for record in before if record["step"] <= state.global_step]
            write_whole(path, "".join(lines))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report, where it is time. Every rank comes here; one all-reduce."""
        if self._loads is None or (state.global_step % self.every and state.global_step != state.max_steps):
            return
        scalars = load_scalars(self._write(state, self._loads), self.most_keys)
        state.log_history.append({**scalars, "step": state.global_step})
        for callback in self.trainer.callback_handler.callbacks:
            if callback is not self and not isinstance(callback, (PrinterCallback, ProgressCallback)):
                callback.on_log(args, state, control, logs=dict(scalars), **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count no longer, and draw. The steps since the last report, where training was ended early, become a line;
        trackers are closed by now."""
        if self._loads is not None and state.global_step != self._written:
            self._write(state, self._loads)
        self._stop()
        if state.is_world_process_zero:
            draw_loads(self.folder / LOADS, self.folder / PICTURE)

    def _write(self, state: Any, loads: ModelLoads) -> dict[str, dict[str, Any]]:
        """The records by layer of what was counted on all ranks since the last time, now a line of the file."""
        layers = loads.take(self.trainer.get_tp_size())
        if state.is_world_process_zero:
            with (self.folder / LOADS).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, "layers": layers}) + "\n")
        self._written = state.global_step
        return layers

    def _stop(self) -> None:
        if self._loads is not None:
            self._loads.remove()
        self._loads = None


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
