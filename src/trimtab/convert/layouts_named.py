"""The MoE blocks of transformers that `trimtab.MoE` computes, each as a `BlockLayout` by the name of its family.

Legend: E experts, D model dim, F expert hidden dim, I = 2F (gate, then up), S hidden dim of the shared experts,
J = 2S (gate, then up).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from trimtab.convert.layouts_moe import BlockLayout, Part
from trimtab.moe import MoEConfig
from trimtab.routing.config import RouterConfig

ROUTED = (
    Part(ours="router.weight", axes=("E", "D"), theirs=("gate.weight",), their_axes=("E", "D"), wide=True),
    Part(ours="experts.up", axes=("E", "I", "D"), theirs=("experts.gate_up_proj",), their_axes=("E", "I", "D")),
    Part(ours="experts.down", axes=("E", "D", "F"), theirs=("experts.down_proj",), their_axes=("E", "D", "F")),
)
BIAS = Part(
    ours="router.expert_bias", axes=("E",), theirs=("gate.e_score_correction_bias",), their_axes=("E",), wide=True
)


def shared(name: str) -> tuple[Part, Part]:
    """Shared experts that transformers holds as three linear layers below `name`."""
    halves = (f"{name}.gate_proj.weight", f"{name}.up_proj.weight")
    return (
        Part(ours="shared.up.weight", axes=("J", "D"), theirs=halves, their_axes=("J", "D")),
        Part(ours="shared.down.weight", axes=("D", "S"), theirs=(f"{name}.down_proj.weight",), their_axes=("D", "S")),
    )


def _softmax(experts: str, hidden: str, normalize: bool | None = None, **more: str) -> Callable[[Any, str], MoEConfig]:
    def moe(c: Any, activation: str) -> MoEConfig:
        jitter = getattr(c, "router_jitter_noise", 0.0)
        if jitter:
            warnings.warn(
                f"router_jitter_noise={jitter}: in training the router's tokens alone are jittered, where the block of "
                "transformers hands the experts jittered tokens too",
                stacklevel=3,
            )
        router = RouterConfig(
            num_experts=getattr(c, experts),
            top_k=c.num_experts_per_tok,
            normalize=c.norm_topk_prob if normalize is None else normalize,
            jitter=jitter,
        )
        options: dict[str, Any] = {k: getattr(c, v) for k, v in more.items()}
        return MoEConfig(
            dim=c.hidden_size, hidden=getattr(c, hidden), router=router, activation=activation,
            shared_gate=options.get("shared_hidden", 0) > 0, **options,
        )  # fmt: skip

    return moe


def _deepseek_v3(c: Any, activation: str) -> MoEConfig:
    router = RouterConfig(
        num_experts=c.n_routed_experts, top_k=c.num_experts_per_tok, score="sigmoid", normalize=c.norm_topk_prob,
        scale=c.routed_scaling_factor, groups=c.n_group, top_groups=c.topk_group, bias=True,
    )  # fmt: skip
    shared_hidden = c.moe_intermediate_size * c.n_shared_experts
    return MoEConfig(
        dim=c.hidden_size, hidden=c.moe_intermediate_size, router=router, activation=activation,
        shared_hidden=shared_hidden,
    )  # fmt: skip


_GATE = Part(ours="shared.gate.weight", axes=("1", "D"), theirs=("shared_expert_gate.weight",), their_axes=("1", "D"))
BLOCKS: dict[str, BlockLayout] = {
    layout.name: layout
    for layout in (
        BlockLayout(
            name="qwen3_moe", parts=ROUTED, hidden="moe_intermediate_size",
            moe=_softmax("num_experts", "moe_intermediate_size"),
        ),
        BlockLayout(
            name="qwen2_moe", parts=(*ROUTED, *shared("shared_expert"), _GATE), hidden="moe_intermediate_size",
            moe=_softmax("num_experts", "moe_intermediate_size", shared_hidden="shared_expert_intermediate_size"),
        ),
        BlockLayout(
            name="mixtral", parts=ROUTED, hidden="intermediate_size",
            moe=_softmax("num_local_experts", "intermediate_size", True),
        ),
        BlockLayout(
            name="olmoe", parts=ROUTED, hidden="intermediate_size", moe=_softmax("num_experts", "intermediate_size"),
        ),
        BlockLayout(
            name="deepseek_v3", parts=(*ROUTED, BIAS, *shared("shared_experts")), hidden="moe_intermediate_size",
            moe=_deepseek_v3,
        ),
    )
}  # fmt: skip
