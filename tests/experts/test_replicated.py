"""Experts that lend each other replicas for one call: outputs and gradients are those of one module of all experts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from helpers.comparing import assert_close
from helpers.pair_modules import quantize
from helpers.replicated_case import HOME, D, F, Lent, Meeting, P, Rows, in_threads, joined, part_of, rows_of
from trimtab.experts.lora import add_adapter, set_adapter
from trimtab.experts.module import ExpertMLP
from trimtab.experts.product import Product

ROWS = (13, 7, 0)
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def two_adapters(mlp: ExpertMLP, **options: Any) -> None:
    add_adapter(mlp, "one", rank=4, **options)
    add_adapter(mlp, "two", rank=3, alpha=5, shared=True, weights=["down"])
    set_adapter(mlp, "one", "two")
    drawn(mlp)


def one_adapter(mlp: ExpertMLP, **options: Any) -> None:
    add_adapter(mlp, rank=4, **options)
    drawn(mlp)


def drawn(mlp: ExpertMLP) -> None:
    with torch.no_grad():
        for name, param in mlp.named_parameters():
            if name.endswith("_b"):
                param.normal_(0, 0.1)


def freeze(*names: str) -> Callable[[ExpertMLP], None]:
    def change(mlp: ExpertMLP) -> None:
        for name, param in mlp.named_parameters():
            param.requires_grad_(name not in names and "all" not in names)

    return change


def whole(options: dict[str, Any], change: Callable[[ExpertMLP], Any]) -> ExpertMLP:
    torch.manual_seed(3)
    mlp = ExpertMLP(P * HOME, D, F, **options)
    change(mlp)
    return mlp


def gradients(mlp: ExpertMLP) -> dict[str, Tensor]:
    return {
        name: found
        for name, param in mlp.named_parameters()
        if (found := getattr(param, "main_grad", None) if name in ("gate_up", "up", "down") else param.grad) is not None
        or (found := param.grad) is not None
    }


def run(part: ExpertMLP, rows: Rows, lent: Lent | None, ids: Tensor, again: bool = False) -> dict[str, Tensor]:
    x, w = rows.x.clone().requires_grad_(), rows.w.clone().requires_grad_()

    def forward(x: Tensor, w: Tensor) -> Tensor:
        return part(x, ids, w, replicas=lent)

    y = checkpoint(forward, x, w, use_reentrant=False) if again else forward(x, w)
    y.backward(rows.dy)
    assert x.grad is not None
    assert w.grad is not None
    return {"y": y.detach(), "dx": x.grad, "dw": w.grad}


def compare(mlp: ExpertMLP, again: bool = False, rows: tuple[int, ...] = ROWS) -> list[Lent]:
    """All ranks against the module of all experts; the ranks' routes."""
    dtype = mlp.codes[1] if mlp.codes else mlp.down.dtype
    meeting, parts = Meeting(), [part_of(mlp, rank) for rank in range(P)]
    for part in (mlp, *parts):
        if part.main_grad != "off":
            for param in (getattr(part, name) for name in part.parameter_names[:2]):
                param.main_grad = torch.ones_like(param, dtype=torch.float32)
    given = [rows_of(rank, n, dtype) for rank, n in enumerate(rows)]
    lents = [Lent(meeting=meeting, rank=rank) for rank in range(P)]
    found = in_threads(lambda rank: run(parts[rank], given[rank], lents[rank], given[rank].ids, again))
    truth = [run(mlp, rows, None, rows.true_ids) for rows in given[:1]]
    if mlp.main_grad == "overwrite":  # in one call, then
        mlp.zero_grad()
        all_rows = Rows(**{key: torch.cat([getattr(r, key) for r in given]) for key in vars(given[0])})
        one = run(mlp, all_rows, None, all_rows.true_ids)
        cuts = [r.x.shape[0] for r in given]
        truth = [dict(zip(one, each, strict=True)) for each in zip(*(t.split(cuts) for t in one.values()), strict=True)]
    else:
        truth += [run(mlp, rows, None, rows.true_ids) for rows in given[1:]]
    for rank in range(P):
        for name, value in found[rank].items():
            assert_close(value, truth[rank][name], BOUNDS[dtype], f"{name} of rank {rank}")
    wanted, got = gradients(mlp), joined([gradients(part) for part in parts], mlp)
    assert wanted.keys() == got.keys()
    for name, value in wanted.items():
        assert_close(got[name], value, BOUNDS[dtype], name)
        fused = mlp.main_grad != "off" and "bias" not in name
        assert not fused or all(getattr(part.get_parameter(name), "grad_added_to_main_grad", False) for part in parts)
    return lents


