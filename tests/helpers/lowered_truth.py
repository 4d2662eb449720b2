"""ExpertMLP with a recipe, once more: slots laid out from Python integers, every product in float64.

Legend: M rows, K slots per row, S rows in aligned segments, E experts, D model dim, I width of the pre-activations,
F expert hidden dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trimtab.experts.activations import activation_of
from trimtab.experts.module import ExpertMLP
from trimtab.experts.recipes import RecipeState


def slots_of(ids: Tensor, experts: int) -> list[list[tuple[int, int]]]:
    """(row, k) of each expert's slots, in order."""
    return [[(m, k) for m, row in enumerate(ids.tolist()) for k, e in enumerate(row) if e == i] for i in range(experts)]


def truth(
    mlp: ExpertMLP, states: dict[str, RecipeState], x: Tensor, ids: Tensor, w: Tensor, dy: Tensor
) -> dict[str, Tensor]:
    """Output and every gradient. `states` are as the module's were before the call, and are moved on."""
    alignment, activation = mlp.recipe.alignment, activation_of(mlp.activation)
    up, down = mlp.expert_weights()
    x, w = x.detach(), w.detach()
    up_bias, shape = up.biases[0].flatten(1) if up.biases else None, up.values[0].shape
    up, down = (of.values[0].detach().flatten(1, -2).mT for of in (up, down))
    up_name = mlp.parameter_names[0]
    groups, starts, place = slots_of(ids, mlp.num_experts), [0], []
    for group in groups:
        place += [starts[-1] + i for i in range(len(group))]
        starts.append(starts[-1] + -(-len(group) // alignment) * alignment)
    cuts, slots = torch.tensor(starts), [slot for group in groups for slot in group]
    rows, slot_k = [m for m, _ in slots], [k for _, k in slots]
    u, d = states["up"].call(), states["down"].call()

    def segments() -> Iterator[tuple[int, slice]]:
        yield from enumerate(slice(a, b) for a, b in zip(starts, starts[1:], strict=False))

    def laid_out(values: Tensor) -> Tensor:
        spread = values.new_zeros(starts[-1], *values.shape[1:])
        spread[place] = values
        return spread

    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a[s].double() @ b[i].double() for i, s in segments()])

    def weight_gradient(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([b[s].double().t() @ a[s].double() for _, s in segments()])

    def biases(bias: Tensor | None) -> Tensor | float:
        counts = torch.tensor([len(group) for group in groups])
        return 0.0 if bias is None else laid_out(bias.detach().double().repeat_interleave(counts, 0))

    def summed(values: Tensor) -> Tensor:
        return torch.stack([values[s].double().sum(0) for _, s in segments()])

    X, G, W = laid_out(x[rows]), laid_out(dy[rows]), laid_out(w[rows, slot_k])[:, None].to(x.dtype)
    pre = (product(u.activation(X, cuts, "row"), u.weight(up, "in")) + biases(up_bias)).to(x.dtype)
    h = activation.forward(pre)
    out = product(d.activation(h * W, cuts, "row"), d.weight(down, "in"))
    out = out + biases(mlp.down_bias) * W.double()
    dh = product(d.gradient(G, cuts, "row"), d.weight(down, "out").mT).to(x.dtype)
    d_pre = activation.backward(pre, dh * W)
    dX = product(u.gradient(d_pre, cuts, "row"), u.weight(up, "out").mT)
    found = {
        "output": torch.zeros(x.shape, dtype=torch.float64).index_add(
            0, torch.tensor(rows, dtype=torch.int64), out[place]
        ),
        "x": torch.zeros(x.shape, dtype=torch.float64).index_add(0, torch.tensor(rows, dtype=torch.int64), dX[place]),
        "w": torch.zeros(w.shape, dtype=torch.float64),
        "down": weight_gradient(d.activation(h * W, cuts, "column"), d.gradient(G, cuts, "column")),
        up_name: weight_gradient(u.activation(X, cuts, "column"), u.gradient(d_pre, cuts, "column")).view(shape),
    }
    found["w"][rows, slot_k] = ((h.double() * dh.double()).sum(1) + (biases(mlp.down_bias) * G.double()).sum(1))[place]
    if up_bias is not None:
        found |= {f"{up_name}_bias": summed(d_pre).view(shape[:-1]), "down_bias": summed(G * W)}
    return found
