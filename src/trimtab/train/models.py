"""A model by name or path: what it is made of, and how it is loaded onto the ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import trimtab.integrations.transformers
from trimtab.checkpoint.ranks import on_every_rank
from trimtab.convert.layouts import experts_modules
from trimtab.errors import ConfigError, first_line
from trimtab.train.config import Mesh, TrainConfig
from trimtab.train.presets import PRESETS

IMPLEMENTATION = "trimtab"
ENCODED = ("nf4", "int8")
"""What experts are made while they are loaded."""
RESUMS = "replicated_with_grad_allreduce"
"""A style of transformers' tp plans, of norms over a head: its hook sums `.grad`, earlier micro-batches included."""


@dataclass(frozen=True)
class Facts:
    """What the launcher must know of a model before any rank starts.

    Attributes:
        experts: global number of experts by the name of each MoE layer's experts module.
        vocab_size: rows of the input embedding.
        positions: tokens of the longest sequence that its config.json is for, or None where that says none.
        plans: which of "tp", "ep" and "fsdp" the model class has a sharding plan for.
        packs: whether documents of one row that `position_ids` tell apart do not see each other.
        skeleton: the model, on the meta device.
        resums: whether its tp plan sums what a gradient holds so far, over the ranks, in every backward.
    """

    class_name: str
    experts: dict[str, int]
    plans: frozenset[str]
    vocab_size: int
    positions: int | None
    resums: bool
    packs: bool
    skeleton: Any

    @property
    def num_experts(self) -> int:
        """Experts per layer; where layers differ, the largest number that divides them all."""
        return math.gcd(*self.experts.values())


def is_preset(model: str) -> bool:
    """Whether `model` names a preset rather than a folder."""
    return model in PRESETS


def inspect(model: str, attn: str | None = None) -> Facts:
    """Build the model without weights and look. Raises ConfigError for a path that is no MoE language model."""
    import torch
    from transformers import AutoModelForCausalLM

    config = PRESETS[model].build() if is_preset(model) else _read_config(model)
    try:
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config, attn_implementation=attn)
    except (ValueError, ImportError) as error:
        if attn is not None:
            raise ConfigError(f"--attn {attn}: {first_line(error)}") from error
        raise ConfigError(f"--model {model}: not a causal language model ({first_line(error)})") from error
    experts = {name: int(cast(int, module.num_experts)) for name, module in experts_modules(skeleton).items()}
    name = type(skeleton).__name__
    if not experts:
        raise ConfigError(
            f"--model {model}: {name} has no experts that transformers hands to an implementation; trimtab trains "
            "Mixture-of-Experts models whose experts module it does"
        )
    plans = frozenset(kind for kind in ("tp", "ep", "fsdp") if getattr(skeleton, f"{kind}_plan", None))
    rows = int(skeleton.get_input_embeddings().num_embeddings)
    positions = getattr(skeleton.config, "max_position_embeddings", None)
    resums = RESUMS in (skeleton.tp_plan or {}).values()
    return Facts(name, experts, plans, rows, positions, resums, keeps_documents_apart(skeleton), skeleton)


def keeps_documents_apart(model: Any) -> bool:
    """Whether masks and `position_ids` that begin anew keep documents of one row apart in every layer: not where a
    state or a convolution runs over the row, or keys are compressed or chosen for a block of it."""
    from torch import nn

    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    mixes = any(isinstance(module, nn.Conv1d) for module in model.modules())
    return not mixes and kinds <= {"full_attention", "sliding_attention"}


