"""One rank's training: `transformers.Trainer` with the three things that it leaves open or gets approximately.

The loss is the mean over all targets of the global batch (a router's balance loss, where the checkpoint's
configuration asks for one, is added to the objective and kept out of the number that is logged); each rank reads
its own share of the stream; and every step leaves one line of numbers summed over all ranks.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainingArguments

from trimtab.errors import TrimtabError
from trimtab.integrations.transformers.lora import average_replicated
from trimtab.integrations.transformers.routers.observe import Observed
from trimtab.optim import for_trainer
from trimtab.routing.loads import load_scalars
from trimtab.routing.observers import Loads
from trimtab.train.assistant_spans import IGNORED
from trimtab.train.config import MUON, Mesh, TrainConfig
from trimtab.train.objective import Objective
from trimtab.train.out_folder import sizes
from trimtab.train.packing import Blocks, RankBlocks
from trimtab.train.plan import Plan
from trimtab.train.report import METRICS
from trimtab.train.resume import Checkpoints, describe_run

LINE_STEPS = 10
"""Steps between the lines that stand for a bar where stderr is no terminal."""


def all_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum `values` over all ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def arguments(config: TrainConfig, mesh: Mesh) -> TrainingArguments:
    """The Trainer's arguments for a resolved configuration."""
    cpu = not torch.accelerator.is_available()
    made = TrainingArguments(
        output_dir=config.out,
        max_steps=config.max_steps or 0,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        gradient_accumulation_steps=config.grad_accum,
        learning_rate=config.lr or 0.0,
        lr_scheduler_type=config.scheduler,
        warmup_steps=config.warmup or 0,
        weight_decay=config.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        seed=config.seed,
        use_cpu=cpu,
        ddp_backend="gloo" if cpu and mesh.world > 1 else None,
        # FSDP2 casts by itself; without it the model needs autocast.
        bf16=config.dtype == "bfloat16" and mesh.fsdp * mesh.replicate == 1,
        save_strategy="no",
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=list(config.report_to) or "none",
        remove_unused_columns=False,
        **({} if config.optim in (None, MUON) else {"optim": config.optim}),
    )
    made._n_gpu = min(made.n_gpu, 1)  # of several GPUs the Trainer would make an nn.DataParallel
    return made


def own_optimizer(config: TrainConfig) -> tuple[Any, dict[str, Any]] | None:
    """What builds an optimizer that the Trainer does not have, and its options; None for one that it has."""
    made = {"lr": config.lr, "weight_decay": config.weight_decay}
    return (for_trainer, made) if config.optim == MUON else None


