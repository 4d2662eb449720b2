"""`trimtab bench train`: steps of a preset of `trimtab train`, with trimtab's experts and exchange and with stock ones.

One step is forward, backward and AdamW on the bytes of the standard library's source; every rank its own bytes.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from benchmarks.contestant import Contestant
from benchmarks.layer_truth import compare
from benchmarks.race import Judge
from benchmarks.subject import Subject, Where
from benchmarks.task import Task
from trimtab.errors import ConfigError
from trimtab.train.presets import PRESETS, write_preset
from trimtab.train.sources import standard_library

STEP = "step"
STOCK = {"experts": "grouped_mm", "exchange": "all_to_all"}
OURS = {"experts": "trimtab", "exchange": "trimtab"}


def train_task(
    preset: str,
    *,
    ranks: int,
    folder: Path,
    batch_size: int = 8,
    seq_len: int = 128,
    stock: bool = True,
    threads: int = 1,
) -> Task:
    """folder: where the preset's first weights are written and stay, so that all begin alike. Raises ConfigError."""
    if preset not in PRESETS:
        raise ConfigError(f"--preset {preset}: must be one of {', '.join(PRESETS)}")
    model = folder / preset
    args = {"model": str(model), "batch_size": batch_size, "seq_len": seq_len}
    build = f"{__name__}:build"
    contestants = [Contestant(name="trimtab", role="ours", build=build, args=args | OURS, ranks=ranks, threads=threads)]
    if stock:  # asked first, for it says what is right
        name = "grouped_mm" + (" + all_to_all" if ranks > 1 else "")
        peer = Contestant(name=name, role="peer", build=build, args=args | STOCK, ranks=ranks, threads=threads)
        contestants.insert(0, peer)
    tokens = batch_size * seq_len * ranks
    case = {"preset": preset, "ranks": ranks, "threads": threads, "tokens_per_step": tokens}

    def prepare() -> None:
        if not model.exists():
            with suppress(ImportError):  # without transformers each contestant says so
                write_preset(preset, 0, model)

    return Task(part="train", case=case, contestants=contestants, modes=[STEP], make_judge=_make_judge, prepare=prepare)


def build(args: dict[str, Any], where: Where) -> Subject:
    """args: model (a folder), experts, exchange, batch_size, seq_len."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    import trimtab.integrations.transformers

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if "trimtab" in (args["experts"], args["exchange"]):
        trimtab.integrations.transformers.register()
    options: dict[str, Any] = {}
    if where.ranks > 1:
        options["distributed_config"] = DistributedConfig(
            ep_size=where.ranks, fsdp_size=where.ranks, ep_implementation=args["exchange"]
        )
    model: Any = AutoModelForCausalLM.from_pretrained(
        args["model"], dtype=torch.float32, experts_implementation=args["experts"], local_files_only=True, **options
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids_BL = _bytes(args["batch_size"], args["seq_len"], where.rank)

    def loss_and_gradients() -> Tensor:
        loss: Tensor = model(input_ids=ids_BL, labels=ids_BL, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    first = loss_and_gradients()
    parts = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    norm = torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]).square().sum().sqrt()
    outcome = {"first loss": first.reshape(1), "norm of the first gradients here": norm.reshape(1)}
    optimizer.zero_grad()

    def step() -> None:
        loss_and_gradients()
        optimizer.step()
        optimizer.zero_grad()

    return Subject(modes={STEP: step}, outcome=lambda: outcome)


def _bytes(batch: int, length: int, rank: int) -> Tensor:
    """[B, L] int64: source text, as the presets' tokenizer has it."""
    wanted, text = batch * length, b""
    for path in standard_library():
        text += path.read_bytes()
        if len(text) >= wanted * (rank + 1):
            break
    return torch.tensor(list(text[wanted * rank : wanted * (rank + 1)])).view(batch, length)


def _make_judge() -> Judge:
    """Loss and gradients of the first step must be those of the first that was asked, the stock one if it races: the
    same weights and the same bytes."""
    seen: list[list[dict[str, Tensor]]] = []

    def judge(contestant: Contestant, outcomes: list[dict[str, Tensor]]) -> str | None:
        seen.append(outcomes)
        return compare(outcomes, seen[0], 1e-3)

    return judge
