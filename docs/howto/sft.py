"""python docs/howto/sft.py CHECKPOINT_FOLDER"""

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import trimtab.integrations.transformers

trimtab.integrations.transformers.register()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], experts_implementation="trimtab")
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
texts = [f"{i} plus {i} is {2 * i}." for i in range(64)]
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(output_dir="runs/sft", max_steps=10, per_device_train_batch_size=4, max_length=64, report_to="none"),
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
)
trainer.train()
