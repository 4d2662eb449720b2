"""The tensors of `trimtab.MoE` and those of transformers' MoE blocks, by family: a row of `LAYOUTS` each.

A `BlockLayout` is held against the model's own classes before it is used: the names in the block, and, because shapes
say nothing where D = F or D = 2F, the outputs of a block of transformers and of our layer on the same random weights at
such sizes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.checkpoint.state import is_transformers_experts
from trimtab.convert.tensors import Mapped, Step, TensorStore, kept
from trimtab.errors import ConfigError, InputError
from trimtab.moe import MoEConfig
from trimtab.routing.config import RouterConfig

Dtypes = Mapping[str, torch.dtype]
"""Dtypes that tensors get, by name; others keep that of what they are made of, float32 where `Part.wide`."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One tensor of `trimtab.MoE`, and the block's tensors that it is made of, joined along the first dim.

    wide: ours is float32 at least, which holds what theirs holds. split: gate and up are apart in ours, [E, 2, F, D] of
    [E, 2F, D].
    """

    ours: str
    theirs: tuple[str, ...]
    wide: bool = False
    split: bool = False

    def to_ours(self, prefix: str, dtypes: Dtypes, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Our tensor of the block's, all under their full names."""
        named = [prefix + name for name in self.theirs]
        if len({tensors[name].dtype for name in named}) > 1:
            raise InputError(f"{prefix}{self.ours}: its parts are of different dtypes: {', '.join(named)}")
        made = tensors[named[0]] if len(named) == 1 else torch.cat([tensors[name] for name in named])
        if self.split:
            made = made.reshape(made.shape[0], 2, -1, made.shape[2])
        wide = torch.promote_types(made.dtype, torch.float32) if self.wide else made.dtype
        return {prefix + self.ours: made.to(dtypes.get(prefix + self.ours, wide))}

    def to_theirs(self, prefix: str, dtypes: Dtypes, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The block's tensors of ours."""
        tensor = tensors[prefix + self.ours]
        if self.split:
            if tensor.dim() != 4:
                raise InputError(f"{prefix}{self.ours} is {list(tensor.shape)}, expected [E, 2, F, D]")
            tensor = tensor.flatten(1, 2)
        named = zip((prefix + name for name in self.theirs), tensor.chunk(len(self.theirs)), strict=True)
        return {name: piece.to(dtypes.get(name, piece.dtype)) for name, piece in named}


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """A family's MoE block.

    parts: every tensor of the block. hidden: the configuration's name for F. router, shared_hidden: (configuration) ->
    the router, and S. shared_gate: the shared experts have a gate. Balance losses are left at none.
    """

    name: str
    parts: tuple[Part, ...]
    hidden: str
    router: Callable[[Any], RouterConfig]
    shared_hidden: Callable[[Any], int] = lambda config: 0
    shared_gate: bool = False

    def config(self, config: Any) -> MoEConfig:
        """The `trimtab.MoE` that computes what the block of a transformers configuration does.

        Raises ConfigError for an activation that `ExpertMLP` does not have.
        """
        activation = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}.get(config.hidden_act)
        if activation is None:
            raise ConfigError(f"layout {self.name}: hidden_act={config.hidden_act!r} has no activation of trimtab's")
        return MoEConfig(
            dim=config.hidden_size, hidden=getattr(config, self.hidden), router=self.router(config),
            activation=activation, shared_hidden=self.shared_hidden(config), shared_gate=self.shared_gate,
        )  # fmt: skip


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that run through transformers' experts registry, by qualified name."""
    return {name: module for name, module in model.named_modules() if is_transformers_experts(module)}


def blocks_of(model: nn.Module, layout: BlockLayout) -> dict[str, nn.Module]:
    """The model's MoE blocks, by qualified name, held against the layout.

    Raises:
        ConfigError: there are none, or a block has other tensors than it says.
    """
    names = [name.rpartition(".")[0] for name in experts_modules(model)]
    blocks = {name: model.get_submodule(name) for name in names}
    if not blocks:
        raise ConfigError(f"layout {layout.name}: {type(model).__name__} has no MoE block")
    named = {name for part in layout.parts for name in part.theirs}
    for name, block in blocks.items():
        found = set(block.state_dict())
        if found != named:
            raise ConfigError(
                f"layout {layout.name}: {name} ({type(block).__name__}) has {sorted(found - named) or 'nothing more'} "
                f"and lacks {sorted(named - found) or 'nothing'}; is this a {layout.name} model?"
            )
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


