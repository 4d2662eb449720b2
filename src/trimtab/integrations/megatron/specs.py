"""`use`: a spec of Megatron's with our MoE layers in it; and specs by name for its command line.

    --spec trimtab.integrations.megatron.specs gpt          any GPT that Megatron's own options describe, dense layers
                                                            among its MoE layers included
    --spec trimtab.integrations.megatron.specs gpt_exchange     the same with Megatron's experts
    --spec trimtab.integrations.megatron.hybrid stack       Megatron's stack of Mamba, attention and MoE layers

Megatron takes there what a module has by a name. Another of one's own is a line of a module of one's own, as

    spec = gpt_spec(router="trimtab", transport="auto")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from functools import partial
from operator import is_not
from typing import Any, Literal

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from megatron.core.utils import get_pg_rank

from trimtab.dispatch.options import CombineMode, ExchangeOptions
from trimtab.errors import ConfigError
from trimtab.integrations.megatron.layer import MoELayer
from trimtab.integrations.megatron.packs import TellsPacks, telling
from trimtab.integrations.megatron.protocol import MegatronMoELayer, ModuleSpec
from trimtab.integrations.megatron.router import Router

ROUTERS = ("megatron", "trimtab")


def use(
    spec: Any, *, experts: bool | ModuleSpec = True, router: Literal["megatron", "trimtab"] = "megatron",
    transport: str = "alltoall", combine: CombineMode = "sum",
) -> Any:  # fmt: skip
    """A copy of a spec with our MoE layers in the place of Megatron's, wherever they are; the spec stays as it is.

    Args:
        spec: of a layer, a block, a block for multi-token prediction, or a hybrid stack, as Megatron's functions and
            modules give them.
        experts: trimtab's experts; False keeps those of the spec behind our exchange. Or a spec that takes their place,
            as `trimtab.integrations.megatron.linears.grouped_mlp()`.
        router: whose routers, "megatron" or "trimtab". Both have the same parameters and state dict; see `Router`. With
            ours layers are of a subclass, which tells it of packs.
        transport: as in `trimtab.ExpertParallel`.
        combine: as in `trimtab.Dispatcher`.

    Raises:
        ConfigError: the spec has no MoE layer, or one of another class than Megatron's own; no such name.
    """
    if router not in ROUTERS:
        raise ConfigError(f"router={router!r} is not one of {ROUTERS}")
    instead: dict[str, Any] = {"router": Router} if router == "trimtab" else {}
    if experts is True:
        from trimtab.integrations.megatron.experts import Experts

        experts = ModuleSpec(module=Experts)
    if experts:
        instead["experts"] = experts
    options = {"options": ExchangeOptions(transport=transport, combine=combine)}
    found: list[Any] = []

    def ours(builder: Any) -> Any:
        """A builder of an MoE layer -> that of ours, in the same form."""
        found.append(builder)
        if isinstance(builder, ModuleSpec):
            inside = replace(builder.submodules, **instead)
            return replace(builder, module=MoELayer, submodules=inside, params={**builder.params, **options})
        keywords = {**builder.keywords, "submodules": replace(builder.keywords["submodules"], **instead)}
        return partial(MoELayer, *builder.args, **keywords | options)

    changed = _walk(spec, ours, telling if router == "trimtab" else lambda layer: layer)
    if not found:
        raise ConfigError(f"no MoE layer in this spec ({type(spec).__name__}): use(spec) puts trimtab into Megatron's")
    return changed


def _walk(part: Any, ours: Callable[[Any], Any], layer: Callable[[type], type]) -> Any:
    """`part`, or a copy where something inside of it changes. layer: a transformer layer's class around it."""
    built = part.module if isinstance(part, ModuleSpec) else part.func if isinstance(part, partial) else None
    if isinstance(built, type) and issubclass(built, MegatronMoELayer):
        if built is not MegatronMoELayer:
            raise ConfigError(f"the spec's MoE layer is {built.__module__}.{built.__name__}, not Megatron's own")
        return ours(part)
    if isinstance(part, (list, tuple)):
        items = [_walk(each, ours, layer) for each in part]
        return type(part)(items) if any(map(is_not, items, part)) else part
    if isinstance(part, partial):
        changed = _changed(part.keywords, ours, layer)
        return partial(part.func, *part.args, **{**part.keywords, **changed}) if changed else part
    if is_dataclass(part) and not isinstance(part, type):
        changed = _changed(vars(part), ours, layer)
        if changed and isinstance(built, type) and issubclass(built, TransformerLayer):
            changed["module"] = layer(built)
        return replace(part, **changed) if changed else part
    return part


def _changed(parts: dict[str, Any], ours: Callable[[Any], Any], layer: Callable[[type], type]) -> dict[str, Any]:
    """Those inside of which something changes, as they are then."""
    walked = {name: _walk(each, ours, layer) for name, each in parts.items()}
    return {name: each for name, each in walked.items() if each is not parts[name]}


class GPTLayer(TellsPacks, TransformerLayer):  # type: ignore[misc]
    """What Megatron builds for a GPT of this configuration, dense or MoE by its number, with `use(**ours)`."""

    def __init__(
        self, config: Any, submodules: Any = None, layer_number: int = 1, *, pg_collection: Any = None,
        vp_stage: int | None = None, ours: dict[str, Any], **kwargs: Any,
    ) -> None:  # fmt: skip
        stage = get_pg_rank(pg_collection.pp) if pg_collection is not None else None
        number = layer_number + get_transformer_layer_offset(config, vp_stage, stage)
        by_te = config.transformer_impl == "transformer_engine"
        layers = get_gpt_decoder_layer_specs(config, by_te, config.normalization, config.qk_l2_norm)
        submodules = use(layers, **ours)[number - 1].submodules
        super().__init__(config, submodules, layer_number, pg_collection=pg_collection, vp_stage=vp_stage, **kwargs)


def gpt_spec(**ours: Any) -> Any:
    """A layer spec that fits the configuration it is built with.

    Args:
        ours: keywords of `use`.
    """
    return ModuleSpec(module=GPTLayer, params={"ours": ours})


gpt = gpt_spec()
gpt_exchange = gpt_spec(experts=False)