MODULES: dict[str, tuple[dict[str, Any], Callable[[ExpertMLP], Any]]] = {
    "gated": ({}, freeze()), "biased": ({"bias": True}, freeze()),
    "no gate": ({"activation": "gelu", "bias": True}, freeze()), "up frozen": ({"bias": True}, freeze("gate_up")),
    "biases alone": ({"bias": True}, freeze("gate_up", "down")), "adapter": ({"bias": True}, one_adapter),
    "dropout": ({}, lambda mlp: one_adapter(mlp, dropout=0.25)),
    "shared adapter": ({}, lambda mlp: one_adapter(mlp, shared=True)), "two adapters": ({}, two_adapters),
    "int8": ({}, lambda mlp: mlp.quantize_("int8")), "nf4, biased": ({"bias": True}, lambda mlp: mlp.quantize_("nf4")),
    "fp8": ({"activation": "gelu", "bias": True}, lambda mlp: quantize(mlp, "fp8")),
    "mxfp4": ({}, lambda mlp: quantize(mlp, "mxfp4")),
    "nf4, adapter": ({}, lambda mlp: one_adapter(mlp.quantize_("nf4"))),
    "packed, adapter": ({"dtype": torch.float32}, lambda mlp: one_adapter(mlp.quantize_("packed"))),
}  # fmt: skip


