"""peft's LoRA on transformers' experts: `LoraConfig(target_parameters=[...])` over Qwen3MoeSparseMoeBlock.

Base weights are the truth's less scale * B A, so that output and dx are those of the truth; of gradients there are
those of each expert's A and B, from the true gradient of the sum. Over ranks experts are laid out first, by the
functions that `from_pretrained` calls, and the adapters put on that model, as a script would.

Legend: E experts, r adapter rank, I = 2F, D model dim, F hidden dim.
"""
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from peers import transformers_impl
from trimtab.verify.implementation import Place, averaged
from trimtab.verify.truth import LayerWeights, Sizes

RANK, ALPHA = 4, 6
SCALE = ALPHA / RANK


def _pair(value_EYX: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """A [E, r, X] and B [E, Y, r], exact in any dtype."""
    e, y, x = value_EYX.shape
    a, b = torch.randn(e, RANK, x, generator=g), torch.randn(e, y, RANK, generator=g) / 8
    return a.bfloat16().double(), b.bfloat16().double()


class Layers(transformers_impl.Layers):
    """One topology's stack, base frozen, adapters trained."""

    def __init__(self, place: Place, sizes: Sizes, weights: Sequence[LayerWeights], impl: Impl) -> None:
        g = torch.Generator().manual_seed(7)
        self.pairs: list[dict[str, tuple[Tensor, Tensor]]] = []
        bases = []
        for w in weights:
            pairs = {name: _pair(value, g) for name, value in (("up", w.up_EID), ("down", w.down_EDF))}
            up, down = (
                value - SCALE * pairs[n][1] @ pairs[n][0] for n, value in (("up", w.up_EID), ("down", w.down_EDF))
            )
            bases.append(LayerWeights(router_ED=w.router_ED, up_EID=up, down_EDF=down))
            self.pairs.append(pairs)
        super().__init__(place, sizes, bases, impl)
        names = ["experts.gate_up_proj", "experts.down_proj"]
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=[], target_parameters=names)
        inject_adapter_in_model(config, self.stack)
        for i, pairs in enumerate(self.pairs):
            for name, (a_ErX, b_EYr) in pairs.items():
                a, b = self._adapter(i, name)
                a.copy_(a_ErX.flatten(0, 1))
                b.copy_(b_EYr.permute(1, 2, 0).flatten(1))

    def _adapter(self, layer: int, name: str) -> tuple[Tensor, Tensor]:
        """A [E * r, in] and B [out, r * E], as peft has them."""
        wrapper = self.stack.layers[layer].experts
        while wrapper.parameter_name != {"up": "gate_up_proj", "down": "down_proj"}[name]:
            wrapper = wrapper.base_layer
        return tuple(pair["default"].weight.data for pair in (wrapper.lora_A, wrapper.lora_B))

    def expected(self, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """The router is frozen; of the sum's gradient comes each factor's."""
        found = {}
        for i, pairs in enumerate(self.pairs):
            for name, (a_ErX, b_EYr) in pairs.items():
                grad = grads[f"{i}.{name}"]
                found[f"{i}.{name} A"] = (SCALE * b_EYr.mT @ grad).flatten(0, 1)
                found[f"{i}.{name} B"] = (SCALE * grad @ a_ErX.mT).permute(1, 2, 0).flatten(1)
        return found

    def gradients(self) -> dict[str, Tensor | None]:
        found = {}
        for name, param in self.stack.named_parameters():
            if "lora_" in name and param.grad is not None:
                layer = name.split(".")[1]
                # Wrappers are nested: the outer one adapts what was named last.
                part = "up" if self._is_up(param, int(layer)) else "down"
                grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
                found[f"{layer}.{part} {'A' if 'lora_A' in name else 'B'}"] = averaged(grad, self.place, True)
        return found

    def _is_up(self, param: Tensor, layer: int) -> bool:
        return any(param.data_ptr() == t.data_ptr() for t in self._adapter(layer, "up"))


class Impl(transformers_impl.Impl):
    """Over experts of "grouped_mm"."""

    name = "peft"
    layers = Layers

    def lacking(self, t, pattern) -> dict[str, bool]:
        return {"judged with expert parallelism alone": t.tp > 1 or t.data != "none"} | super().lacking(t, pattern)


class Eager(Impl):
    """Over experts in a loop."""

    name = "peft-eager"
    experts = "eager"
    grouped_mm = False
