"""python examples/sft_lora.py CHECKPOINT_FOLDER DATA.jsonl OUT   (lines with "text")"""

import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import trimtab
import trimtab.integrations.transformers
from trimtab.integrations.transformers import QuantizedExpertsConfig, lora_config

checkpoint, data, out = sys.argv[1:]
trimtab.integrations.transformers.register()
model = AutoModelForCausalLM.from_pretrained(
    checkpoint, experts_implementation="trimtab", quantization_config=QuantizedExpertsConfig("nf4")
)
trainer = SFTTrainer(
    model=model,
    peft_config=lora_config(model, rank=8, targets=["experts", "attention"]),
    args=SFTConfig(
        output_dir=out,
        max_steps=10,
        per_device_train_batch_size=4,
        max_length=64,
        learning_rate=1e-3,
        logging_steps=1,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=load_dataset("json", data_files=data, split="train"),
    processing_class=AutoTokenizer.from_pretrained(checkpoint),
)
print(trimtab.summary(trainer.model))  # routed experts: quantized, and their adapters trained
trainer.train()
trainer.save_model(out)  # the adapters, as peft has them
