"""torchrun --nproc-per-node 2 examples/grpo_replay.py CHECKPOINT_FOLDER OUT [--no-replay] [--steps N] [--seed N]

GRPO in float32 on ranks that share the experts, one or several. A process of its own samples in bfloat16
(rollout_worker.py, which stands where vLLM would) and picks other experts for some tokens; the trainer takes its picks.
It learns to answer in vowels. The log, and OUT/trainer_state.json, say how far the trainer's log-probabilities are from
those of the rollout: those that it trains on (rollout/…), and those of its own picks (rollout/live/…).

Legend: B sequences, L positions, T tokens of completions, N tokens times layers, K experts per token.
"""

import argparse
import os
import subprocess
import sys
from itertools import islice
from multiprocessing import Pipe
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig
from trl import GRPOConfig, GRPOTrainer

import trimtab
import trimtab.integrations.transformers


def vowels(completions, **_):
    """The share of each answer that is vowels."""
    return [sum(letter in "aeiou" for letter in answer) / max(len(answer), 1) for answer in completions]


class Rollout:
    """What TRL calls for samples: the first rank asks the worker, for all ranks."""

    def __init__(self, weights):
        self.weights, self.pipe, self.calls = weights, None, 0

    def __call__(self, prompts, trainer):
        trainer.model.save_pretrained(self.weights)  # every rank: each has a part
        prompts = trainer.processing_class(prompts)["input_ids"]
        everyones, answers = gather_object(prompts), [None]
        if trainer.accelerator.is_main_process:
            seed = 1_000_000 * trainer.args.seed + self.calls
            answers = [self.ask(self.weights, everyones, trainer.max_completion_length, seed)]
        self.calls += 1
        broadcast_object_list(answers)
        first = trainer.accelerator.process_index * len(prompts)
        mine = answers[0][first : first + len(prompts)]
        trainer.records = [answer.pop("routed_experts") for answer in mine]
        return {"prompt_ids": prompts} | {key: [answer[key] for answer in mine] for key in mine[0]}

    def ask(self, *request):
        if self.pipe is None:
            self.pipe, theirs = Pipe()
            worker = Path(__file__).with_name("rollout_worker.py")
            subprocess.Popen([sys.executable, worker, str(theirs.fileno())], pass_fds=[theirs.fileno()])
            theirs.close()
        self.pipe.send(request)
        return self.pipe.recv()


def told(model, records):
    """The model, called with some sequences: each takes the experts of its record."""
    left = iter(records)

    def call(**batch):
        mask_BL = batch["attention_mask"]
        own = list(islice(left, len(mask_BL)))
        decisions = trimtab.rollout_decisions(model, own, attention_mask=mask_BL)
        with trimtab.replay(model, decisions):
            return model(**batch)

    return call


class ReplayTrainer(GRPOTrainer):
    """GRPO whose log-probabilities, the old ones and those in the loss, are of the experts that sampled."""

    replay = True
    records = None  # routed_experts of the sequences at hand

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)  # calls Rollout, then for the old log-probabilities
        self._compare(batch)
        return batch | {"routed_experts": self.records}  # shuffled and cut into micro-batches as the rest is

    def _compute_loss(self, model, inputs):
        self.records = inputs["routed_experts"]
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(self, model, *inputs, **options):
        model = told(model, self.records) if self.replay else model
        return super()._get_per_token_logps_and_entropies(model, *inputs, **options)

    @torch.no_grad()
    def _compare(self, batch):
        """Log the distance between rollout and trainer, over all ranks."""
        ids_BL, mask_BL = (torch.cat([batch[f"prompt_{x}"], batch[f"completion_{x}"]], dim=1) for x in ("ids", "mask"))
        length = batch["completion_ids"].shape[1]
        with trimtab.record(self.model) as recording:
            live_BL, *_ = super()._get_per_token_logps_and_entropies(self.model, ids_BL, mask_BL, length)
        told_ids = trimtab.rollout_decisions(self.model, self.records, attention_mask=mask_BL).ids
        recorded = told_ids[..., 0] >= 0
        told_NK, live_NK = told_ids[recorded], recording.decisions().ids.cpu()[recorded]
        moved_NK = (told_NK[:, :, None] != live_NK[:, None, :]).all(-1)
        logged = {"other_experts": moved_NK.flatten()}
        mask = batch["completion_mask"].bool()
        for kind, logps_BL in {"": batch["old_per_token_logps"], "live/": live_BL}.items():
            log_ratio_T = (logps_BL - batch["sampling_per_token_logps"])[mask]
            ratio_T = log_ratio_T.exp()
            logged[f"{kind}logp_diff"] = log_ratio_T.abs()
            logged[f"{kind}kl"] = ratio_T - 1 - log_ratio_T
            logged[f"{kind}clipped"] = (ratio_T < 1 - self.epsilon_low) | (ratio_T > 1 + self.epsilon_high)
        for name, values in logged.items():
            here = torch.tensor([values.double().sum(), len(values)], device=self.accelerator.device)
            total, count = self.accelerator.reduce(here)
            self._metrics["train"][f"rollout/{name}"].append(float(total / count))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoint")
parser.add_argument("out")
parser.add_argument("--replay", action=argparse.BooleanOptionalAction, default=True)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()

ranks = int(os.environ["WORLD_SIZE"])
trimtab.integrations.transformers.register()
model = AutoModelForCausalLM.from_pretrained(
    options.checkpoint,
    dtype=torch.float32,
    experts_implementation="trimtab",
    distributed_config=DistributedConfig(ep_size=ranks, fsdp_size=ranks, ep_implementation="trimtab"),
)
trainer = ReplayTrainer(
    model=model,
    reward_funcs=vowels,
    rollout_func=Rollout(f"{options.out}/weights"),
    args=GRPOConfig(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=16 // ranks,
        gradient_accumulation_steps=2,
        num_generations=8,
        num_iterations=2,  # two steps on each rollout: the second needs the old log-probabilities
        max_completion_length=48,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=options.seed,
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in ("def ", "class ", "import ", "return ")]),
    processing_class=AutoTokenizer.from_pretrained(options.checkpoint),
)
trainer.replay = options.replay
trainer.train()
trainer.save_model(options.out)
trainer.save_state()