@pytest.fixture(autouse=True)
def dropout_by_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values whoever draws first."""
    monkeypatch.setattr(Product, "_dropped", lambda self, rows, lora, block: rows * (1 - lora.dropout))


@pytest.mark.parametrize("again", [False, True], ids=["once", "recompute"])
@pytest.mark.parametrize(("options", "change"), MODULES.values(), ids=MODULES.keys())
def test_everything_is_as_in_one_module(options: dict[str, Any], change: Callable[..., Any], again: bool) -> None:
    compare(whole({"dtype": torch.float64, "kernels": "torch"} | options, change), again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ["biased", "nf4, adapter", "packed, adapter"])
def test_compiled_kernels_likewise(which: str, dtype: torch.dtype) -> None:
    options, change = MODULES[which]
    compare(whole(options | {"dtype": dtype}, change))


@pytest.mark.parametrize("mode", ["off", "accumulate"])
def test_under_autocast_and_in_two_backwards(mode: str) -> None:
    """Of one graph: gradients add up, and nothing of the first is left for the second."""
    mlp = whole({"bias": True, "main_grad": mode}, freeze())
    meeting, parts = Meeting(), [part_of(mlp, rank) for rank in range(P)]

    def on(part: ExpertMLP, rows: Rows, lent: Lent | None, ids: Tensor) -> None:
        if mode != "off":
            for param in (part.gate_up, part.down):
                param.main_grad = torch.zeros_like(param) if not hasattr(param, "main_grad") else param.main_grad
        with torch.autocast("cpu", torch.bfloat16):
            y = part(rows.x, ids, rows.w, replicas=lent)
        y.backward(rows.dy, retain_graph=True)
        y.backward(rows.dy)

    given = [rows_of(rank, n, torch.float32) for rank, n in enumerate(ROWS)]
    in_threads(lambda rank: on(parts[rank], given[rank], Lent(meeting=meeting, rank=rank), given[rank].ids))
    for rows in given:
        on(mlp, rows, None, rows.true_ids)
    got = joined([gradients(part) for part in parts], mlp)
    for name, value in gradients(mlp).items():
        assert_close(got[name], value, BOUNDS[torch.bfloat16], name)


@pytest.mark.parametrize("rows", [(0, 0, 0), (0, 0, 5), (1, 0, 0)])
def test_a_rank_without_rows_is_no_special_one(rows: tuple[int, ...]) -> None:
    compare(whole({"dtype": torch.float64, "bias": True}, freeze()), rows=rows)


@pytest.mark.parametrize("mode", ["accumulate", "overwrite"])
@pytest.mark.parametrize("again", [False, True], ids=["once", "recompute"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copies_gradients_reach_main_grad_in_its_dtype(mode: str, again: bool, dtype: torch.dtype) -> None:
    lents = compare(whole({"dtype": dtype, "main_grad": mode, "bias": True}, freeze()), again)
    (moved,) = [sizes for what, sizes in lents[0].log if what == "home"]
    assert [kind for kind, _ in moved] == [torch.float32, dtype] * 2


def movements(change: Callable[[ExpertMLP], Any], work: Callable[..., Any], **options: Any) -> list[list[str]]:
    """What each rank moved."""
    mlp = whole(options, change)
    meeting, parts = Meeting(), [part_of(mlp, rank) for rank in range(P)]
    lents = [Lent(meeting=meeting, rank=rank) for rank in range(P)]
    given = [rows_of(rank, n, torch.float32) for rank, n in enumerate(ROWS)]

    def on(rank: int) -> None:
        rows = given[rank]
        work(parts[rank], rows.x.requires_grad_(), lambda: parts[rank](rows.x, rows.ids, rows.w, replicas=lents[rank]))

    in_threads(on)
    return [[what for what, _ in lent.log] for lent in lents]


def test_what_moves_is_the_same_on_every_rank_and_no_more_than_needed() -> None:
    def backward(part: ExpertMLP, x: Tensor, forward: Callable[[], Tensor]) -> None:
        forward().sum().backward()

    def nothing(part: ExpertMLP, x: Tensor, forward: Callable[[], Tensor]) -> None:
        with torch.no_grad():
            forward()

    def of_rows(part: ExpertMLP, x: Tensor, forward: Callable[[], Tensor]) -> None:
        torch.autograd.grad(forward().sum(), [x])

    def in_halves(part: ExpertMLP, x: Tensor, forward: Callable[[], Tensor]) -> None:
        y = forward().sum()
        torch.autograd.grad(y, [x], retain_graph=True)
        torch.autograd.grad(y, list(part.parameters()))

    assert movements(freeze(), backward) == [["send", "home"]] * P
    assert movements(freeze(), nothing) == [["send"]] * P
    assert movements(freeze("all"), backward) == [["send"]] * P
    assert movements(freeze(), of_rows) == [["send"]] * P
    assert movements(freeze(), in_halves) == [["send", "home"]] * P


@pytest.mark.parametrize("mode", ["accumulate", "overwrite"])
def test_a_backward_for_the_rows_alone_leaves_main_grad(mode: str) -> None:
    def of_rows(part: ExpertMLP, x: Tensor, forward: Callable[[], Tensor]) -> None:
        for param in part.parameters():
            param.main_grad = torch.full(param.shape, 2.0)  # type: ignore[attr-defined]
        torch.autograd.grad(forward().sum(), [x])
        assert all((param.main_grad == 2).all() for param in part.parameters())  # type: ignore[attr-defined]

    movements(freeze(), of_rows, main_grad=mode)


@pytest.mark.parametrize("which", ["biased", "nf4, biased", "dropout"])
@pytest.mark.parametrize("again", [True, False], ids=["recompute", "once"])
def test_under_recompute_no_copy_lives_between_forward_and_backward(which: str, again: bool) -> None:
    options, change = MODULES[which]
    mlp, kept = whole({"dtype": torch.float64, "kernels": "torch"} | options, change), []

    class Watched(Lent):
        def send(self, tensors: Any) -> list[Tensor]:
            made = super().send(tensors)
            kept.extend(weakref.ref(t.untyped_storage()) for t in made if t.numel())
            return made

    meeting, parts = Meeting(), [part_of(mlp, rank) for rank in range(P)]

    def on(rank: int) -> None:
        rows, lent = rows_of(rank, 9, torch.float64), Watched(meeting=meeting, rank=rank)
        x = rows.x.requires_grad_()

        def forward(x: Tensor) -> Tensor:
            return parts[rank](x, rows.ids, rows.w, replicas=lent)

        y = checkpoint(forward, x, use_reentrant=False) if again else forward(x)
        meeting.barrier.wait()
        alive = any(ref() is not None for ref in kept)
        meeting.barrier.wait()
        assert alive != again
        y.sum().backward()
        meeting.barrier.wait()
        assert not any(ref() is not None for ref in kept)

    in_threads(on)
    gc.collect()