class Blocks:
    """A model's MoE blocks: under the same paths, `trimtab.MoE` in our names and the block in transformers'.

    layout: None where the model keeps the blocks of transformers, whose names then stay.
    """

    def __init__(self, layout: BlockLayout | None = None, names: tuple[str, ...] = ()) -> None:
        self.layout, self.names = layout, names

    def mapped(self, store: TensorStore, like: TensorStore | None = None, *, to_ours: bool) -> TensorStore:
        """The store under trimtab's names or transformers', in the dtypes of `like` if it is given."""
        if self.layout is None:
            return store
        dtypes = {} if like is None else {name: info.dtype for name, info in like.infos.items()}
        steps = []
        for at in (f"{name}." for name in self.names):
            for part in self.layout.parts:
                sources = tuple(at + name for name in (part.theirs if to_ours else (part.ours,)))
                if absent := [name for name in sources if name not in store.infos]:
                    raise InputError(f"layout {self.layout.name}: there is no {absent[0]} in the checkpoint")
                run = partial(part.to_ours if to_ours else part.to_theirs, at, dtypes)
                steps.append(Step(sources, run, by_rows=len(part.theirs) == 1))
        taken = {name for step in steps for name in step.sources}
        return Mapped(store, [*steps, *(kept(name) for name in store.infos if name not in taken)])


ROUTED = (
    Part(ours="router.weight", theirs=("gate.weight",), wide=True),
    Part(ours="experts.gate_up", theirs=("experts.gate_up_proj",), split=True),
    Part(ours="experts.down", theirs=("experts.down_proj",)),
)
BIAS = Part(ours="router.expert_bias", theirs=("gate.e_score_correction_bias",), wide=True)
GATE = Part(ours="shared.gate.weight", theirs=("shared_expert_gate.weight",))


def shared(name: str) -> tuple[Part, Part]:
    """Shared experts that transformers holds as three linear layers below `name`."""
    gate, up, down = (f"{name}.{own}_proj.weight" for own in ("gate", "up", "down"))
    return Part(ours="shared.up.weight", theirs=(gate, up)), Part(ours="shared.down.weight", theirs=(down,))


def _softmax(c: Any) -> RouterConfig:
    if jitter := getattr(c, "router_jitter_noise", 0.0):
        warnings.warn(
            f"router_jitter_noise={jitter}: in training the router's tokens alone are jittered, where the block of "
            "transformers hands the experts jittered tokens too",
            stacklevel=4,
        )
    experts = getattr(c, "num_experts", None) or c.num_local_experts
    normalize = getattr(c, "norm_topk_prob", True)  # Mixtral's always does
    return RouterConfig(num_experts=experts, top_k=c.num_experts_per_tok, normalize=normalize, jitter=jitter)


def _sigmoid(c: Any) -> RouterConfig:
    return RouterConfig(
        num_experts=c.n_routed_experts, top_k=c.num_experts_per_tok, score="sigmoid", normalize=c.norm_topk_prob,
        scale=c.routed_scaling_factor, groups=c.n_group, top_groups=c.topk_group, bias=True,
    )  # fmt: skip


_ROWS = (
    BlockLayout(name="qwen3_moe", parts=ROUTED, hidden="moe_intermediate_size", router=_softmax),
    BlockLayout(
        name="qwen2_moe", parts=(*ROUTED, *shared("shared_expert"), GATE), hidden="moe_intermediate_size",
        router=_softmax, shared_hidden=lambda c: c.shared_expert_intermediate_size, shared_gate=True,
    ),
    BlockLayout(name="mixtral", parts=ROUTED, hidden="intermediate_size", router=_softmax),
    BlockLayout(name="olmoe", parts=ROUTED, hidden="intermediate_size", router=_softmax),
    BlockLayout(
        name="deepseek_v3", parts=(*ROUTED, BIAS, *shared("shared_experts")), hidden="moe_intermediate_size",
        router=_sigmoid, shared_hidden=lambda c: c.moe_intermediate_size * c.n_shared_experts,
    ),
)  # fmt: skip
LAYOUTS = {row.name: row for row in _ROWS}