class MoETrainer(Trainer):  # type: ignore[misc]
    """`Trainer` for one mesh of ranks over an endless stream of blocks, by a plan whose data is ready and whose steps
    are known. After `train`, `state.global_step` says how many are taken."""

    def __init__(self, plan: Plan, model: Any, rank: int) -> None:
        config, mesh = plan.config, plan.mesh
        run = describe_run(config, mesh.data_size, plan.groups)
        self.checkpoints = checkpoints = Checkpoints(config, run, plan.checkpoint, sum(sizes(plan)))
        blocks = RankBlocks(
            plan.blocks(), batch=config.batch_size, rank=mesh.data_rank(rank), size=mesh.data_size, seed=config.seed,
            skip=checkpoints.start * config.grad_accum * config.batch_size,
        )  # fmt: skip
        own = own_optimizer(config)
        super().__init__(model=model, args=arguments(config, mesh), train_dataset=blocks, optimizer_cls_and_kwargs=own)
        # compute_loss divides by the targets of the whole accumulated batch.
        self.loss_is_scaled_for_ga = True
        self.mesh, self.metrics = mesh, plan.out / METRICS
        self.objective = Objective(model, config.grad_accum)
        self.balance, self.loads = self.objective.balance, self.objective.loads
        device = self.args.device
        # Sums of counts stay exact; Apple's GPUs have no float64.
        self._wide = torch.float32 if device.type == "mps" else torch.float64
        self._nll = torch.zeros((), dtype=self._wide, device=device)
        self._targets = self._nll.clone()
        self._tokens = config.batch_size * (config.seq_len or 0) * config.grad_accum * mesh.data_size
        self.held_out, self.eval_every = plan.eval_blocks(), config.eval_every or 0
        self._clock = time.perf_counter()
        self._ended = checkpoints.start
        self.remove_callback(ProgressCallback)
        self.remove_callback(PrinterCallback)
        self.bar = tqdm(total=config.max_steps, initial=self._ended, disable=rank > 0 or None)
        self._evaluated = ""

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Keep tensor parallelism from Accelerate, which refuses it on the CPU: model and data know of it."""
        options: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        options.pop("parallelism_config", None)
        return options

    def get_train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        """The blocks of this rank, in batches; they are shared out already, so Accelerate must not do it again."""
        return DataLoader(self.train_dataset, batch_size=self.args.per_device_train_batch_size)

    def _sync_replicated_trainable_parameters(self, model: Any) -> None:
        """What trains beside a sharded model lies whole on every rank: average its gradients as a backward ends."""
        if hasattr(self.model, "peft_config"):
            average_replicated(self.model)
        else:
            super()._sync_replicated_trainable_parameters(model)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Count on from the checkpoint's step. The stream is one endless epoch: there is none to skip."""
        told: tuple[int, int] = super()._init_training_state(*args, **kwargs)
        self.state.global_step = self.checkpoints.start
        return told

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        """Load the checkpoint into what the Trainer has just made: model, optimizer and schedule."""
        prepared = super()._prepare_for_training(*args, **kwargs)
        self.checkpoints.restore(self.model, self.optimizer, self.lr_scheduler)
        return prepared

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """The end of a step, its metrics written; called once more when training ends."""
        super()._maybe_log_save_evaluate(*args, **kwargs)
        step = self.state.global_step
        if step > self._ended:
            self._ended = step
            if self.checkpoints.after_step(step, self.model, self.optimizer, self.lr_scheduler):
                self.control.should_training_stop = True
            self._clock = time.perf_counter()  # a save is none of the next step's time

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict[str, torch.Tensor]], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor]:
        """The batches of one step, and the number of targets they hold over all data-parallel ranks."""
        if self.state.global_step == self.checkpoints.start:
            self._clock = time.perf_counter()  # the first step pays for its data, not for building the optimizer
        samples = [next(epoch_iterator) for _ in range(num_batches)]
        self.checkpoints.first_batch_drawn()
        targets = sum(int((sample["labels"][:, 1:] != IGNORED).sum()) for sample in samples)
        self._targets = all_sum(torch.tensor(float(targets), dtype=self._wide, device=device)) / self.mesh.tp
        return samples, self._targets

    def compute_loss(
        self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:  # fmt: skip
        """This rank's part of the objective; averaged over the data-parallel ranks it is the global mean."""
        outputs, nll = self.objective.forward(model, inputs)
        self._nll += nll.detach()
        loss = nll * (self.mesh.data_size / self._targets).float()
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def _evaluate(self, blocks: Blocks) -> dict[str, float]:
        """Mean loss over all targets of `blocks`, and the worst layer's imbalance. Every rank calls, and runs as many
        batches; a block that is there to fill up the last of them counts nowhere. Draws no random number."""
        size, batch = self.mesh.data_size, self.args.per_device_eval_batch_size
        first = self.mesh.data_rank(dist.get_rank() if dist.is_initialized() else 0) * batch
        sums, routed = torch.zeros(2, dtype=self._wide, device=self.args.device), Loads(every=True)
        self.model.eval()
        counting = Observed(self.model, routed)
        for start in range(0, len(blocks), size * batch):
            places = range(start + first, start + first + batch)
            samples = [blocks[place % len(blocks)] for place in places]
            stacked = {name: torch.stack([each[name] for each in samples]) for name in samples[0]}
            inputs = {name: tensor.to(self.args.device) for name, tensor in stacked.items()}
            filling = torch.tensor([place >= len(blocks) for place in places], device=self.args.device)
            inputs["labels"] = inputs["labels"].masked_fill(filling[:, None], IGNORED)
            with self.compute_loss_context_manager():
                _, nll = self.objective.forward(self.model, inputs, ~filling)
            sums += torch.stack([nll.to(self._wide), (inputs["labels"][:, 1:] != IGNORED).sum().to(self._wide)])
        counting.remove()
        self.model.train()
        nll, targets = all_sum(sums).tolist()
        loads = routed.records(dist.group.WORLD if dist.is_initialized() else None)
        worst = max(record["max_vio"] for record in loads.values())
        return {"eval_loss": nll / max(targets, 1.0), "eval_max_vio": worst}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Replace the Trainer's numbers of a step by the global ones and write them to the metrics file."""
        if "grad_norm" not in logs:  # the Trainer's closing summary
            return
        # The ranks of a TP group hold the same batch: the sum has it tp times.
        votes = torch.tensor(self.checkpoints.autosave.votes(), dtype=self._wide, device=self._nll.device)
        nll, stop, save = all_sum(torch.cat([self._nll[None], votes])).tolist()
        self.checkpoints.autosave.agree(stop > 0, save > 0)
        nll /= self.mesh.tp
        self._nll.zero_()
        self.balance.reset()
        now = time.perf_counter()
        step = self.state.global_step
        record = {
            "step": step, "loss": nll / self._targets.item(), "grad_norm": logs["grad_norm"],
            "lr": logs["learning_rate"], "tokens_per_second": self._tokens / (now - self._clock),
        }  # fmt: skip
        self._clock = now
        if not (math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])):
            raise TrimtabError(
                f"step {step}: loss {record['loss']}, gradient norm {record['grad_norm']}: the run has diverged; "
                "lower --lr or raise --warmup"
            )
        due = step % self.eval_every == 0 or step == self.args.max_steps or self.checkpoints.is_due(step)
        if self.held_out is not None and due:
            record |= self._evaluate(self.held_out)
        layers = self.loads.take(self.mesh.tp)
        super().log(record | load_scalars(layers), start_time)
        self._evaluated = f", eval {record['eval_loss']:.3f}" if "eval_loss" in record else self._evaluated
        shown = f"loss {record['loss']:.3f}, {record['tokens_per_second']:,.0f} tokens/s"
        self.bar.set_postfix_str(shown + self._evaluated, refresh=False)
        self.bar.update()
        if self.is_world_process_zero():
            told = step % LINE_STEPS == 0 or step in (self.checkpoints.start + 1, self.args.max_steps)
            if self.bar.disable and (told or "eval_loss" in record):
                print(f"step {step} of {self.args.max_steps}: {shown}{self._evaluated}", file=sys.stderr, flush=True)
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**record, "layers": layers}) + "\n")
