"""`python -m benchmarks optimizer`: a step of AdamW on a stack of experts, and Newton-Schulz of its matrices.

*AdamW*: one stack [E, m, n] with its gradient, by torch.optim.AdamW as it comes, with `foreach=True`, with
`fused=True`, and by `trimtab.optim.Muon`, whose rule for what is no matrix it is; *x limit* is the time over that of
scaling as many bytes in place as a step reads and writes (three and a half stacks each way, in the parameter's dtype).
*Newton-Schulz*: five steps, in bfloat16, of each matrix of a stack: torch.optim.Muon's in a loop, ours in batches with
the same bits (`plain`), and ours on X X^T with a restart (`gram`). Judged by their singular values.

Legend: E experts; m, n dims of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contestant import Contestant
from benchmarks.step import DTYPES, first_is_right
from benchmarks.subject import Subject, Where
from benchmarks.task import Task

ADAMW, ITERATION = "AdamW", "Newton-Schulz"
FORMS = ("default", "foreach", "fused")
BOUNDS = {"bf16": 1e-2, "fp32": 1e-5}
LARGEST = 1.4
"""Of the singular values of what Newton-Schulz gives."""


def adamw_task(shape: Sequence[int], *, dtype: str, threads: int) -> Task:
    """torch's default form is asked first, for it says what is right."""

    def made(name: str, role: Any, form: str) -> Contestant:
        args = {"shape": list(shape), "dtype": dtype, "form": form}
        return Contestant(name=name, role=role, build=f"{__name__}:build_adamw", args=args, threads=threads)

    return Task(
        part="optimizer",
        case={"shape": list(shape), "dtype": dtype, "threads": threads, "of": ADAMW},
        contestants=[
            *(made(f"torch.optim.AdamW, {form}", "peer", form) for form in FORMS),
            made("as many bytes scaled in place", "limit", "bytes"),
            made("trimtab.optim.Muon, rule adamw", "ours", "trimtab"),
        ],
        modes=[ADAMW],
        make_judge=lambda: first_is_right(BOUNDS[dtype]),
    )


def iteration_task(shape: Sequence[int], *, threads: int) -> Task:
    def made(name: str, role: Any, form: str) -> Contestant:
        args = {"shape": list(shape), "form": form}
        return Contestant(name=name, role=role, build=f"{__name__}:build_iteration", args=args, threads=threads)

    return Task(
        part="optimizer",
        case={"shape": list(shape), "dtype": "bf16", "threads": threads, "of": ITERATION},
        contestants=[
            made("a loop over torch.optim.Muon's", "peer", "loop"),
            made("trimtab, plain", "ours", "plain"),
            made("trimtab, gram", "ours", "gram"),
        ],
        modes=[ITERATION],
        make_judge=lambda: singular,
    )


def singular(_: Contestant, outcomes: list[dict[str, Tensor]]) -> str | None:
    largest = max(float(one["largest"]) for one in outcomes)
    return None if largest <= LARGEST else f"a singular value of {largest:.2f}"


class Stack(nn.Module):
    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter((0.02 * torch.randn(*shape)).to(dtype))
        self.weight.grad = (1e-3 * torch.randn(*shape)).to(dtype)


def build_adamw(args: dict[str, Any], where: Where) -> Subject:
    """args: shape, dtype, form."""
    if args["form"] == "bytes":
        held = torch.ones(7 * torch.Size(args["shape"]).numel() // 2, dtype=DTYPES[args["dtype"]])
        return Subject(modes={ADAMW: lambda: held.mul_(1.0)})
    stack = Stack(args["shape"], DTYPES[args["dtype"]])
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    optimizer: torch.optim.Optimizer
    if args["form"] == "trimtab":
        from trimtab.optim import Muon

        optimizer = Muon(stack, **options)
    else:
        chosen = {} if args["form"] == "default" else {args["form"]: True}
        optimizer = torch.optim.AdamW(stack.parameters(), **options, **chosen)

    def outcome() -> dict[str, Tensor]:
        optimizer.step()
        return {"parameter": stack.weight.detach().flatten()[:: max(1, stack.weight.numel() // 4096)].float()}

    return Subject(modes={ADAMW: optimizer.step}, outcome=outcome, judged=ADAMW)


def build_iteration(args: dict[str, Any], where: Where) -> Subject:
    """args: shape, form."""
    torch.manual_seed(0)
    x_Emn = torch.randn(*args["shape"])
    if args["form"] == "loop":
        from torch.optim._muon import _zeropower_via_newtonschulz

        def step() -> list[Tensor]:
            return [_zeropower_via_newtonschulz(x_mn, (3.4445, -4.7750, 2.0315), 5, 1e-7) for x_mn in x_Emn]

    else:
        from trimtab import optim

        form = getattr(optim, args["form"])
        at_once = max(1, (8 << 20) // (2 * x_Emn[0].numel()))  # as in a step

        def step() -> list[Tensor]:
            return [m for part in x_Emn.split(at_once) for m in form(part, optim.KELLER, torch.bfloat16)]

    def outcome() -> dict[str, Tensor]:
        return {"largest": torch.linalg.matrix_norm(step()[0].float(), 2).reshape(1)}

    return Subject(modes={ITERATION: step}, outcome=outcome, judged=ITERATION)
