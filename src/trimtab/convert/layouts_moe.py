"""`trimtab.MoE` and the MoE blocks of transformers: which tensor is which, axis by axis.

A `BlockLayout` is a value that says so. It is held against the model's own classes before it is used: the layout of
the experts module (`trimtab.convert.layouts`), the names in the block, and, because shapes say nothing where D = F or
D = 2F, the outputs of a block of transformers and of our layer on the same random weights at such sizes.

Legend: E experts, D model dim, F expert hidden dim, I = 2F (gate, then up).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.convert.layouts import experts_modules, layout_of
from trimtab.convert.store import Made, Step, TensorInfo, kept
from trimtab.errors import ConfigError, InputError
from trimtab.moe import MoEConfig

Axes = tuple[str, ...]
Dtypes = Mapping[str, torch.dtype]
"""What tensors are to be, by name; those not in it are what they are made of, wide where they must."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor of `trimtab.MoE`: its name and axes, the block's tensors that it is made of, and their axes.

    Several of theirs are joined, in this order, along our first axis. wide: ours is float32 at least, which holds
    what theirs holds.
    """

    ours: str
    axes: Axes
    theirs: tuple[str, ...]
    their_axes: Axes
    wide: bool = False

    def to_ours(self, prefix: str, dtypes: Dtypes, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Of the block's tensors; all under their full names, as below."""
        named = [prefix + name for name in self.theirs]
        if len({tensors[name].dtype for name in named}) > 1:
            raise InputError(f"{prefix}{self.ours}: its parts are of different dtypes: {', '.join(named)}")
        order = [self.their_axes.index(axis) for axis in self.axes]
        turned = [tensors[name].permute(order) for name in named]
        made = turned[0] if len(turned) == 1 else torch.cat(turned, 0)
        wide = torch.promote_types(made.dtype, torch.float32) if self.wide else made.dtype
        return {prefix + self.ours: made.to(dtypes.get(prefix + self.ours, wide))}

    def to_theirs(self, prefix: str, dtypes: Dtypes, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The block's tensors."""
        tensor = tensors[prefix + self.ours]
        if tensor.dim() != len(self.axes) or tensor.shape[0] % len(self.theirs):
            raise InputError(f"{prefix}{self.ours} is {list(tensor.shape)}, expected [{', '.join(self.axes)}]")
        order = [self.axes.index(axis) for axis in self.their_axes]
        pieces = [tensor] if len(self.theirs) == 1 else tensor.chunk(len(self.theirs), 0)
        named = {prefix + name: piece.permute(order) for name, piece in zip(self.theirs, pieces, strict=True)}
        return {name: piece.to(dtypes.get(name, piece.dtype)) for name, piece in named.items()}


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """A family's MoE block.

    parts: every tensor of the block. hidden: the configuration's name for F.
    moe: (configuration, F, activation) -> the layer that computes the same. Balance losses are left at none.
    """

    name: str
    parts: tuple[Part, ...]
    hidden: str
    moe: Callable[[Any, str], MoEConfig]

    def config(self, config: Any) -> MoEConfig:
        """The `trimtab.MoE` that computes what the block of a transformers configuration does.

        Raises ConfigError for an activation that `ExpertMLP` has none of.
        """
        activation = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}.get(config.hidden_act)
        if activation is None:
            raise ConfigError(f"layout {self.name}: hidden_act={config.hidden_act!r} has no activation of trimtab's")
        return self.moe(config, activation)


