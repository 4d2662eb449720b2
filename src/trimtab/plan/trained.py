"""The step of `trimtab train`: the Trainer's own loss, clipping and optimizer, on batches without values."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import masking_utils

from trimtab.plan.stages import Step
from trimtab.train.config import Mesh, TrainConfig
from trimtab.train.loop import MoETrainer, arguments, own_optimizer
from trimtab.train.models import keeps_documents_apart
from trimtab.train.objective import Objective


def trained(model: Any, config: TrainConfig, mesh: Mesh) -> Step:
    """The step that a run of `config`, which is resolved, takes with a model that `build_model` has built."""
    trainer: Any = MoETrainer.__new__(MoETrainer)  # whose methods read no more than this
    trainer.model, trainer.mesh, trainer.args = model, mesh, arguments(config, replace(mesh, world=1))
    trainer.optimizer = trainer._mixed_mesh_grads = None
    trainer.optimizer_cls_and_kwargs = own_optimizer(config)
    trainer.accelerator = SimpleNamespace(clip_grad_norm_=torch.nn.utils.clip_grad_norm_)
    trainer.objective = Objective(model, config.grad_accum)
    shape, packed = (config.batch_size, config.seq_len or 0), keeps_documents_apart(model)

    def loss() -> Tensor:
        ids = torch.zeros(shape, dtype=torch.int64)
        inputs = dict.fromkeys(("input_ids", "labels", *(["position_ids"] if packed else [])), ids) | {"real": ids > 0}
        trainer._nll, trainer._targets = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
        # Packed conversations have masks; transformers reads positions to find that out.
        found = patch.object(masking_utils, "find_packed_sequence_indices", lambda ids: ids if packed else None)
        with torch.autocast("cpu", torch.bfloat16, enabled=trainer.args.bf16), found:
            made: Tensor = trainer.compute_loss(model, inputs)
        return made

    return Step(
        loss=loss,
        optimizer=trainer.create_optimizer,
        clip=lambda: trainer._clip_grad_norm(model),
        grad_accum=config.grad_accum,
    )
