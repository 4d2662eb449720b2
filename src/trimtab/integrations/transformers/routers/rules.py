"""How each family of transformers turns a router's logits and a choice of experts into weights.

Routers of transformers give (logits, weights, ids, …). A rule gives the weights of *other* ids from the same logits:
gathered from the scores of all experts, then normalized, scaled and cast as the family does, operation for operation,
so that its own ids give its own bits. Group limits and selection biases choose experts, they are no part of a weight.

Legend: T tokens, D model dim, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Outputs = tuple[Any, ...]
Read = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One way from logits [T, E] and ids [T, K] to weights [T, K].

    score: "softmax", "sigmoid", "given" (the router gives scores in the place of logits), or the name of the
        attribute that computes it.
    picked: the score is taken over the picked logits alone.
    float32: scores are computed in float32, else in the dtype of the logits.
    normalize: True, False, or the name of the attribute that says so.
    eps, least: what is added to the sum that normalizes; the attribute with its smallest value.
    scale: the attribute that multiplies the weights. divide: the attribute that divides them.
    cast: weights end in the dtype of the "logits", of the "tokens", or stay ("").
    per_expert: the attribute with a factor for each expert.
    classes, top_k: the attributes with E and K.
    special: what gives all outputs instead: (router, its arguments, its own outputs, ids) -> outputs.
    reads: what finds (logits, weights, ids) in the outputs; else they are the first three.
    """

    score: str = "softmax"
    picked: bool = False
    float32: bool = True
    normalize: bool | str = False
    eps: float = 0.0
    least: str = ""
    scale: str = ""
    divide: str = ""
    cast: str = ""
    per_expert: str = ""
    special: Callable[[Any, Sequence[Any], Outputs, Tensor], Outputs] | None = None
    reads: Callable[[Any, Outputs], Read] | None = None
    classes: str = "num_experts"
    top_k: str = "top_k"

    def scores(self, router: Any, logits: Tensor) -> Tensor:
        """Of all experts, from what the router gives first: [T, E], differentiable."""
        wide = logits.float() if self.float32 else logits
        if self.score == "softmax":
            return wide.softmax(-1)
        if self.score == "sigmoid":
            return wide.sigmoid()
        return wide if self.score == "given" else getattr(router, self.score)(wide)

    def weights(self, router: Any, tokens: Tensor, logits: Tensor, ids: Tensor) -> Tensor:
        """Of the experts `ids` [T, K]: [T, K], differentiable in the logits."""
        if self.picked:
            weights = self.scores(router, logits.gather(-1, ids))
        else:
            weights = self.scores(router, logits).gather(-1, ids)
        if getattr(router, self.normalize) if isinstance(self.normalize, str) else self.normalize:
            total = weights.sum(-1, keepdim=True)
            if self.least:
                total = total.clamp(min=getattr(router, self.least))
            weights = weights / (total + self.eps if self.eps else total)
        if self.scale:
            weights = weights * getattr(router, self.scale)
        if self.divide:
            weights = weights / getattr(router, self.divide)
        if self.per_expert:
            weights = weights * getattr(router, self.per_expert)[ids]
        return weights.to({"": weights, "logits": logits, "tokens": tokens}[self.cast].dtype)

    def of(self, router: Any, given: Sequence[Any], outputs: Outputs, ids: Tensor) -> Outputs:
        """What the router, called with `given`, would have given had it chosen `ids`."""
        if self.special is not None:
            return self.special(router, given, outputs, ids)
        return outputs[0], self.weights(router, given[0], outputs[0], ids), ids, *outputs[3:]

    def read(self, router: Any, outputs: Outputs) -> Read:
        """(logits [T, E], weights [T, K], ids [T, K]) in a router's outputs."""
        return outputs[:3] if self.reads is None else self.reads(router, outputs)


def _inkling(router: Any, given: Sequence[Any], outputs: Outputs, ids: Tensor) -> Outputs:
    """Shared experts take part in the normalization, and their logits are not among the outputs."""
    x = given[0]
    with torch.autocast(x.device.type, enabled=False):
        logits = F.linear(x.reshape(-1, router.hidden_dim).float(), router.weight.float())
        routed, shared = torch.split(logits, [router.num_experts, router.n_shared_experts], -1)
        logs = F.logsigmoid(torch.cat([routed.gather(-1, ids), shared], -1))
        weights = torch.exp(logs - torch.logsumexp(logs, -1, keepdim=True))
        weights = weights * router.route_scale * router.global_scale.float()
    weights = weights.to(x.dtype)
    picked, gammas = torch.split(weights, [ids.shape[-1], router.n_shared_experts], -1)
    return routed, picked.contiguous(), ids, gammas.contiguous()


