"""python docs/howto/sft.py CHECKPOINT_FOLDER DATA.jsonl   (lines with "text")"""

import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import trimtab.integrations.transformers

trimtab.integrations.transformers.register()
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="trimtab")
tokenizer = AutoTokenizer.from_pretrained(folder)
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir="runs/sft",
        max_steps=10,
        per_device_train_batch_size=4,
        max_length=64,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=load_dataset("json", data_files=sys.argv[2], split="train"),
    processing_class=tokenizer,
)
trainer.train()
