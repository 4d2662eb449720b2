"""The matrices of a model: the layout of each parameter, or why Muon does not take it.

An allowlist by the modules that hold parameters. A shape alone tells nothing: expert biases [E, 2F] look like a matrix,
and so do stacks [E F, D]. Classes are found by `__mro__`: FSDP2 puts one of its own before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from torch import nn

from trimtab.checkpoint.state import is_transformers_experts, plain_name, unwrapped
from trimtab.errors import ConfigError
from trimtab.experts.grouped_module import GroupedModule
from trimtab.experts.lora import ExpertAdapter
from trimtab.experts.shared import Projection
from trimtab.integrations.transformers.routers.find import plain
from trimtab.integrations.transformers.summary import kinds
from trimtab.optim.fused import of_linear
from trimtab.optim.layout import Layout

Rule = Literal["adamw", "muon"]
Layouts = Mapping[str, Layout | None]
HEADS = ("lm_head", "head", "output", "output_layer", "embed_out", "score", "classifier", "qa_outputs", "v_head")
"""Names of linear layers that end a model, beside what it calls its output embeddings."""
LINEARS = ("ScaledBiasRowwiseLinear",)
"""Classes of linear layers with a forward of their own that is linear all the same: torchtitan's."""
ROUTERS = ("Router", "TopKGating", "TopKGate")
"""Endings of classes that hold nothing but a router, beside what lies beside experts under a router's name."""
CLASSES: dict[str, dict[str, dict[str, Any]]] = {
    "Llama4TextExperts": {"gate_up_proj": {"parts": 2, "transposed": True}, "down_proj": {"transposed": True}},
    "Step3p7Experts": {"gate_up_proj": {"parts": 2}, "down_proj": {}},
    "DbrxExpertGLU": {n: {"transposed": n == "w2", "stacks": "moe_num_experts"} for n in ("w1", "v1", "w2")},
    "JetMoeMoE": {"input_linear.weight": {"parts": 2}},
    "JetMoeParallelExperts": {"weight": {}},
    "InklingSharedExperts": {key: {} for key in ("gate_proj", "up_proj", "down_proj")},
    "DeepseekV4GroupedLinear": {"weight": {"stacks": "n_groups"}},
    "GroupedExperts": {key: {} for key in ("w1", "w2", "w3", "w1_EFD", "w2_EDF", "w3_EFD")},
    "GptOssGroupedExperts": {"mlp1_weight_EGD": {"parts": 2, "turns": True}, "mlp2_weight_EDF": {}},
}
"""Classes without flags: what `_stack` is to know of each weight; stacks: the attribute that says how many matrices lie
in its first dim. The last two are torchtitan's."""


class Found(NamedTuple):
    """A parameter's name, its layout, and what it is: where there is no layout, why."""

    name: str
    layout: Layout | None
    what: str


def find_matrices(
    model: nn.Module, *, router: Rule = "adamw", lora: Rule = "adamw", layouts: Layouts | None = None
) -> dict[nn.Parameter, Found]:
    """Every parameter of the model, frozen ones too, which may be trained later. See `trimtab.optim.Muon`.

    Raises:
        ConfigError: a layout of `layouts` that does not fit, or a pattern that no parameter's name has.
    """
    inner, told = unwrapped(model), dict(layouts or {})
    kind_of, modules = kinds(inner), dict(inner.named_modules(remove_duplicate=False))
    found: dict[nn.Parameter, Found] = {}
    for path, module in modules.items():
        around = [modules[path[:end]] for end in range(len(path)) if not end or path[end] == "."]
        for own, param in module.named_parameters(recurse=False, remove_duplicate=False):
            name = plain_name(f"{path}.{own}".lstrip("."))
            pattern = next((pattern for pattern in told if fnmatchcase(name, pattern)), None)
            if pattern is not None:
                new = Found(name, told[pattern], "told")
            else:
                routes = any(cls.__name__.endswith(ROUTERS) for m in (*around, module) for cls in type(m).__mro__)
                kind = "router" if routes else kind_of(f"{path}.{own}")
                new = Found(name, *_layout(around, plain(name).split("."), module, param, kind, router, lora))
            if new.layout is not None and (param.ndim < 2 or not new.layout.fits(param.shape)):
                raise ConfigError(f"{name} {tuple(param.shape)} is not made of matrices as {new.layout} says")
            before = found.setdefault(param, new)  # of two owners: what was told, then what is none of Muon's
            if before.what != "told" and (pattern is not None or (before.layout is not None and new.layout is None)):
                found[param] = new
    names = [entry.name for entry in found.values() if entry.what == "told"]
    if unused := [pattern for pattern in told if not any(fnmatchcase(name, pattern) for name in names)]:
        raise ConfigError(f"layouts= has {unused}, and no parameter has such a name")
    return found


