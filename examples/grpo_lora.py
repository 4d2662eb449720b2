"""python examples/grpo_lora.py CHECKPOINT_FOLDER OUT   (learns to answer in lower case)"""

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import trimtab
import trimtab.integrations.transformers
from trimtab.integrations.transformers import QuantizedExpertsConfig, lora_config


def lower_case(completions, **_):
    """The share of each answer that is lower case."""
    return [sum(letter.islower() for letter in answer) / max(len(answer), 1) for answer in completions]


checkpoint, out = sys.argv[1:]
trimtab.integrations.transformers.register()
model = AutoModelForCausalLM.from_pretrained(
    checkpoint, experts_implementation="trimtab", quantization_config=QuantizedExpertsConfig("nf4")
)
trainer = GRPOTrainer(
    model=model,
    peft_config=lora_config(model, rank=8, targets=["experts", "attention"]),
    reward_funcs=lower_case,
    args=GRPOConfig(
        output_dir=out,
        max_steps=3,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in ("def ", "class ", "import ", "return ")]),
    processing_class=AutoTokenizer.from_pretrained(checkpoint),
)
print(trimtab.summary(trainer.model))
trainer.train()
trainer.save_model(out)
