"""The language model of a configuration: a class of its own, or the text part of a composite model.

Families without a class for their text part (Qwen3-VL-MoE, GLM-4.5V, Kimi-K2.5, ...) are built as transformers' whole
model without its towers and projectors, under the whole model's names. Called with tokens alone it is that model.
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from torch import nn

from trimtab.errors import ConfigError

REFUSED = {"diffusion_gemma": "it learns to denoise blocks of tokens, not to tell the next one"}
"""By `model_type`: families whose text part is not trained, and why."""
SEES_NO_TEXT: dict[str, tuple[str, ...]] = {"ernie4_5_vl_moe": ("vision_moe",)}
"""By `model_type`: modules within the text part that no token of text comes to; a transform of the checkpoint makes
them together with those of text, so they are built, and frozen."""


def language_model_class(config: Any) -> Any:
    """The class whose `from_config` and `from_pretrained` build the language model in a configuration.

    Raises ConfigError for a family of `REFUSED`, one without a language model, and one that takes no text alone.
    """
    kind, name = type(config), config.model_type
    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
    if causal is not None and causal is not transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(kind, None):
        return transformers.AutoModelForCausalLM
    if name in REFUSED:
        raise ConfigError(f"{name} is not trained: {REFUSED[name]}")
    if kind not in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ConfigError(f"{name} has no language model among transformers' causal and image-text models")
    whole = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind]
    arguments = [*inspect.signature(whole.forward).parameters.values()][1:]
    needed = [a.name for a in arguments if a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD]
    if needed and needed != ["input_ids"]:
        raise ConfigError(f"{name} is not trained: it takes no text without {', '.join(needed)}")
    return text_part(whole)


def text_part(whole: Any) -> Any:
    """The class `whole` without what is neither the decoder nor the head, under the same name: transformers finds the
    transforms of a checkpoint by it."""

    def build(self: Any, *args: Any, **options: Any) -> None:
        whole.__init__(self, *args, **options)
        _leave(self, {self.get_decoder(), self.get_output_embeddings()})

    part: Any = type(whole.__name__, (whole,), {"__init__": build, "__module__": whole.__module__, "part_of": whole})
    part.from_config = part._from_config  # as the Auto classes call it
    return part


def _leave(module: nn.Module, kept: set[Any]) -> None:
    """Remove the parameters below a module that are in none of the modules `kept`."""
    if module in kept:
        return
    for name, _ in [*module.named_parameters(recurse=False)]:
        module.register_parameter(name, None)
        module._is_hf_initialized = True  # type: ignore[assignment]  # or transformers would fill what is gone
    for name, child in [*module.named_children()]:
        if not kept.isdisjoint(child.modules()):
            _leave(child, kept)
        elif [*child.parameters()]:
            setattr(module, name, nn.Identity())


def freeze_what_sees_no_text(model: Any) -> None:
    """Freeze the modules of `SEES_NO_TEXT` of a model that is loaded."""
    for name in SEES_NO_TEXT.get(model.config.model_type, ()):
        for path, module in model.named_modules():
            if path.rpartition(".")[2] == name:
                module.requires_grad_(False)