def _layout(
    around: Sequence[nn.Module], path: Sequence[str], module: Any, param: nn.Parameter, kind: str, router: Rule,
    lora: Rule,
) -> tuple[Layout | None, str]:  # fmt: skip
    """(layout, what it is)."""
    own, name = path[-1], path[-2] if len(path) > 1 else ""
    rows = Layout((param.shape[-2],)) if param.ndim > 1 and min(param.shape[-2:]) > 1 else None
    if rows is None or not param.is_floating_point():
        return None, "vector" if param.is_floating_point() else "no values"
    if isinstance(module, nn.Embedding) or kind == "embeddings" or name in HEADS:
        return None, "embedding" if isinstance(module, nn.Embedding) else "head"
    linear = module if isinstance(module, nn.Linear) and own == "weight" else None
    if isinstance(module, ExpertAdapter) or any(part.startswith("lora_") for part in path):
        return rows if lora == "muon" and (linear or isinstance(module, ExpertAdapter)) else None, "LoRA"
    if kind == "router":
        return rows if router == "muon" and own == "weight" and param.ndim == 2 else None, "router"
    if isinstance(module, GroupedModule):  # gate and up of ours have a dim of their own
        if getattr(module, "tp_size", 1) > 1:
            return None, "experts, a share of them"
        values = "bias" not in own and not own.endswith("_scales")
        return _stack(param, getattr(module, "halves", 1)) if values else None, "experts"  # 2: Megatron's first
    if is_transformers_experts(module):
        gated = own == "gate_up_proj"
        if not gated and own not in ("up_proj", "down_proj"):
            return None, "experts"
        return _stack(param, 1 + gated, module.is_transposed, turns=gated and not module.is_concatenated), "experts"
    for held, key in ((around[-1] if around else None, f"{name}.{own}"), (module, own)):
        for cls in type(held).__mro__:
            if key in (row := CLASSES.get(cls.__name__, {})):
                stacks = getattr(module, row[key].get("stacks", ""), 1)
                return _stack(param, **row[key] | {"stacks": stacks}), "experts"
    if linear is None:
        return None, f"of {type(module).__name__}"
    own_forward = type(linear).forward not in (nn.Linear.forward, Projection.forward)
    if own_forward and not any(cls.__name__ in LINEARS for cls in type(linear).__mro__):
        return None, f"{type(linear).__name__}, a layer of its own"
    owner = next((m for m in reversed(around) if hasattr(m, name)), module)  # behind what peft wraps
    layout = of_linear(name, owner, linear)
    return layout, "several projections of sizes not known" if layout is None else "dense"


def _stack(
    param: nn.Parameter, parts: int = 1, transposed: bool = False, stacks: int = 1, turns: bool = False
) -> Layout:
    axis = -1 if transposed else -2
    rows = param.shape[axis] // (1 if transposed else stacks) // parts
    return Layout((1 if turns else rows,) * parts, axis, rows if turns else 1, stacks=stacks)