def mask_by_positions(model: Any) -> None:
    """Let a model make its masks from `position_ids`: not every one hands them on to the functions that do, and GPT-OSS
    and AFMoE would let documents of one row see each other."""
    import torch
    from transformers.masking_utils import create_masks_for_generate

    def with_masks(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        positions = kwargs.get("position_ids")
        if positions is None or kwargs.get("attention_mask") is not None:
            return args, kwargs
        embedded = torch.empty(*positions.shape, 0, dtype=module.dtype, device=positions.device)
        masks = create_masks_for_generate(module.config, embedded, None, None, positions)
        return args, {**kwargs, "attention_mask": masks}

    model.base_model.register_forward_pre_hook(with_masks, with_kwargs=True)


def check_plans(facts: Facts, mesh: Mesh, grad_accum: int) -> None:
    """Raise ConfigError if the mesh asks for a kind of sharding that the model class has no plan for, or has one that
    gives other gradients in several micro-batches."""
    wanted = {"tp": mesh.tp, "ep": mesh.ep, "fsdp": mesh.fsdp * mesh.replicate}
    for kind, size in wanted.items():
        if size > 1 and kind not in facts.plans:
            raise ConfigError(
                f"--{kind} {size}: transformers has no {kind} plan for {facts.class_name}; use --{kind} 1"
            )
    if mesh.tp > 1 and grad_accum > 1 and facts.resums:
        raise ConfigError(
            f"--tp {mesh.tp} --grad-accum {grad_accum}: transformers' tp plan for {facts.class_name} sums gradients of "
            "norms anew in every micro-batch, and they come out too large; use --grad-accum 1"
        )


def load_model(path: str, config: TrainConfig, mesh: Mesh) -> Any:
    """Load a checkpoint folder onto this rank's place in the mesh, with trimtab's experts and exchange.

    Raises ConfigError for a checkpoint that lacks weights.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    trimtab.integrations.transformers.register(
        IMPLEMENTATION, replicate_experts=config.tolerance, copy_cost=config.copy_cost
    )  # fmt: skip
    options: dict[str, Any] = {}
    if config.quantize in ENCODED:
        from trimtab.integrations.transformers.quantized.quantizer import QuantizedExpertsConfig

        options["quantization_config"] = QuantizedExpertsConfig(config.quantize)
    if mesh.world > 1:
        options["distributed_config"] = DistributedConfig(
            ep_size=mesh.ep,
            fsdp_size=mesh.fsdp,
            tp_size=mesh.tp,
            dp_replicate_size=mesh.replicate,
            ep_implementation=IMPLEMENTATION,
            fsdp_mixed_precision=config.dtype == "bfloat16" and not config.lora,  # it is loaded so
        )
    model, report = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.bfloat16 if config.lora and config.dtype == "bfloat16" else torch.float32,  # none is trained
        experts_implementation=IMPLEMENTATION,
        attn_implementation=config.attn,
        local_files_only=True,
        output_loading_info=True,
        **options,
    )
    # transformers fills these with random numbers, which would pass for a checkpoint that learns badly.
    if absent := sorted(report["missing_keys"]):
        raise ConfigError(f"--model {config.model}: the checkpoint lacks {len(absent)} weights, among them {absent[0]}")
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def load_tokenizer(model: str) -> Any:
    """The checkpoint's tokenizer, or the byte tokenizer of the presets. Raises ConfigError if there is none."""
    from trimtab.train.tokens import byte_tokenizer

    if is_preset(model):
        return byte_tokenizer()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except Exception as error:  # whatever the many loaders raise, the folder has no tokenizer that opens
        raise ConfigError(f"--model {model}: no tokenizer that opens there ({first_line(error)})") from error


def check_finite(model: Any, name: str) -> None:
    """Raise ConfigError, on every rank, for weights that no training can put right."""

    def bad() -> list[str]:
        local = ((n, p.to_local() if hasattr(p, "to_local") else p) for n, p in model.named_parameters())
        return [n for n, tensor in local if not bool(tensor.isfinite().all())]

    if found := sorted({n for rank in on_every_rank(bad, None) for n in rank}):
        raise ConfigError(
            f"--model {name}: NaN or infinity in {len(found)} weights of the checkpoint: {', '.join(found[:3])}"
        )


def _read_config(model: str) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"--model {model}: config.json cannot be used ({first_line(error)})") from error
    config.__dict__.pop("quantization_config", None)  # its weights are written out plain
    return config
