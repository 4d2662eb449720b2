"""The inputs of one case and the true results, in float64.

    logits = h W_r^T    p = softmax(logits)    w = p[ids]
    y = sum over k of  w * expert[ids](h)      h of the next layer = h + y      loss = mean over ranks of sum(y * dy)

With adapters up and down are W + scale b a, and their gradients in place of the weights' are judged. Weights that the
layer quantizes are the values of their codes, which have no gradients.

Where ranks share sequences, or rows are packs, the loss has for each layer E / N * sum over tokens of f . p besides, f
the fractions of the slots of a sequence, or of a pack's document, that each expert got. The experts are evaluated
densely, all tokens by all experts; a test holds this equal to `oracle.moe`. All inputs are exact in the dtype that the
case runs in, so both start from the same numbers.

Legend: B sequences, L positions, N tokens, K experts per token, D model dim, E experts, I = 2F, F expert hidden dim,
r an adapter's rank, e experts or 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.experts.quantized import decoded, quantized
from trimtab.oracle import swiglu
from trimtab.verify.topologies import Topology

RANK, SCALE = 3, 0.25
"""Of the adapters."""
DIM, HIDDEN = 24, 8
"""D at least (the first E columns carry the router's logits) and F."""
BLOCK = 64
"""Inputs that share a scale of NF4: D and each rank's share of F are multiples."""
BALANCE = 0.5
"""Coefficient of the loss per sequence, where there is one."""
DOCUMENTS = 4
"""How many a pack has at most."""
ADAMW: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1.0, "weight_decay": 0.1}
"""Of an optimizer that is judged. By so large an eps a gradient's size is seen, and its rounding is not a sign."""
MOMENTUM = 0.95
"""Muon's."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a model. Two cases with equal sizes can share one."""

    num_experts: int
    top_k: int
    layers: int
    dtype: torch.dtype
    dim: int
    hidden: int
    adapter: str = "none"
    codes: str = "none"
    frozen: str = "none"

    @classmethod
    def of(cls, t: Topology, *, odd: bool, **own: Any) -> Sizes:
        """As a topology asks, `own` besides. odd: D is odd, or where blocks share scales two of them."""
        blocks = t.codes in ("nf4", "panels")
        dim = BLOCK * (1 + odd) if blocks else max(DIM, t.num_experts + 8) + odd
        own |= {"adapter": t.adapter, "codes": t.codes.replace("panels", "packed"), "frozen": t.frozen}
        return cls(num_experts=t.num_experts, dim=dim, hidden=BLOCK * t.etp if blocks else HIDDEN, **own)


@dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """One layer's parameters in float64, gate rows first in `up`. trained: those of the experts' with gradients.
    raw: up and down in the layer's dtype, which it is to quantize where they are codes.
    adapters: by name up_a [e, r, D], up_b [e, I, r], down_a [e, r, F], down_b [e, D, r]; "one" is active."""

    router_ED: Tensor
    up_EID: Tensor
    down_EDF: Tensor
    adapters: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    trained: tuple[str, ...] = ("up", "down")
    raw: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tokens of one data-parallel rank.

    x_BLD: float64. dy_BLD: the gradient of the loss at the output; the loss is sum(y * dy).
    ids_BLK: the experts that the router must choose, in its order; -1 where a slot is dropped.
    replayed: whether `ids_BLK` is handed to the layer, its scores alone being live.
    mask_BL: True for a real token, or None. cuts: [tp + 1] positions of each rank of the tp group.
    documents_BL: where rows are packs, the document of each token: 0..DOCUMENTS - 1.
    """

    x_BLD: Tensor
    dy_BLD: Tensor
    ids_BLK: Tensor
    mask_BL: Tensor | None
    replayed: bool
    cuts: tuple[int, ...]
    documents_BL: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One case's data on all ranks. `raises`: the layer must raise InputError, and no data may move.

    cp: batches of d // cp hold positions of the same sequences; above 1, and where rows are packs, each layer adds
    `BALANCE` times its `sequence_aux` loss over all of them.
    """

    sizes: Sizes
    batches: tuple[Batch, ...]
    raises: bool
    cp: int = 1


@dataclass(frozen=True, kw_only=True)
class Truth:
    """y_BLD and dx_BLD by data-parallel rank (of that rank's own loss); gradients by parameter name, of the mean
    loss over the data-parallel ranks; loads_E by layer, over all ranks."""

    y: list[Tensor]
    dx: list[Tensor]
    grads: dict[str, Tensor]
    loads: list[Tensor]