def blocks_of(model: nn.Module, layout: BlockLayout) -> dict[str, nn.Module]:
    """The model's MoE blocks, by qualified name, held against the layout.

    Raises:
        ConfigError: there are none, or a block has other tensors or another expert layout than it says.
    """
    names = [name.rpartition(".")[0] for name in experts_modules(model)]
    blocks = {name: model.get_submodule(name) for name in names}
    if not blocks:
        raise ConfigError(f"layout {layout.name}: {type(model).__name__} has no MoE block")
    named = {name for part in layout.parts for name in part.theirs}
    axes = {name: part.their_axes for part in layout.parts for name in part.theirs}
    for name, block in blocks.items():
        found = set(block.state_dict())
        if found != named:
            raise ConfigError(
                f"layout {layout.name}: {name} ({type(block).__name__}) has {sorted(found - named) or 'nothing more'} "
                f"and lacks {sorted(named - found) or 'nothing'}; is this a {layout.name} model?"
            )
        tag = layout_of(block.experts, name)  # type: ignore[arg-type]
        if (tag.up_axes, tag.down_axes, tag.packing) != (
            axes["experts.gate_up_proj"],
            axes["experts.down_proj"],
            "gate|up",
        ):
            raise ConfigError(f"layout {layout.name}: {name} is laid out as {tag}")
    return blocks


def prove(layout: BlockLayout, block: nn.Module, config: Any) -> float:
    """Largest relative difference of the block's and our layer's outputs, on small blocks of its class.

    At D = F and at D = 2F, E = D, where a transposed or swapped tensor fits as well. Raises ConfigError above 1e-4,
    which is far above rounding in float32 (in which transformers' routers score) and far below any other layout.
    """
    worst = 0.0
    for hidden in (8, 4):
        small = deepcopy(config)
        small.update({"hidden_size": 8, layout.hidden: hidden})
        worst = max(worst, _difference(layout, type(block), small))
    if not worst <= 1e-4:
        raise ConfigError(
            f"layout {layout.name}: our layer and {type(block).__name__} differ by {worst:.1e} on the same weights"
        )
    return worst


def _difference(layout: BlockLayout, block_class: type[nn.Module], config: Any) -> float:
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        theirs = block_class(config).double().eval()
        state = {name: torch.randn(t.shape, dtype=torch.float64) for name, t in theirs.state_dict().items()}
        theirs.load_state_dict(state)
        try:
            ours = layout.config(config).build(layout.name).double().eval()
            ours.load_state_dict({n: t for part in layout.parts for n, t in part.to_ours("", {}, state).items()})
        except (AttributeError, KeyError, RuntimeError) as error:  # a setting that it lacks, tensors that do not fit
            why = str(error).strip().splitlines()[-1].strip()
            raise ConfigError(
                f"layout {layout.name}: {block_class.__name__} is not built as one ({why}); is this a {layout.name} "
                "model?"
            ) from error
        x = torch.randn(1, 16, config.hidden_size, dtype=torch.float64)
        wanted, got = theirs(x), ours(x).y
    return float((got - wanted).abs().max() / wanted.abs().max())


def to_moe(
    layout: BlockLayout, blocks: Iterable[str], infos: Mapping[str, TensorInfo], dtypes: Dtypes | None = None
) -> list[Step]:
    """Steps from transformers' names to those of a model whose MoE blocks are `trimtab.MoE`, under the same path."""
    steps: list[Step] = []
    for block in blocks:
        at = f"{block}."
        for part in layout.parts:
            sources = tuple(at + name for name in part.theirs)
            steps.append(Made(sources=sources, run=partial(part.to_ours, at, dtypes or {})))
    return _with_the_rest(steps, infos)


def from_moe(
    layout: BlockLayout, blocks: Iterable[str], infos: Mapping[str, TensorInfo], dtypes: Dtypes | None = None
) -> list[Step]:
    """The way back. Raises InputError where a part is missing."""
    steps: list[Step] = []
    for block in blocks:
        at = f"{block}."
        for part in layout.parts:
            if at + part.ours not in infos:
                raise InputError(f"layout {layout.name}: there is no {at + part.ours} in the checkpoint")
            steps.append(Made(sources=(at + part.ours,), run=partial(part.to_theirs, at, dtypes or {})))
    return _with_the_rest(steps, infos)


def _with_the_rest(steps: list[Step], infos: Mapping[str, TensorInfo]) -> list[Step]:
    taken = {name for step in steps for name in step.sources}
    return [*steps, *(kept(name) for name in infos if name not in taken)]
