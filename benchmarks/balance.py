"""The expert bias on a tiny, badly skewed model: how even the loads get, and that the loss still falls.

A byte-level language model of one MoE layer learns the source of Python's argparse. Two of its eight experts start
with router weights that win nearly every token. The same model is trained without balancing, with the expert bias
(aux-loss-free, by its sign and by quantiles) and with the auxiliary loss. One thread, a few seconds:

    python -m benchmarks.balance [--plot balance.png]

max_vio is (largest load - mean load) / mean load of a step: 0 when even, E / K - 1 = 3 when K experts get everything.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimtab.moe import MoEConfig
from trimtab.routing.balance import max_vio, update_bias
from trimtab.routing.config import RouterConfig

DIM, HIDDEN, EXPERTS, TOP_K, CONTEXT, TOKENS = 32, 32, 8, 2, 4, 512
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "sign": {"bias": True, "bias_rate": 0.01},
    "quantile": {"bias": True, "bias_rule": "quantile"},
    "auxiliary loss": {"aux_loss": 0.01},
}


class Bytes(nn.Module):
    """The last few bytes, one MoE layer, the next byte."""

    def __init__(self, router: RouterConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(CONTEXT * 256, DIM)
        self.moe = MoEConfig(dim=DIM, hidden=HIDDEN, router=router).build("moe")
        self.head = nn.Linear(DIM, 256)
        with torch.no_grad():
            self.embed.weight += 0.5  # what all tokens have in common ...
            self.moe.router.weight[:2] += 0.05  # ... two experts like

    def forward(self, context_TC: Tensor) -> tuple[Tensor, Tensor]:
        """(logits of the next byte, balance losses)."""
        x = self.embed(context_TC + torch.arange(CONTEXT) * 256).sum(1)
        out = self.moe(F.rms_norm(x, (DIM,)))
        return self.head(F.rms_norm(x + out.y, (DIM,))), sum(out.losses.values(), torch.zeros(()))


def train(way: str, steps: int = 200, seed: int = 0) -> tuple[list[float], list[float]]:
    """(cross-entropy per byte in nats, max_vio) of every step."""
    torch.manual_seed(seed)
    source = " ".join(inspect.getsource(argparse).split())  # runs of blanks are one token repeated: nothing to balance
    text = torch.frombuffer(bytearray(source.encode()), dtype=torch.uint8).long()
    model = Bytes(RouterConfig(num_experts=EXPERTS, top_k=TOP_K, score="sigmoid", normalize=True, **WAYS[way]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    losses, unevenness = [], []
    for _ in range(steps):
        place = torch.randint(0, text.numel() - CONTEXT, (TOKENS, 1)) + torch.arange(CONTEXT + 1)
        window = text[place]
        logits, balance = model(window[:, :CONTEXT])
        loss = F.cross_entropy(logits, window[:, CONTEXT])
        optimizer.zero_grad()
        (loss + balance).backward()
        optimizer.step()
        (loads,) = update_bias(model).values()
        losses.append(float(loss.detach()))
        unevenness.append(max_vio(loads))
    return losses, unevenness


def plot(results: dict[str, tuple[list[float], list[float]]], path: str) -> None:
    """Both curves of every way, to an image."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for way, (losses, unevenness) in results.items():
        left.plot(unevenness, label=way)
        right.plot(losses, label=way)
    left.axhline(0.5, color="0.6", linestyle=":", label="0.5")
    left.set(xlabel="step", ylabel="max_vio = (max - mean) / mean", ylim=(0, None), title="imbalance")
    right.set(xlabel="step", ylabel="nats per byte", title="loss")
    left.legend(title="balanced by", frameon=False)
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plot", metavar="FILE", help="also draw the curves (needs matplotlib)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {way: train(way, options.steps) for way in WAYS}
    print(f"{'step':>5}" + "".join(f"{way + ': max_vio':>25}{'loss':>8}" for way in results))
    last = max(options.steps // 10, 1)
    for start in range(0, options.steps, last):
        cells = ""
        for losses, unevenness in results.values():
            part = slice(start, start + last)
            cells += f"{statistics.mean(unevenness[part]):25.2f}{statistics.mean(losses[part]):8.3f}"
        print(f"{min(start + last, options.steps):5d}{cells}")
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
