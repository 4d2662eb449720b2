"""What a run minimizes on one rank: the sum of the targets' losses, and a router's balance loss where there is one."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers.utils.generic import is_flash_attention_requested

from trimtab.integrations.transformers.model_loads import ModelLoads
from trimtab.routing.observers import BalanceLosses
from trimtab.train.assistant_spans import IGNORED


class Objective:
    """Of a model of transformers; its routers are observed from now on.

    balance: the routers' losses, in the objective where the model's configuration asks for one. loads: of its experts.
    """

    def __init__(self, model: Any, grad_accum: int) -> None:
        self._config = model.config  # of what may be wrapped later
        text = model.config.get_text_config()
        # Some families have no such loss.
        coefficient = getattr(text, "output_router_logits", False) and getattr(text, "router_aux_loss_coef", None)
        group = dist.group.WORLD if dist.is_initialized() else None
        self.balance = BalanceLosses(aux_loss=coefficient or 0.0, z_loss=0.0, group=lambda: group)
        self.balance.micro_batches = grad_accum
        self._without_logits = {"output_router_logits": False} if hasattr(text, "output_router_logits") else {}
        self.loads = ModelLoads(model, *([self.balance] if coefficient else []))

    def forward(self, model: Any, inputs: dict[str, Tensor], rows: Tensor | None = None) -> tuple[Any, Tensor]:
        """The outputs for a batch, and the sum of its targets' losses. rows: those whose tokens count in loads."""
        self.loads.observed.token_mask = inputs["real"] if rows is None else inputs["real"] & rows[:, None]
        given = {name: value for name, value in inputs.items() if name not in ("labels", "real")}
        if "position_ids" in inputs and is_flash_attention_requested(self._config):
            # Its kernels look at positions in a batch of one row alone.
            given = {name: value.flatten()[None] for name, value in given.items()}
        outputs = model(**given, **self._without_logits, use_cache=False)
        logits, targets = outputs.logits.float(), F.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return outputs, nll
