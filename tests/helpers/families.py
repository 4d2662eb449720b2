"""A tiny, seeded model of every family in the installed transformers that runs its experts through the registry: which
experts classes those are is read from their source."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .family_config import tiny_config

_DECORATED = re.compile(r"^@use_experts_implementation\b.*?^class (\w+)", re.MULTILINE | re.DOTALL)
_CLASS = re.compile(r"^class (\w+)\(", re.MULTILINE)
_NOT_TEXT = re.compile(r"Vision|Audio|Code2Wav|CodePredictor|Resampler|PreTrained")


class Family(NamedTuple):
    """One experts class: where it lives, and the class of its file that holds it, a language model if there is one."""

    module: str
    experts_class: str
    model_class: str


def _rank(model_class: str, experts_class: str) -> tuple[int, int, int]:
    """Language models first, then text towers, then whole multimodal models; the experts' own prefix wins."""
    prefix = re.sub(r"(Text)?Experts$", "", experts_class)
    kind = ("ForCausalLM", "TextModel", "ForTokenClassification", "Model", "ForConditionalGeneration")
    place = next(i for i, ending in enumerate(kind) if model_class.endswith(ending))
    return (not model_class.startswith(prefix), place, len(model_class))


def _model_class(source: str, experts_class: str) -> str:
    ending = re.compile(r"(ForCausalLM|ForTokenClassification|Model|ForConditionalGeneration)$")
    found = [c for c in _CLASS.findall(source) if ending.search(c) and not _NOT_TEXT.search(c)]
    return min(found, key=lambda c: _rank(c, experts_class))


