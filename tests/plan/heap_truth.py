"""The truth of a plan: the same step with real tensors, in a process whose malloc and mmap are counted by heap.c.

LD_PRELOAD=heap.so python heap_truth.py CASE.json      prints bytes
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any


def real_model(source: Any, options: dict[str, Any]) -> Any:
    """As a checkpoint would be loaded, with random weights."""
    import torch

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


def main() -> None:
    import torch

    from plan.cases import configured
    from trimtab.plan.trained import trained
    from trimtab.train.config import Mesh

    torch.set_num_threads(1)
    case = json.loads(Path(sys.argv[1]).read_text())
    heap = ctypes.CDLL(None)
    for name in ("heap_now", "heap_most"):
        getattr(heap, name).restype = ctypes.c_long
    for part in ("warm", "real"):
        source, config = configured(case, tiny=part == "warm")
        gc.collect()
        before = heap.heap_now()
        model = real_model(source, {"config": config})
        heap.heap_reset()
        steps(model, trained(model, config, Mesh.of(config, world=1)), case.get("foreach", False))
        most = heap.heap_most() - before
        del model
    print(json.dumps(most))


if __name__ == "__main__":
    main()