def make_weights(sizes: Sizes, seed: int) -> list[LayerWeights]:
    """Weights of every layer, the same on every rank.

    Layer i's router reads expert j's logit from column (j + 2i) % E and nothing else, so that a problem can dictate
    every choice, to the bit; two experts further means another rank. Experts leave the first E columns alone.
    """
    g = torch.Generator().manual_seed(seed)
    e, d, f = sizes.num_experts, sizes.dim, sizes.hidden
    made = []
    for layer in range(sizes.layers):
        router = torch.zeros(e, d, dtype=torch.float64)
        router[torch.arange(e), (torch.arange(e) + 2 * layer) % e] = 1
        up = torch.randn(e, 2 * f, d, generator=g, dtype=torch.float64) / d**0.5
        down = torch.randn(e, d, f, generator=g, dtype=torch.float64) / f**0.5
        if layer < sizes.layers - 1:
            down[:, :e] = 0
        up, down = raw = up.to(sizes.dtype), down.to(sizes.dtype)
        if sizes.codes != "none":
            up, down = (decoded(*quantized(t, sizes.codes), sizes.codes, sizes.dtype) for t in raw)
        up, down = up.double(), down.double()
        adapters = _make_adapters(sizes, down, g)
        frozen = adapters or sizes.codes != "none" or sizes.frozen == "frozen"
        trained = () if frozen else ("down",) if sizes.frozen == "downalone" else ("up", "down")
        made.append(
            LayerWeights(router_ED=router, up_EID=up, down_EDF=down, raw=raw, adapters=adapters, trained=trained)
        )
    return made


def _make_adapters(sizes: Sizes, down_EDF: Tensor, g: torch.Generator) -> dict[str, dict[str, Tensor]]:
    """None; or one, of each expert or shared; or two, of which one is active. What `down` leaves alone, they do."""
    names = () if sizes.adapter == "none" else ("idle", "one") if sizes.adapter == "twolora" else ("one",)
    n, d, f = 1 if sizes.adapter == "sharedlora" else sizes.num_experts, sizes.dim, sizes.hidden
    shapes = {"up_a": (n, RANK, d), "up_b": (n, 2 * f, RANK), "down_a": (n, RANK, f), "down_b": (n, d, RANK)}
    made = {}
    for name in names:
        params = {own: torch.randn(s, generator=g, dtype=torch.float64) / s[-1] ** 0.5 for own, s in shapes.items()}
        params["down_b"] *= (down_EDF != 0).any(2).any(0)[:, None]
        made[name] = {own: t.to(sizes.dtype).double() for own, t in params.items()}
    return made


def dense_moe(x_ND: Tensor, ids_NK: Tensor, w_NK: Tensor, up_EID: Tensor, down_EDF: Tensor) -> Tensor:
    """As `oracle.moe`, for tokens that are all real; ids of -1 give nothing."""
    out_NED = torch.einsum("nef,edf->ned", swiglu(torch.einsum("nd,eid->nei", x_ND, up_EID)), down_EDF)
    index = ids_NK.clamp_min(0)[..., None].expand(*ids_NK.shape, x_ND.shape[1])
    return (out_NED.gather(1, index) * torch.where(ids_NK >= 0, w_NK, 0)[..., None]).sum(1)


@dataclass(frozen=True, kw_only=True)
class _Routed:
    """Sequences, scores and choices of one rank's real tokens in one layer."""

    sequence_N: Tensor
    p_NE: Tensor
    ids_NK: Tensor


def _forward(batch: Batch, x: Tensor, layers: Sequence[Sequence[Tensor]]) -> tuple[Tensor, list[_Routed]]:
    """(y, what the real tokens of each layer did). Masked tokens pass through with nothing added."""
    real = torch.ones(x.shape[:2], dtype=torch.bool) if batch.mask_BL is None else batch.mask_BL
    h, ids, chosen = x[real], batch.ids_BLK[real], []
    y, sequence_N = h, real.nonzero()[:, 0]
    if batch.documents_BL is not None:
        sequence_N = sequence_N * DOCUMENTS + batch.documents_BL[real]
    for layer, (router, up, down) in enumerate(layers):
        # The router of layer i reads the logits two experts further on: see `make_weights`.
        ids_NK = torch.where(ids >= 0, (ids - 2 * layer) % router.shape[0], -1)
        # Not normalized over the chosen: at K = 1 that has no gradient.
        p_NE = (h @ router.T).softmax(1)
        y = dense_moe(h, ids_NK, p_NE.gather(1, ids_NK.clamp_min(0)), up, down)
        chosen.append(_Routed(sequence_N=sequence_N, p_NE=p_NE, ids_NK=ids_NK))
        h = h + y
    return torch.zeros_like(x).masked_scatter(real[..., None].expand_as(x), y), chosen


def _balance(ranks: Sequence[_Routed], cp: int) -> Tensor:
    """The loss per sequence of one layer, over all ranks; `cp` of them in turn hold the same sequences."""
    total = torch.zeros((), dtype=torch.float64)
    for group in (ranks[i : i + cp] for i in range(0, len(ranks), cp)):
        sequence, p, ids = (torch.cat([getattr(r, name) for r in group]) for name in ("sequence_N", "p_NE", "ids_NK"))
        for b in set(sequence.tolist()):
            counts = (ids[sequence == b] + 1).reshape(-1).bincount(minlength=p.shape[1] + 1)[1:].double()
            total = total + (counts / counts.sum().clamp(min=1) * p[sequence == b]).sum()
    return total * ranks[0].p_NE.shape[1] / max(sum(r.p_NE.shape[0] for r in ranks), 1)


