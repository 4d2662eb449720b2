"""The same experts as models store them: apart, above each other, in x out, in turns, in stacks; and Muon on all of
them, held against `torch.optim.Muon` on each matrix.

Legend: E experts, F hidden dim, D model dim.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from trimtab import ExpertMLP, GroupedLinear
from trimtab.optim import Muon

E = 4
SHAPES = ((24, 40), (40, 24), (32, 32))
"""F and D: wide, tall, square."""
Weights = tuple[Tensor, Tensor, Tensor]
"""gate [E, F, D], up [E, F, D], down [E, D, F]."""


class Apart(nn.Module):
    """Three linear layers an expert."""

    def __init__(self, hidden: int, dim: int) -> None:
        super().__init__()
        for name, (ins, outs) in {"gate": (dim, hidden), "up": (dim, hidden), "down": (hidden, dim)}.items():
            setattr(self, f"{name}_proj", nn.ModuleList(nn.Linear(ins, outs, bias=False) for _ in range(E)))


def _each(gate: Tensor, up: Tensor, down: Tensor) -> dict[str, Tensor]:
    parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    return {f"{name}.{e}.weight": whole[e] for name, whole in parts.items() for e in range(E)}


def _of_transformers(folder: str, name: str) -> Callable[[int, int], nn.Module]:
    def build(hidden: int, dim: int) -> nn.Module:
        module: Any = __import__(f"transformers.models.{folder}.modeling_{folder}", fromlist=[name])
        sizes = dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_hidden_size"), hidden)
        experts = dict.fromkeys(("num_experts", "num_local_experts", "moe_num_experts"), E)
        act = {"hidden_act": "silu", "ffn_act_fn": {"name": "silu"}, "activation_function": "silu"}
        config = SimpleNamespace(hidden_size=dim, **sizes, **experts, **act, _experts_implementation="eager")
        config.num_experts_per_tok, config.swiglu_alpha, config.swiglu_limit = 2, 1.702, 7.0
        built: nn.Module = getattr(module, name)(config)
        return built

    return build


def _concatenated(gate: Tensor, up: Tensor, down: Tensor) -> dict[str, Tensor]:
    return {"gate_up_proj": torch.cat((gate, up), 1), "down_proj": down}


def _transposed(gate: Tensor, up: Tensor, down: Tensor) -> dict[str, Tensor]:
    return {name: weight.mT for name, weight in _concatenated(gate, up, down).items()}


def _turns(gate: Tensor, up: Tensor, down: Tensor) -> dict[str, Tensor]:
    return {"gate_up_proj": torch.stack((gate, up), 2).flatten(1, 2).mT, "down_proj": down.mT}


def _stacks(gate: Tensor, up: Tensor, down: Tensor) -> dict[str, Tensor]:
    return {"w1": gate.flatten(0, 1), "v1": up.flatten(0, 1), "w2": down.mT.flatten(0, 1)}


STORAGES: dict[str, tuple[Callable[[int, int], nn.Module], Callable[..., dict[str, Tensor]]]] = {
    "apart": (Apart, _each),
    "ours": (
        lambda hidden, dim: ExpertMLP(E, dim, hidden), lambda g, u, d: {"gate_up": torch.stack((g, u), 1), "down": d}
    ),
    "grouped": (
        lambda hidden, dim: nn.ModuleDict(
            {
                "gate": GroupedLinear(E, dim, hidden, bias=False), "up": GroupedLinear(E, dim, hidden, bias=False),
                "down": GroupedLinear(E, hidden, dim, bias=False, single_parameter=False),
            }
        ),
        lambda g, u, d: {"gate.weight": g, "up.weight": u, **{f"down.weight{e}": d[e] for e in range(E)}},
    ),
    "qwen3_moe": (_of_transformers("qwen3_moe", "Qwen3MoeExperts"), _concatenated),
    "aria": (_of_transformers("aria", "AriaExperts"), _transposed),
    "gpt_oss": (_of_transformers("gpt_oss", "GptOssExperts"), _turns),
    "llama4": (_of_transformers("llama4", "Llama4TextExperts"), _transposed),
    "dbrx": (_of_transformers("dbrx", "DbrxExpertGLU"), _stacks),
    "jetmoe": (
        _of_transformers("jetmoe", "JetMoeMoE"),
        lambda g, u, d: {"input_linear.weight": torch.cat((g, u), 1), "output_linear.weight": d},
    ),
    "step3p7": (_of_transformers("step3p7", "Step3p7Experts"), _concatenated),
}  # fmt: skip
"""(what builds a module of F and D, how weights are stored in it)."""


def drawn(hidden: int, dim: int, seed: int) -> Weights:
    """The same for a seed."""
    draw = torch.Generator().manual_seed(seed)
    shapes = ((E, hidden, dim), (E, hidden, dim), (E, dim, hidden))
    gate, up, down = (torch.randn(shape, generator=draw) for shape in shapes)
    return gate, up, down


@torch.no_grad()
def load(module: nn.Module, stored: dict[str, Tensor], *, grads: bool = False) -> None:
    """Put weights, or gradients, where the module has them; its biases get none."""
    for name, value in stored.items():
        param, value = module.get_parameter(name), value.contiguous()
        if grads:
            param.grad = value.clone()
        else:
            param.copy_(value)


def torchs(hidden: int, dim: int, steps: int = 3, **options: Any) -> Weights:
    """The weights after steps of `torch.optim.Muon` over each matrix, a parameter each."""
    apart = [nn.Parameter(matrix.clone()) for weight in drawn(hidden, dim, 0) for matrix in weight]
    optimizer = torch.optim.Muon(apart, lr=0.05, **options)
    for step in range(1, steps + 1):
        for param, grad in zip(apart, (m for w in drawn(hidden, dim, step) for m in w), strict=True):
            param.grad = grad.clone()
        optimizer.step()
    gate, up, down = (torch.stack([p.detach() for p in apart[i * E : (i + 1) * E]]) for i in range(3))
    return gate, up, down


def check_storage(name: str, scale: str = "original", nesterov: bool = True) -> None:
    """Raises AssertionError where a matrix is not, to the bit, what torch's optimizer makes of it alone."""
    torch.set_num_threads(1)
    build, stored = STORAGES[name]
    for hidden, dim in SHAPES:
        module = build(hidden, dim)
        load(module, stored(*drawn(hidden, dim, 0)))
        optimizer = Muon(module, lr=0.05, adjust_lr_fn=scale, nesterov=nesterov)  # type: ignore[arg-type]
        for step in (1, 2, 3):
            load(module, stored(*drawn(hidden, dim, step)), grads=True)
            optimizer.step()
        truth = stored(*torchs(hidden, dim, adjust_lr_fn=scale, nesterov=nesterov))
        for key, value in truth.items():
            assert torch.equal(module.get_parameter(key), value), f"{name} {key} {hidden, dim}"


def check_resumed() -> None:
    """Raises AssertionError where a run that was saved after each step ends in other bits than one that was not."""
    torch.set_num_threads(1)
    build, stored = STORAGES["ours"]
    module = build(24, 40).bfloat16()
    load(module, stored(*drawn(24, 40, 0)))
    whole, state = build(24, 40).bfloat16(), None
    whole.load_state_dict(module.state_dict())
    runs = Muon(whole, lr=0.05)
    for step in (1, 2, 3):
        optimizer = Muon(module, lr=0.05)
        if state is not None:
            optimizer.load_state_dict(state)
        for each, steps in ((module, optimizer), (whole, runs)):
            load(each, {k: v.bfloat16() for k, v in stored(*drawn(24, 40, step)).items()}, grads=True)
            steps.step()
        state = optimizer.state_dict()
        for held in state["state"].values():  # of another dtype than the weights
            held["wide"] = torch.full((2,), 1 / 3) if step == 1 else held["wide"]
            assert torch.equal(held["wide"], torch.full((2,), 1 / 3))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), whole.parameters(), strict=True))