def _zaya(router: Any, given: Sequence[Any], outputs: Outputs, ids: Tensor) -> Outputs:
    """One class more than there are experts: a token of that class skips them."""
    weights = outputs[0].softmax(-1).gather(-1, ids)
    skips = ids == router.num_experts
    return outputs[0], weights.masked_fill(skips, 0), ids.masked_fill(skips, 0), *outputs[3:]


def _read_zaya(router: Any, outputs: Outputs) -> Read:
    return outputs[0], outputs[1], outputs[2].masked_fill(outputs[1] == 0, router.num_experts)


def _phimoe(router: Any, given: Sequence[Any], outputs: Outputs, ids: Tensor) -> Outputs:
    """SparseMixer: each pick's weight is a softmax over near ties and itself, the second's without the first. In
    training a pick that is not the likeliest counts a third, three times of four, with the gradient of the whole."""
    logits = outputs[0]
    weights, left = [], logits
    for pick in torch.split(ids, 1, -1):
        with torch.no_grad():
            most = left.max(-1, keepdim=True).values
            far = (most - logits) / logits.abs().clamp(min=most) > 2 * router.router_jitter_noise
            far = far.scatter(-1, pick, False)
        near = left.masked_fill(far, float("-inf")).softmax(-1)
        weight = near.gather(-1, pick)
        if router.training:
            whole = (pick == near.argmax(-1, keepdim=True)) | (torch.rand_like(weight) > 0.75)
            weight = weight - (0.6667 * weight.detach()).masked_fill(whole, 0)
        weights.append(weight)
        left = left.scatter(-1, pick, float("-inf"))
    return logits, torch.cat(weights, -1), ids


def _llama4(router: Any, given: Sequence[Any], outputs: Outputs, ids: Tensor) -> Outputs:
    """Weights are a map [T, E], zero behind the picks, and every expert sees every token."""
    logits = outputs[1]
    kept = torch.full_like(logits, float("-inf")).scatter(1, ids, logits.gather(1, ids))
    return kept.float().sigmoid().to(logits.dtype), logits


def _read_llama4(router: Any, outputs: Outputs) -> Read:
    weights, ids = outputs[0].topk(router.top_k, dim=1)
    return outputs[1], weights, ids


def _cohere2(router: Any) -> Rule:
    if router.expert_selection_fn == "softmax":
        return Rule(picked=True, cast="tokens")
    return Rule(score="sigmoid", picked=True, float32=False, normalize="norm_topk_prob", cast="tokens")


_QWEN = Rule(normalize="norm_topk_prob", cast="logits")
_QWEN35 = Rule(normalize=True, cast="logits")
_MIXTRAL = Rule(normalize=True)
_DEEPSEEK_V2 = Rule(scale="routed_scaling_factor")
_DEEPSEEK_V3 = Rule(score="sigmoid", normalize="norm_topk_prob", eps=1e-20, scale="routed_scaling_factor")
_DEEPSEEK_V4 = Rule(score="score_fn", float32=False, normalize=True, eps=1e-20, scale="routed_scaling_factor")
_MINIMAX_M2 = Rule(score="sigmoid", normalize=True)
_HY_V3 = Rule(score="sigmoid", normalize=True, eps=1e-20, scale="router_scaling_factor")
_ERNIE = Rule(normalize=True, least="norm_min", cast="tokens")
_GRANITE = Rule(picked=True, cast="tokens")
_GEMMA4 = Rule(
    score="given", normalize=True, per_expert="per_expert_scale", classes="config.num_experts",
    top_k="config.top_k_experts",
)  # fmt: skip

