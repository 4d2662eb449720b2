"""LoRA of transformers' models: for weights chosen by kind, and beside a model that transformers sharded.

    lora_config(model, rank=16, targets=("experts", "attention"))     peft's `LoraConfig`
    average_replicated(model)                                         peft's adapters lie whole on every rank

To peft a name that matches weights of shared experts alone, and of no routed one, is as good as any: here it is an
error, as is one that matches nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.function import Function
from torch.distributed.tensor import DTensor

from trimtab.autograd import once_differentiable
from trimtab.errors import BackendError, ConfigError
from trimtab.extras import install
from trimtab.integrations.transformers.quantized import WEIGHTS
from trimtab.integrations.transformers.summary import kinds, own_name

if TYPE_CHECKING:
    from peft import LoraConfig

TARGETS = {"experts": "routed experts", "attention": "attention", "router": "router", "shared": "shared experts"}
"""Words for `targets`, and the kinds of `trimtab.summary` that they stand for."""
RENAMED = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Ends of module names that peft takes for experts of an older transformers, wherever they lie, and turns into adapters
of the routed experts' stacks: linear layers of such names are handed over as parameters, whose names stay."""
WEIGHT = ".weight"
CHOOSERS = "indexer"
"""The part of attention that chooses keys: no gradient comes there."""
SHOWN = 8
"""Names that an error lists of a kind."""


def lora_config(
    model: nn.Module, *, rank: int, alpha: float | None = None, targets: Sequence[str] = ("experts",), **options: Any
) -> LoraConfig:
    """peft's configuration of adapters for weights that are chosen by kind, or by name.

    Args:
        model: of transformers, before `get_peft_model`; may be on the meta device, or sharded.
        rank: r, the width of the adapters.
        alpha: the scale is alpha / r; 2 r if not given.
        targets: each is "experts" (routed ones, all their weights), "attention", "router" or "shared"; or the end of a
            name of linear layers or of parameters, as peft takes it.
        options: more fields of `LoraConfig`.

    Raises:
        BackendError: peft is missing.
        ConfigError: a target that the model has nothing of, or a name that of all experts matches shared ones alone
            and does not say "shared"; or a model with adapters of peft's, whose own layers would be targets.
    """
    try:
        from peft import LoraConfig, PeftModel
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise BackendError(f"adapters need peft ({install('peft')}): {error}") from error
    if any(isinstance(module, (PeftModel, BaseTunerLayer)) for module in model.modules()):
        raise ConfigError(
            f"lora_config: this {type(model).__name__} has adapters of peft's already, and they would get adapters of "
            "their own; call it with the model as it was before get_peft_model or inject_adapter_in_model "
            "(model.unload() of a PeftModel gives that back), or give that adapter's config to model.add_adapter(NAME, "
            "config)"
        )
    known = adaptable(model)
    chosen: dict[str, str] = {}
    for target in targets:
        chosen |= _chosen(target, known, type(model).__name__)
    modules, parameters = ([name for name, _ in named] for named in (model.named_modules(), model.named_parameters()))
    ends = {
        "target_modules": _shortest(chosen.keys() & modules, modules),
        "target_parameters": _shortest(chosen.keys() & parameters, parameters),
    }
    alpha = 2 * rank if alpha is None else alpha
    task = "CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None
    return LoraConfig(**{"r": rank, "lora_alpha": alpha, "task_type": task, **ends, **options})


def adaptable(model: nn.Module) -> dict[str, str]:
    """The kinds of what may have an adapter, by name: of linear layers, and of stacked and routers' parameters."""
    kind_of, found = kinds(model), {}
    for path, module in model.named_modules():
        kind = kind_of(path)
        whole = type(module) is nn.Linear
        if whole or (isinstance(module, nn.Linear) and type(module).__module__.startswith("bitsandbytes.")):
            renamed = path.rpartition(".")[2] in RENAMED
            adapted = CHOOSERS not in path.split(".") and kind != "embeddings" and (whole or not renamed)
            if adapted and min(module.in_features, module.out_features) > 1:
                found[path + WEIGHT if renamed else path] = kind
            continue
        for name, parameter in module.named_parameters(recurse=False):
            stacked = name in WEIGHTS if kind == "routed experts" else parameter.ndim == 3 and kind == "shared experts"
            if stacked or (kind == "router" and name == "weight" and parameter.ndim == 2):
                found[f"{path}.{name}"] = kind
    return found