@cache
def families() -> dict[str, Family]:
    """Every registered experts class by name: its model folder, plus the class where a folder has several."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("transformers is not installed")
    found: dict[str, Family] = {}
    for path in sorted((Path(spec.origin).parent / "models").glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        experts_classes, folder = _DECORATED.findall(source), path.parent.name
        for experts_class in experts_classes:
            name = folder if len(experts_classes) == 1 else f"{folder}.{experts_class}"
            module = f"transformers.models.{folder}.{path.stem}"
            found[name] = Family(module, experts_class, _model_class(source, experts_class))
    return found


Batch = dict[str, Tensor]


def family_names() -> list[str]:
    """Every family by name; reads source text only, so it is cheap at collection time."""
    return list(families())


def model_class(name: str) -> Any:
    """The best class of the family that holds its experts: a language model, else a text tower."""
    family = families()[name]
    return getattr(importlib.import_module(family.module), family.model_class)


def experts_class(name: str) -> Any:
    """The experts class that gives the family its place in the list."""
    family = families()[name]
    return getattr(importlib.import_module(family.module), family.experts_class)


def build_config(name: str) -> Any:
    """A configuration small enough for a model of well under a million parameters."""
    return tiny_config(model_class(name).config_class, name)


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Makes `torch.empty` return NaN, so that a parameter without an initialiser can't pass for a value."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    """Matrices become noise; vectors (norms, biases, decay rates) keep their meaning and get noise on top."""
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        if parameter.ndim >= 2 or not parameter.isfinite().all():
            parameter.copy_(0.15 * noise)
        else:
            parameter.add_(0.1 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):  # deepseek_v4 looks experts up by token id: a table that checkpoints fill
            experts = int(model.config.n_routed_experts)  # type: ignore[union-attr, arg-type]
            buffer.copy_(torch.rand(buffer.shape[0], experts).topk(buffer.shape[1]).indices)


def _cast(model: Any, dtype: torch.dtype) -> None:
    """The model in `dtype`, except what `from_pretrained` leaves in fp32 (in float64 too: forwards count on it)."""
    keep = [re.compile(rf"(^|\.){re.escape(part)}($|\.)") for part in model._get_dtype_plan(torch.bfloat16)]
    model.to(dtype)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and any(k.search(name) for k in keep):
            tensor.data = tensor.data.float()


def build_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The family's tiny model in eval mode: the same numbers for the same seed, no zero and no garbage in it."""
    cls, config = model_class(name), build_config(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with _poisoned_memory():
            model = cls._from_config(config, dtype=torch.float32)
        _randomise(model)
    if dtype != torch.float32:
        _cast(model, dtype)
    return model.eval()


def save_model(name: str, path: str | Path, seed: int = 0) -> Path:
    """`build_model(name, seed)` as a checkpoint folder that `from_pretrained` opens."""
    build_model(name, seed).save_pretrained(path)
    return Path(path)


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that run through the experts registry, by qualified name."""
    return {name: m for name, m in model.named_modules() if hasattr(m, "has_post_expert_norm")}


def _num_classes(model: Any) -> int:
    if type(model).__name__.endswith("ForTokenClassification"):
        return int(model.config.num_labels)
    return int(model.get_input_embeddings().num_embeddings)


def sample_batch(model: Any, batch: int, length: int, seed: int = 0, *, padded: bool = False) -> Batch:
    """Random token ids, a random label for each and, where experts are split by modality, a modality for each.

    padded: sequences are of other lengths, which an attention mask shows.
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    ids = torch.randint(vocabulary, (batch, length), generator=generator)
    labels = torch.randint(_num_classes(model), (batch, length), generator=generator)
    drawn = {"input_ids": ids, "labels": labels}
    if hasattr(model, "codec_embedding"):  # qwen3_omni_moe's talker is fed by another model
        del drawn["input_ids"]
        drawn["inputs_embeds"] = torch.randn(batch, length, model.config.hidden_size, generator=generator)
    if "moe_mm_token_type_ids" in inspect.signature(type(model).forward).parameters:
        drawn["moe_mm_token_type_ids"] = torch.randint(2, (batch, length), generator=generator)
    if padded:
        lengths = torch.randint(3, length, (batch, 1), generator=generator)
        drawn["attention_mask"] = (torch.arange(length) < lengths).long()
        drawn["labels"] = labels.masked_fill(drawn["attention_mask"] == 0, -100)
    return drawn


def _head(model: Any, width: int) -> Tensor:
    """A fixed random projection to the vocabulary, for text towers that have none of their own."""
    generator = torch.Generator().manual_seed(1234)
    return torch.randn(_num_classes(model), width, generator=generator) / width**0.5


def forward(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """(logits or last hidden state, scalar loss), whatever head the model has."""
    inputs = {k: v.to(model.dtype) if v.is_floating_point() else v for k, v in batch.items()}
    if hasattr(model, "lm_head") or type(model).__name__.endswith("ForTokenClassification"):
        output = model(**inputs)
        return output.logits, output.loss
    labels = inputs.pop("labels")
    hidden = model(**inputs).last_hidden_state
    logits = F.linear(hidden, _head(model, hidden.shape[-1]).to(hidden))
    return hidden, F.cross_entropy(logits.flatten(0, 1), labels.flatten())


# `from_pretrained` over more than one FSDP rank fills these with wrong numbers, with or without expert parallelism:
# their `self_attn.conv1d.weight` is joined from three tensors of the file shard by shard, so that its rows end up
# permuted (transformers 5.23).
LOADED_WRONG_WHEN_SHARDED = frozenset({"bailing_hybrid", "glm5_next", "kimi_linear"})

# And these it refuses to load so, whatever runs their experts: neither can lara_mini's `in_proj` of the file be split
# shard by shard, nor inkling2_loop's queries be joined (transformers 5.24).
REFUSED_WHEN_SHARDED = frozenset({"inkling2_loop", "lara_mini"})


def ep_capable(name: str) -> bool:
    """Whether tokens can travel to experts on other FSDP ranks: the plan dispatches them and shards nothing else, and
    the model can be loaded there.

    A plan that splits dense layers as well lays the expert mesh over the FSDP mesh, which PyTorch refuses at load
    ("Cannot concatenate overlapping meshes": diffusion_gemma and gemma4 in transformers 5.23).
    """
    plan = getattr(model_class(name).config_class, "base_model_ep_plan", None) or {}
    if name in REFUSED_WHEN_SHARDED:
        return False
    return "ep_dispatch_experts" in plan.values() and all(".experts" in key for key in plan)
