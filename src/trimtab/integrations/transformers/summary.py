"""Counts of trained, frozen and quantized values of a model, by kind: `trimtab.summary`.

A model of transformers, under peft or not, its experts as codes or not, or one of trimtab's layers. A tensor's kind is
told by where it lies: in or beside a module of experts, in an embedding or the head, or in attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch import bool as torch_bool
from torch.distributed.tensor import DTensor

from trimtab.checkpoint.state import is_transformers_experts, plain_name, unwrapped
from trimtab.experts.grouped_module import GroupedModule
from trimtab.experts.quantized import FORMATS

KINDS = ("router", "routed experts", "shared experts", "attention", "embeddings", "other")
STATES = ("trained", "frozen", "quantized")
_ROUTERS = ("gate", "router", "expert_bias", "e_score_correction_bias")
"""Names of routers beside a module of experts, in all families."""
_ATTENTION = re.compile(r"(\w+_)?(attn|attention)")
SHARDED = "numbers are of all ranks together, bytes what this rank holds of them"
_SCALES = re.compile(r"_(scales?|scale_inv)$")


@dataclass(frozen=True)
class Amount:
    """count: values, of all ranks together. bytes: what this rank holds of them."""

    count: int = 0
    bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.count + other.count, self.bytes + other.bytes)


@dataclass(frozen=True)
class Summary:
    """Amounts of a model's parameters. `str` makes a table of it.

    amounts: by kind ("router", "routed experts", "shared experts", "attention", "embeddings", "other") and state
        ("trained", "frozen", "quantized"); what there is none of is left out.
    sharded: True where this rank holds a part of some; the table then says so.
    """

    amounts: Mapping[tuple[str, str], Amount]
    sharded: bool = False

    def of(self, kind: str | None = None, state: str | None = None) -> Amount:
        """All of a kind, of a state, of both, or of the model."""
        found = (amount for key, amount in self.amounts.items() if kind in (None, key[0]) and state in (None, key[1]))
        return sum(found, Amount())

    def __str__(self) -> str:
        states = [state for state in STATES if self.of(state=state).count or state != "quantized"]
        kinds = [kind for kind in KINDS if self.of(kind).count]
        rows = [[kind, *(_shown(self.of(kind, state)) for state in states)] for kind in kinds]
        table = [["", *states], *rows, ["all", *(_shown(self.of(state=state)) for state in states)]]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        pad = "  ".join
        lines = [pad([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in table]
        return "\n".join([*lines, *([SHARDED] if self.sharded else [])])


def summary(model: nn.Module) -> Summary:
    """Count the trained, frozen and quantized values and bytes of a model, by kind of module.

    A parameter that several modules share counts once. Quantized are parameters and buffers whose entries are codes of
    a byte, experts' and others': the count is of the values that they stand for, the bytes are with their scales. Of
    what is sharded as DTensor the count is of the whole and the bytes are this rank's. No communication.

    Args:
        model: of transformers, plain, under peft, DDP or torch.compile, sharded or on the meta device; or one that has
            `MoE`, `ExpertMLP` or `GroupedLinear`.
    """
    inner = unwrapped(model)
    kind_of, owners = kinds(inner), dict(inner.named_modules())
    tensors = {**dict(inner.named_buffers()), **dict(inner.named_parameters())}
    codes = {name for name, tensor in tensors.items() if tensor.element_size() == 1 and tensor.dtype is not torch_bool}
    amounts: dict[tuple[str, str], Amount] = {}
    sharded = False
    for name, tensor in tensors.items():
        of = _SCALES.sub("", name)
        scales = of in tensors.keys() - {name}
        if name in codes or (scales and of in codes):
            state, values = "quantized", 0 if scales else _values(owners[name.rpartition(".")[0]], tensor)
        elif isinstance(tensor, nn.Parameter):
            state, values = "trained" if tensor.requires_grad else "frozen", 0 if scales else tensor.numel()
        else:
            continue
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        sharded |= local.numel() != tensor.numel()
        key = kind_of(name), state
        amounts[key] = amounts.get(key, Amount()) + Amount(values, local.numel() * local.element_size())
    return Summary(amounts, sharded)


def kinds(model: nn.Module) -> Callable[[str], str]:
    """Returns a function from the name of a module or a parameter of the model to its kind."""
    named = {own_name(name): module for name, module in model.named_modules()}
    experts = [n for n, m in named.items() if isinstance(m, GroupedModule) or is_transformers_experts(m)]
    blocks = [name.rpartition(".")[0] for name in experts]
    routers = [f"{block}.{own}".lstrip(".") for block in blocks for own in _ROUTERS]
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    embeddings = [name for name, module in named.items() if isinstance(module, nn.Embedding) or module is head]
    attention = [name for name, module in named.items() if type(module).__name__.endswith("Attention")]
    known = {"routed experts": experts, "router": routers, "embeddings": embeddings, "attention": attention}
    inside = {path: kind for kind, paths in reversed(known.items()) for path in paths}

    def kind_of(name: str) -> str:
        path = own_name(name)
        if any(part.startswith("shared") for part in path.split(".")):
            return "shared experts"
        above = path
        while above and above not in inside:
            above = above.rpartition(".")[0]
        if above in inside:
            return inside[above]
        return "attention" if any(map(_ATTENTION.fullmatch, path.split("."))) else "other"

    return kind_of


def own_name(name: str) -> str:
    """A name without what peft, compiling and activation checkpointing put into it."""
    parts = plain_name(name).removeprefix("base_model.model.").split(".")
    return ".".join(part for part in parts if part != "base_layer")


def _values(owner: nn.Module, codes: Tensor) -> int:
    """The number of values in codes."""
    held: Any = getattr(owner, "codes_of_experts", None) or getattr(owner, "codes", None)
    if held is not None:
        return codes.numel() * FORMATS[held[0]].per_byte
    shape = getattr(getattr(codes, "quant_state", None), "shape", None)  # of bitsandbytes
    return codes.numel() if shape is None else shape.numel()


def _shown(amount: Amount) -> str:
    if not amount.count:
        return "-"
    size, units = float(amount.bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{amount.count:,} ({size:.3g} {units[0]})"