def _chosen(target: str, known: dict[str, str], model: str) -> dict[str, str]:
    kind = TARGETS.get(target)
    end = target.removesuffix(WEIGHT)
    ends = {name: f".{name.removesuffix(WEIGHT)}".endswith(f".{end}") for name in known} if kind is None else {}
    found = {name: own for name, own in known.items() if own == kind or ends.get(name)}
    if not found:
        raise ConfigError(f"{target}: {model} has nothing of that kind or name to adapt; it has {_listed(known)}")
    if "shared experts" in found.values() and "routed experts" not in found.values() and "shared" not in target:
        raise ConfigError(
            f"{target}: of experts it matches shared ones alone, {_few(found)}, and no routed one would train; {model} "
            f"has {_listed(known)}"
        )
    return found


def _listed(known: dict[str, str]) -> str:
    """The targets that there are, by the words for them."""
    words = {kind: word for word, kind in TARGETS.items()} | {"other": "by name"}
    names = {word: [name for name, own in known.items() if own == kind] for kind, word in words.items()}
    return "; ".join(f"{word}: {_few(found)}" for word, found in names.items() if found)


def _few(names: Iterable[str]) -> str:
    ends = list(dict.fromkeys(_end(name) for name in names))
    return ", ".join(ends[:SHOWN]) + (" …" if len(ends) > SHOWN else "")


def _end(name: str) -> str:
    """A name from behind its layer's number."""
    parts = own_name(name).split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 :] if numbers else parts)


def _shortest(names: set[str], every: list[str]) -> list[str]:
    """Ends of the names that match these of all and no other; the names where ends would match others."""
    made = set()
    for name in names:
        end = _end(name)
        made.add(end if all(other in names for other in every if f".{other}".endswith(f".{end}")) else name)
    return sorted(made)


class OwnExperts(Function):
    """[E, ...], which every rank of a group holds -> the [e, ...] of its own experts.

    Backward: all ranks' parts together, over the number of batches that the group has: what the mean of their losses
    has for a gradient, on every rank. Collective.
    """

    @staticmethod
    def forward(ctx: Any, whole: Tensor, experts: int, group: dist.ProcessGroup, batches: int) -> Tensor:
        ctx.group, ctx.batches = group, batches
        first = dist.get_rank(group) * experts
        return whole[first : first + experts]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None, None]:
        whole = d.new_empty(dist.get_world_size(ctx.group) * d.shape[0], *d.shape[1:])
        dist.all_gather_into_tensor(whole, d.contiguous(), group=ctx.group)
        return whole.div_(ctx.batches), None, None, None


def average_replicated(model: nn.Module) -> None:
    """Average the gradients of trained parameters that nobody shards over the data-parallel ranks, as a backward ends.

    For a model loaded with `distributed_config=`, behind `get_peft_model`: transformers reduces what it sharded, and
    peft's adapters came later. An average that is taken twice stays itself, so gradients may accumulate. Call it on
    every rank; each backward must then reach a trained parameter on every rank.

    Raises ConfigError for a model that transformers did not distribute.
    """
    whole: Any = model
    meshes = getattr(whole.get_base_model() if hasattr(model, "get_base_model") else model, "_mesh_manager", None)
    if meshes is None:
        raise ConfigError("average_replicated: the model was not loaded with distributed_config=")
    over = [meshes.get_mesh(name).get_group() for name in ("dp_replicate", "fsdp")]
    groups = [group for group in over if group.size() > 1]
    params = [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    queued = False

    def reached(_: Tensor) -> None:
        nonlocal queued
        if not queued:
            queued = True
            Variable._execution_engine.queue_callback(average)

    @torch.no_grad()
    def average() -> None:
        nonlocal queued
        queued = False
        for param in params:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            for group in groups:
                dist.all_reduce(param.grad, group=group)
                param.grad.div_(group.size())

    for param in params:
        param.register_post_accumulate_grad_hook(reached)  # type: ignore[no-untyped-call]