def _judged(w: LayerWeights) -> dict[str, Tensor]:
    """The parameters that have gradients: of adapters, or of the experts' weights that are not frozen."""
    own = _active(w) | {name: {"up": w.up_EID, "down": w.down_EDF}[name] for name in w.trained}
    return {name: t.clone().requires_grad_() for name, t in {"router": w.router_ED, **own}.items()}


def _merged(w: LayerWeights, dtype: torch.dtype) -> LayerWeights:
    """The adapters' deltas in the weights, as `dtype` holds them."""
    up, down = (t.to(dtype).double() for t in _built(w, {"router": w.router_ED} | _active(w))[1:])
    return LayerWeights(router_ED=w.router_ED, up_EID=up, down_EDF=down)


def _active(w: LayerWeights) -> dict[str, Tensor]:
    return {f"one.{name}": t for name, t in w.adapters.get("one", {}).items()}


def _built(w: LayerWeights, own: dict[str, Tensor]) -> list[Tensor]:
    """Router, up and down as they work."""
    up, down = own.get("up", w.up_EID), own.get("down", w.down_EDF)
    if "one" in w.adapters:
        up_a, up_b, down_a, down_b = (own[f"one.{name}"] for name in w.adapters["one"])
        up, down = up + SCALE * (up_b @ up_a), down + SCALE * (down_b @ down_a)
    return [own["router"], up, down]


def solve(problem: Problem, weights: Sequence[LayerWeights]) -> Truth:
    """Outputs, input gradients and parameter gradients of every rank."""
    if problem.sizes.adapter == "mergedlora":
        weights = [_merged(w, problem.sizes.dtype) for w in weights]
    params = [_judged(w) for w in weights]
    layers = [_built(w, own) for w, own in zip(weights, params, strict=True)]
    xs = [batch.x_BLD.clone().requires_grad_() for batch in problem.batches]
    ys, routed = zip(*(_forward(b, x, layers) for b, x in zip(problem.batches, xs, strict=True)), strict=True)
    losses = [(y * batch.dy_BLD).sum() for y, batch in zip(ys, problem.batches, strict=True)]
    by_layer = list(zip(*routed, strict=True))
    if problem.cp > 1 or problem.batches[0].documents_BL is not None:
        losses += [len(xs) * BALANCE * _balance(ranks, problem.cp) for ranks in by_layer]
    leaves = [*xs, *(p for own in params for p in own.values())]
    found = torch.autograd.grad(torch.stack(losses).sum(), leaves, allow_unused=True, materialize_grads=True)
    names = [f"{i}.{name}" for i, own in enumerate(params) for name in own]
    slots = [torch.cat([r.ids_NK.reshape(-1) for r in ranks]) for ranks in by_layer]
    return Truth(
        y=[y.detach() for y in ys],
        dx=list(found[: len(xs)]),
        grads={name: grad / len(xs) for name, grad in zip(names, found[len(xs) :], strict=True)},
        loads=[(ids + 1).bincount(minlength=problem.sizes.num_experts + 1)[1:] for ids in slots],
    )


def updated(weights: Sequence[LayerWeights], grads: Mapping[str, Tensor], optimizer: str) -> dict[str, Tensor]:
    """Parameters by name behind two steps of "adamw" or "muon", each by 1 + parameter times the gradient
    before; {} of "none"."""
    made: dict[str, Tensor] = {}
    for name, grad in grads.items() if optimizer != "none" else ():
        layer, part = name.split(".", 1)
        p, m = nn.Parameter(_judged(weights[int(layer)])[part].detach()), torch.zeros_like(grad)
        adamw = torch.optim.AdamW([p], **ADAMW)
        for _ in range(2):
            p.grad = grad = grad * (1 + p.detach())
            if optimizer == "muon" and part in ("up", "down"):
                m = MOMENTUM * m + (1 - MOMENTUM) * grad
                whole = (MOMENTUM * m + (1 - MOMENTUM) * grad).chunk(2 if part == "up" else 1, 1)  # gate, and up
                move = torch.cat([0.2 * max(t.shape[1:]) ** 0.5 * orthogonal(t) for t in whole], 1)
                p.data = (1 - ADAMW["lr"] * ADAMW["weight_decay"]) * p.data - ADAMW["lr"] * move
            else:
                adamw.step()
        made[name] = p.detach()
    return made


def orthogonal(x: Tensor) -> Tensor:
    """Five steps of Newton-Schulz by Keller Jordan's coefficients, taken by the singular values."""
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    s = s / torch.linalg.vector_norm(s, dim=-1, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return torch.matmul(u * s[..., None, :], v)