RULES: dict[str, Rule | Callable[[Any], Rule]] = {
    **dict.fromkeys(("FlexOlmo", "Mellum", "Olmoe", "Qwen2Moe", "Qwen3Moe", "Qwen3Next", "Qwen3OmniMoeText"), _QWEN),
    **dict.fromkeys(("Qwen3OmniMoeThinkerText", "Qwen3OmniMoeTalkerText", "Qwen4ExpText"), _QWEN),
    **dict.fromkeys(("Qwen3VLMoeText", "Qwen3_5Moe", "HunYuanMoEV1"), _QWEN35),
    **dict.fromkeys(("MiniMax", "Mixtral"), _MIXTRAL),
    "LaraMini": Rule(normalize="norm_topk_prob", cast="tokens"),
    "Jamba": Rule(cast="tokens"),
    **dict.fromkeys(("DeepseekV2", "DeepseekOcr2Text", "UnlimitedOcrText"), _DEEPSEEK_V2),
    "LongcatFlash": Rule(scale="routed_scaling_factor", cast="logits", classes="n_routed_experts"),
    "Mistral4": Rule(float32=False, normalize="norm_topk_prob", eps=1e-20, scale="routed_scaling_factor"),
    "MistralLarge4Text": Rule(normalize=True, eps=1e-20, scale="routed_scaling_factor"),
    **dict.fromkeys(("Ernie4_5_Moe", "Ernie4_5_VLMoeMoe"), _ERNIE),
    **dict.fromkeys(("Gemma4Text", "DiffusionGemmaText"), _GEMMA4),
    **dict.fromkeys(("AXK1", "AXK2", "BailingHybrid", "DeepseekV3", "DeepseekV32", "Dots1"), _DEEPSEEK_V3),
    **dict.fromkeys(("ExaoneMoe", "Glm4Moe", "Glm4MoeLite", "Glm4vMoeText", "Glm5NextText", "GlmMoeDsa"), _DEEPSEEK_V3),
    **dict.fromkeys(("Dots3NoteText", "HYV4", "HYV4VL", "KimiLinear", "MiMoV2Flash"), _DEEPSEEK_V3),
    **dict.fromkeys(("NemotronH", "SolarOpen"), _DEEPSEEK_V3),
    "Beam": Rule(score="sigmoid", normalize="norm_topk_prob", eps=1e-20),
    **dict.fromkeys(("HYV3", "Dots3NoteVision"), _HY_V3),
    "AfmoeTokenChoice": Rule(score="sigmoid", normalize=True, eps=1e-20, scale="route_scale"),
    "MuseSpark": Rule(score="sigmoid", normalize=True, eps=1e-15, scale="routed_scaling_factor"),
    **dict.fromkeys(("DeepseekV4", "DeepseekV4Hash", "Inkling2", "Inkling2Loop"), _DEEPSEEK_V4),
    **dict.fromkeys(("MiniMaxM2", "MiniMaxM3VL", "Step3p7"), _MINIMAX_M2),
    "Laguna": Rule(score="sigmoid", normalize=True, cast="tokens"),
    "Flint": Rule(score="sigmoid", normalize="norm_topk_prob"),
    "Kolibri1": Rule(score="sigmoid", picked=True, normalize="norm_topk_prob"),
    "Lfm2Moe": Rule(
        score="sigmoid", float32=False, normalize="norm_topk_prob", eps=1e-6, scale="routed_scaling_factor"
    ),
    **dict.fromkeys(("AriaText", "GptOss"), Rule(picked=True, float32=False)),
    "Cohere2Moe": _cohere2,
    "OpenAIPrivacyFilter": Rule(picked=True, float32=False, divide="top_k"),
    **dict.fromkeys(("GraniteMoe", "GraniteMoeHybrid", "GraniteMoeSWA", "GraniteMoeShared"), _GRANITE),
    "Inkling": Rule(score="sigmoid", special=_inkling),
    "Zaya": Rule(float32=False, special=_zaya, reads=_read_zaya, classes="num_router_classes"),
    "Phimoe": Rule(special=_phimoe),
    "Llama4": Rule(score="sigmoid", special=_llama4, reads=_read_llama4),
}  # fmt: skip
"""By the class of the router, without its ending: `TopKRouter`, `TopkRouter`, `Router` or `Gate`. A class of one's own
that gives (logits, weights, ids) is one more row, which programs may add; where its configuration decides, the row is
a function of the router."""

UNREACHABLE: dict[str, str] = {
    "DbrxRouter": "its block takes the top k, behind the router",
    "JetMoeTopKGating": "it sorts the slots by expert itself, and routes attention as well",
    "NllbMoeTop2Router": "it gives masks of what found room, not a choice of experts",
    "SwitchTransformersTop1Router": "it gives masks of what found room, not a choice of experts",
    "DogeCDMoE": "experts are rows of an embedding, chosen by products of keys",
}
"""Classes that decide, and why no choice can be handed to them."""
