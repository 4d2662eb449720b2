"""The truth of a plan of one rank: the same step with real tensors, for a process under the allocator's hook."""

from __future__ import annotations

from typing import Any

import torch

from plan.cases import configured
from plan.hooked import Heap
from trimtab.integrations.transformers import register
from trimtab.integrations.transformers.composite import language_model_class
from trimtab.plan.trained import trained
from trimtab.train.config import Mesh
from trimtab.train.loading import finished


def most_bytes(case: dict[str, Any]) -> int:
    """In malloc and mmap in a step of a case, over those before its model; once all was run before, for libraries keep
    buffers of their own from then on, as MKL does to pack matrices."""
    heap, (source, config) = Heap(), configured(case)
    register("truth", kernels=config.kernels)
    for _ in range(2):
        before = heap.now()
        model = language_model_class(source).from_config(source, dtype=torch.float32, experts_implementation="truth")
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        step = trained(finished(model.train(), config), config, Mesh.of(config, world=1))
        most = heap.most(step, case.get("foreach", False)) - before
        del model, step
    return most
