"""torchrun --nproc-per-node 2 examples/finetune.py CHECKPOINT_FOLDER"""

import sys

import torch
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import trimtab
import trimtab.integrations.transformers

trimtab.integrations.transformers.register()
ranks = DistributedConfig(ep_size=2, fsdp_size=2, ep_implementation="trimtab")
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1],
    experts_implementation="trimtab",
    distributed_config=ranks,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
ids = torch.randint(0, model.config.vocab_size, (2, 64))  # every rank draws its own batch
for step in range(10):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    trimtab.clip_grad_norm_(model, 1.0)  # torch's takes no experts on a mesh of their own
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}  loss {loss.item():.3f}")
