"""The truth of a plan of one rank: the same step with real tensors, for a process under the allocator's hook."""

from __future__ import annotations

from typing import Any

import torch

from plan.cases import configured
from plan.hooked import Heap
from trimtab.plan.trained import trained
from trimtab.train.config import Mesh


def real_model(source: Any, options: dict[str, Any]) -> Any:
    """As a checkpoint would be loaded, with random weights."""
    from trimtab.integrations.transformers import register
    from trimtab.integrations.transformers.composite import language_model_class
    from trimtab.train.loading import finished

    config = options["config"]
    register("truth", kernels=config.kernels)
    dtype = torch.bfloat16 if config.lora and config.dtype == "bfloat16" else torch.float32
    model = language_model_class(source).from_config(source, dtype=dtype, experts_implementation="truth")
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return finished(model, config)


def steps(model: Any, step: Any, foreach: bool, count: int = 2) -> None:
    """A loop that shares no code with the plan's."""
    model.train()
    optimizer = step.optimizer()
    for group in optimizer.param_groups if foreach else ():
        group["foreach"] = True
    for _ in range(count):
        for _ in range(step.grad_accum):
            step.loss().backward()
        step.clip()
        optimizer.step()
        optimizer.zero_grad()


def most_bytes(case: dict[str, Any]) -> int:
    """Most bytes in malloc and mmap of the real steps of a case, which were run before: libraries keep buffers of their
    own from then on, as MKL does to pack matrices."""
    heap, (source, config) = Heap(), configured(case)
    for _ in range(2):
        before = heap.now()
        model = real_model(source, {"config": config})
        heap.reset()
        steps(model, trained(model, config, Mesh.of(config, world=1)), case.get("foreach", False))
        most = heap.most() - before
        del model
    return most
