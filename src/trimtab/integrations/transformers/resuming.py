"""A checkpoint with a key per expert, loaded into a model whose experts are stacked: refused where it would change it.

transformers saves experts under the names of a model's first release, `….experts.3.gate_proj.weight`, and stacks them
in `from_pretrained` alone. Its Trainer resumes, and loads the best model, by `load_state_dict(…, strict=False)`: every
expert would keep what it has. State that has been converted has the model's own keys, and passes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.errors import InputError

_ONE_EXPERT = re.compile(r"(^|\.)experts\.\d+\.")


def refuse_unstacked(base: Any, shown: Any, check: Any) -> None:
    """Have `load_state_dict` of `base`, transformers' class of all models, raise InputError before anything is loaded
    where experts would be left out that are not the model's already, as `shown` has its state. Each
    load is shown to `check` before. Again is harmless."""
    if "load_state_dict" in vars(base):
        return

    def load_state_dict(self: Any, state_dict: Any, strict: bool = True, *args: Any, **kwargs: Any) -> Any:
        if not strict and (changed := _left_out(self, state_dict, shown)):  # a strict load leaves nothing out
            name = type(self).__name__
            raise InputError(
                f"{changed[0]} and {len(changed) - 1} more tensors of single experts would not be loaded: {name} holds "
                "its experts stacked, and transformers' Trainer (resume_from_checkpoint, load_best_model_at_end) does "
                f"not stack them. Make the model by {name}.from_pretrained(CHECKPOINT), which does; then it resumes"
            )
        return super(base, self).load_state_dict(state_dict, strict, *args, **kwargs)

    def load(self: Any, state: Any, prefix: str, *args: Any) -> None:
        check(self, state, prefix)
        super(base, self)._load_from_state_dict(state, prefix, *args)

    base.load_state_dict, base._load_from_state_dict = load_state_dict, load


def _left_out(model: Any, state_dict: Mapping[str, Any], shown: Any) -> list[str]:
    """Keys of single experts that the model does not know and whose values it does not have."""
    own: dict[str, Tensor] = dict(nn.Module.state_dict(model))
    unknown = [key for key in state_dict if _ONE_EXPERT.search(key) and key not in own]
    if not unknown:
        return []
    from transformers.core_model_loading import revert_weight_conversion

    with shown(model, own):  # what it would save
        saved = revert_weight_conversion(model, own)
    own = {k: saved[k] for k in unknown if k in saved and not saved[k].is_meta}
    return [k for k in unknown if k not in own or not torch.equal(state_dict[k].to(own[k]), own[k])]
