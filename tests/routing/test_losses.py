"""Balance losses against plain loops in float64: in one process, and on ranks however the tokens are cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.comparing import assert_close
from helpers.loss_ranks import on_ranks
from helpers.ranks import run_ranks
from helpers.router_truth import truth_losses
from trimtab.errors import InputError
from trimtab.moe import MoEConfig
from trimtab.routing import losses
from trimtab.routing.config import RouterConfig
from trimtab.routing.losses import LossGroups, StepTotals
from trimtab.routing.router import Router

D, E, K = 8, 6, 2
NAMES = ("aux", "sequence_aux", "global_aux", "z")


def router(kind: str = "softmax", dtype: torch.dtype = torch.float64, **more: object) -> Router:
    c = {"aux_loss": 1.0, "sequence_aux_loss": 1.0, "global_aux_loss": 1.0, "z_loss": 1.0}
    made = Router(RouterConfig(**{"num_experts": E, "top_k": K, "score": kind} | c | more), D, dtype=dtype)
    weight = torch.randn(E, D, generator=torch.Generator().manual_seed(4))
    made.weight.data.copy_(weight)
    return made


def of(router: Router, x: Tensor, **options: object) -> dict[str, Tensor]:
    return router.losses(router(x, **options))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (3, 4), (3, 0), (0, 4)], ids=str)
@pytest.mark.parametrize("masked", [0.0, 0.5, 1.0])
def test_one_process(kind: str, shape: tuple[int, int], masked: float) -> None:
    g = torch.Generator().manual_seed(3)
    tokens = shape[0] * shape[1]
    mask = torch.rand(tokens, generator=g) >= masked
    x = torch.randn(tokens, D, generator=g, dtype=torch.float64).masked_fill(~mask[:, None], float("nan"))
    ours = router(kind)
    x.requires_grad_()
    out = ours(x, token_mask_T=mask, batch=shape[0])
    found = ours.losses(out)
    assert tuple(found) == NAMES
    true_weight = ours.weight.detach().clone().requires_grad_()
    true_x = x.detach().nan_to_num(0).requires_grad_()
    truth = truth_losses(true_x @ true_weight.T, out.ids_TK, mask, shape[0], ours.config)
    for name in NAMES:
        assert_close(found[name], truth[name], 1e-12, name)
        grads = torch.autograd.grad(found[name], (x, ours.weight), retain_graph=True)
        true = torch.autograd.grad(truth[name], (true_x, true_weight), retain_graph=True)
        for grad, true_grad in zip(grads, true, strict=True):
            assert_close(grad, true_grad, 1e-12, f"{name} gradient")


@pytest.mark.parametrize("lengths", [[[5, 1, 3], [2, 7]], [[9], [9]], [[1], [1]], [[1, 1], [2]]], ids=str)
@pytest.mark.parametrize("masked", [0.0, 0.4])
@pytest.mark.parametrize("renamed", [False, True])
def test_a_pack_is_its_documents_one_by_one(lengths: list[list[int]], masked: float, renamed: bool) -> None:
    """Losses, loads and every gradient of a layer. renamed: ids that come again in other rows and later in one."""
    g = torch.Generator().manual_seed(3)
    c = RouterConfig(num_experts=E, top_k=K, sequence_aux_loss=1.0, global_aux_loss=0.2, z_loss=0.3)
    moe = MoEConfig(dim=D, hidden=4, router=c, dtype=torch.float64).build()
    length = sum(lengths[0])
    x = torch.randn(2, length, D, generator=g, dtype=torch.float64)
    mask, dy = torch.rand(2, length, generator=g) >= masked, torch.randn(x.shape, generator=g, dtype=torch.float64)
    ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    whole = moe.router(x.flatten(0, 1), token_mask_T=mask.flatten())
    moe.router.totals = StepTotals(tokens=int(mask.sum()), counts_E=whole.loads_E)

    def run(x: Tensor, mask: Tensor, dy: Tensor, **more: Tensor) -> dict[str, Tensor]:
        out = moe(x, token_mask=mask, **more)
        ((out.y * dy).sum() + sum(out.losses.values())).backward()
        return {name: loss.detach() for name, loss in out.losses.items()}

    packed = run(x, mask, dy, sequence_ids=ids % 2 if renamed else ids)
    grads, loads = [p.grad.clone() for p in moe.parameters()], moe.router.take_loads()
    moe.zero_grad()
    apart: dict[str, Tensor] = {}
    for row, sizes in enumerate(lengths):
        for part in torch.arange(length).split(sizes):
            for name, loss in run(x[row : row + 1, part], mask[row : row + 1, part], dy[row : row + 1, part]).items():
                apart[name] = apart.get(name, 0) + loss
    assert torch.equal(loads, moe.router.take_loads())
    for name, loss in packed.items():
        assert_close(loss, apart[name], 1e-12, name)
    for (name, p), grad in zip(moe.named_parameters(), grads, strict=True):
        assert_close(grad, p.grad, 1e-12, name)


def test_packs_that_do_not_fit_are_refused() -> None:
    made, x = router(), torch.randn(6, D, dtype=torch.float64)
    for wrong in (torch.zeros(5, dtype=torch.long), torch.zeros(6), torch.zeros(6, 1, dtype=torch.long)):
        with pytest.raises(InputError, match=r"sequence ids must be int \[6\], got"):
            made(x, sequence_ids_T=wrong)
    made.groups = LossGroups(sequence=("some",), divisor=1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"packs that are cut over ranks .* needs num_sequences"):
        made(x, sequence_ids_T=torch.zeros(6, dtype=torch.long))
    router(sequence_aux_loss=0.0)(x, sequence_ids_T=torch.zeros(6, dtype=torch.long))
    moe = MoEConfig(dim=D, hidden=4, router=made.config).build()
    with pytest.raises(InputError, match=r"sequence_ids must be int \(2, 3\) as x is"):
        moe(torch.randn(2, 3, D), sequence_ids=torch.zeros(6, dtype=torch.long))


def test_balanced_loads_make_the_losses_one() -> None:
    even = router(select="balanced", dtype=torch.float32)
    even.weight.data.zero_()
    losses = of(even, torch.randn(3 * E, D), batch=3)
    assert [round(float(losses[name].detach()), 5) for name in NAMES[:3]] == [1.0] * 3


def test_coefficients_choose_and_scale() -> None:
    x = torch.randn(7, D, dtype=torch.float64)
    full = of(router(), x)
    some = of(router(aux_loss=0.0, sequence_aux_loss=0.5, global_aux_loss=0.0), x)
    assert tuple(some) == ("sequence_aux", "z")
    assert_close(some["sequence_aux"], full["sequence_aux"] / 2, 1e-12, "scaled")
    off = {"aux_loss": 0.0, "sequence_aux_loss": 0.0, "global_aux_loss": 0.0, "z_loss": 0.0}
    assert of(router(**off), x) == {}


@pytest.mark.parametrize("coefficient", [0.0, 1.0])
def test_ranks_meet_for_what_is_asked_for(coefficient: float, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[object] = []
    monkeypatch.setattr(losses, "all_sum", lambda t, groups: (met.append(groups), t)[1])
    made = router(sequence_aux_loss=coefficient)
    made.groups = LossGroups(batch=("all",), sequence=("some",), divisor=1)  # type: ignore[arg-type]
    of(made, torch.randn(7, D, dtype=torch.float64))
    assert met == [("some",), ("all",)][not coefficient :]


def test_fractions_are_of_the_picks_before_capacity() -> None:
    x = torch.randn(12, D, dtype=torch.float64)
    assert_close(of(router(capacity_factor=0.3), x)["aux"], of(router(), x)["aux"].detach(), 1e-12, "aux")


def test_the_step_so_far_counts_until_the_step_ends() -> None:
    """Without totals global_aux takes f from this micro-batch and those before it in the step."""
    g = torch.Generator().manual_seed(8)
    ours, alone = router(), router()
    xs = [torch.randn(n, D, generator=g, dtype=torch.float64) for n in (5, 0, 9)]
    found = [ours(x) for x in xs]
    values = [ours.losses(out) for out in found]
    picks = torch.cat([out.ids_TK for out in found]).flatten()
    fractions = (torch.bincount(picks, minlength=E).double() / picks.numel()).tolist()
    mask = torch.ones(9, dtype=torch.bool)
    logits = found[2].logits_TE.detach()
    true = truth_losses(logits, found[2].ids_TK, mask, 1, ours.config, fractions)["global_aux"]
    assert_close(values[2]["global_aux"], true, 1e-12, "so far")
    ours.take_loads()
    assert_close(of(ours, xs[2])["global_aux"], of(alone, xs[2])["global_aux"].detach(), 1e-12, "new step")


def test_gradients_of_float32_losses() -> None:
    x = torch.randn(50, D, generator=torch.Generator().manual_seed(1))

    def grad(dtype: torch.dtype) -> Tensor:
        r = router("sigmoid", dtype)
        return torch.autograd.grad(sum(of(r, x.to(dtype)).values()), r.weight)[0]

    assert_close(grad(torch.float32), grad(torch.float64), 2e-6, "weight gradient")


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.xdist_group("ranks4"))])
def test_any_cut_over_ranks_equals_one_process(ranks: int) -> None:
    for rank, gaps in enumerate(run_ranks(on_ranks, ranks)):
        bad = {name: gap for name, gap in gaps.items() if not gap <= 1e-12}
        assert not bad, (rank, bad)
        assert len(gaps) == 10
