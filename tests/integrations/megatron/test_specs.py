"""`use` puts our MoE layers into every kind of spec that Megatron builds a model from, and says where it cannot."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest

from helpers.megatron_case import Case, config_of
from helpers.megatron_cpu import built, megatron, megatron_ranks, spec_utils
from trimtab.errors import ConfigError
from trimtab.integrations.megatron import MoELayer, Router, protocol, use
from trimtab.integrations.megatron.experts import Experts
from trimtab.integrations.megatron.layer import REFUSED, refuse

gpt_specs = megatron.core.models.gpt.gpt_layer_specs
OURS = ("trimtab.integrations.megatron.specs", "gpt")


def layer_spec(num_experts: int | None = 8) -> Any:
    return gpt_specs.get_gpt_layer_local_spec(num_experts=num_experts, moe_grouped_gemm=False)


def parts(builder: Any) -> tuple[Any, Any]:
    """What a spec builds, and from what."""
    if isinstance(builder, partial):
        return builder.func, builder.keywords.get("submodules")
    return builder.module, builder.submodules


def test_a_layer_spec_is_copied() -> None:
    spec = layer_spec()
    ours = use(spec, router="trimtab")
    (module, inside), (before, inside_before) = parts(ours.submodules.mlp), parts(spec.submodules.mlp)
    assert (module, before) == (MoELayer, protocol.MegatronMoELayer)
    assert (parts(inside.experts)[0], inside.router) == (Experts, Router)
    assert inside_before.router is protocol.TopKRouter
    assert inside.shared_experts is inside_before.shared_experts
    assert ours.submodules.self_attention is spec.submodules.self_attention


def test_megatrons_experts_and_router_stay() -> None:
    spec = layer_spec()
    inside, before = (parts(each.submodules.mlp)[1] for each in (use(spec, experts=False), spec))
    assert inside.experts is before.experts
    assert inside.router is before.router


def classes(blocks: Any) -> list[str]:
    return [type(layer.mlp).__module__ for layer in blocks]


def models() -> dict[str, Any]:
    """The modules of MoE and dense layers, as specs of a block, of an MTP block and of the command line build them."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    options = {"moe_layer_freq": [0, 1, 1], "num_layers": 3, "mtp_num_layers": 1, "ffn_hidden_size": 8}
    config = config_of(Case(tokens=[], options=options))
    block = use(gpt_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False))
    theirs = gpt_specs.get_gpt_mtp_block_spec(config, layer_spec(), use_transformer_engine=False)
    mtp = use(theirs).layer_specs[0].submodules
    inner = getattr(mtp, "mtp_model_layer", None) or mtp.transformer_layer
    config.transformer_impl = "local"
    return {
        "block": classes(TransformerBlock(config, block).layers),
        "mtp": parts(inner.submodules.mlp)[0].__module__,
        "named": classes(TransformerBlock(config, spec_utils.import_module(OURS)).layers),
    }


def test_dense_and_moe_layers_of_a_block_of_mtp_and_by_name() -> None:
    (found,) = megatron_ranks(models, 1)
    dense, ours = "megatron.core.transformer.mlp", "trimtab.integrations.megatron.layer"
    assert found["block"] == found["named"] == [dense, ours, ours]
    assert found["mtp"] == ours


def test_a_hybrid_stack() -> None:
    with patch("torch.compile", lambda given=None, **options: given):
        stack = spec_utils.import_module(("trimtab.integrations.megatron.hybrid", "stack"))
        theirs = import_module("megatron.core.models.mamba.mamba_layer_specs").mamba_stack_spec
    assert parts(stack.submodules.moe_layer.submodules.mlp)[0] is MoELayer
    assert parts(theirs.submodules.moe_layer.submodules.mlp)[0] is protocol.MegatronMoELayer


class Another(protocol.MegatronMoELayer):  # type: ignore[misc, name-defined]
    pass


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: use(layer_spec(None)), "no MoE layer in this spec"),
        (lambda: use(partial(Another, submodules=None)), "Another, not Megatron's own"),
        (lambda: use(use(layer_spec())), "trimtab.integrations.megatron.layer.MoELayer, not Megatron's own"),
        (lambda: use(layer_spec(), router="other"), "router='other' is not one of"),
        (lambda: use(layer_spec(), transport="other"), "transport='other' is not one of"),
        (lambda: use(layer_spec(), combine="other"), "combine='other' is not one of"),
    ],
)
def test_what_cannot_be_used_is_said(call: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call()


@pytest.mark.parametrize("name", [*REFUSED, "flex", "inference_optimized", "graphs"])
def test_options_are_refused_by_name(name: str) -> None:
    config = config_of(Case(tokens=[]))
    refuse(config)
    if name == "graphs":
        config.cuda_graph_impl, config.cuda_graph_scope, config.cuda_graph_modules = "local", ["attn"], ["attn"]
        refuse(config)
        config.cuda_graph_scope = config.cuda_graph_modules = ["attn", "moe_router"]
    elif name == "flex":
        config.moe_token_dispatcher_type = name
    elif name == "inference_optimized":
        config.transformer_impl = name
    else:
        setattr(config, name, 1)
    with pytest.raises(ConfigError, match="moe_router" if name == "graphs" else name):
        refuse(config)


def pad_later() -> str:
    layer = built(use(layer_spec()).submodules.mlp, config=config_of(Case(tokens=[])))
    layer.token_dispatcher.drop_and_pad = False
    with pytest.raises(ConfigError) as caught:
        layer.token_dispatcher.drop_and_pad = True
    return str(caught.value)


def test_padding_to_capacity_is_refused_where_inference_turns_it_on() -> None:
    (said,) = megatron_ranks(pad_later, 1)
    assert "drop_and_pad=True" in said


def test_another_protocol_is_told_as_found_and_expected() -> None:
    home = "megatron.core.transformer.moe.token_dispatcher.MoETokenDispatcher"
    with pytest.raises(ConfigError) as caught:
        protocol.checked({home: {"token_dispatch": ("rows",), "gone": ()}}, {})
    assert "MoETokenDispatcher.token_dispatch('hidden_states', 'probs'), expected ('rows',)" in str(caught.value)
    assert "MoETokenDispatcher.gone" in str(caught.value)
    with pytest.raises(ConfigError, match=r"megatron\.core cannot be used.*0\.16 to 0\.19"):
        protocol.checked({"megatron.core.nowhere.It": {}}, {})
