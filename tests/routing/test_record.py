"""Decisions recorded, written, read, cut, joined and replayed; errors that say what does not fit."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.comparing import assert_close
from trimtab.errors import ConfigError, InputError
from trimtab.integrations.transformers.routers.observe import record, replay
from trimtab.moe import MoE, MoEConfig
from trimtab.routing.config import RouterConfig
from trimtab.routing.observers import Replayer
from trimtab.routing.port import Port, RouterInfo, RouterRun
from trimtab.routing.recompute import replay_in_recompute
from trimtab.routing.replay import Decisions
from trimtab.routing.rollouts import lay_out

D, E, K, B, L = 8, 6, 2, 3, 5

replaying = partial(checkpoint, use_reentrant=False, context_fn=replay_in_recompute)


class Tiny(nn.Module):
    """Two MoE layers."""

    def __init__(self, seed: int = 0, **router: object) -> None:
        super().__init__()
        torch.manual_seed(seed)
        c = RouterConfig(**{"num_experts": E, "top_k": K, "normalize": True, "z_loss": 0.1} | router)
        self.layers = nn.ModuleList(MoEConfig(dim=D, hidden=4, router=c).build(f"layers.{i}") for i in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, token_mask=mask).y
        return x


def tokens(seed: int = 1) -> Tensor:
    return torch.randn(B, L, D, generator=torch.Generator().manual_seed(seed))


NAMES = ("layers.0.router", "layers.1.router")


@pytest.mark.parametrize("more", [{}, {"capacity_factor": 0.6}, {"select": "expert_choice"}], ids=str)
def test_a_replayed_model_repeats_itself(more: dict[str, object], tmp_path: Path) -> None:
    model, x = Tiny(**more), tokens()
    mask = torch.rand(B, L, generator=torch.Generator().manual_seed(3)) < 0.8
    with record(model) as recording:
        y = model(x, mask)
    decisions = recording.decisions()
    columns = E if "select" in more else K
    assert decisions.ids.shape == (B, L, 2, columns)
    assert (decisions.ids[~mask] == -1).all()
    decisions.save(tmp_path / "step.pt")
    assert [f.name for f in tmp_path.iterdir()] == ["step.pt"]
    loaded = Decisions.load(tmp_path / "step.pt")
    assert loaded.layers == NAMES
    assert loaded.num_experts == E
    assert torch.equal(loaded.ids.long(), decisions.ids)
    with replay(model, loaded):
        assert torch.equal(model(x, mask), y)


def test_replay_keeps_experts_and_has_live_scores() -> None:
    """The rollout's experts with the trained model's own scores: what a reinforcement-learning step needs."""
    old, new, x = Tiny(0), Tiny(1), tokens()
    with record(old) as recording:
        old(x)
    decisions = recording.decisions()
    new_ids = new.layers[0](x).ids_TK
    with replay(new, decisions):
        out = new.layers[0](x)
        new(x).sum().backward()
    assert torch.equal(out.ids_TK, decisions.ids[:, :, 0].flatten(0, 1))
    assert not torch.equal(out.ids_TK, new_ids)
    by_argument = new.layers[0](x, ids=decisions.ids[:, :, 0])
    assert torch.equal(by_argument.y, out.y)
    assert all(layer.router.weight.grad.abs().max() > 0 for layer in new.layers)
    assert torch.equal(new.layers[0](x).ids_TK, new_ids)  # outside, the model decides again


def test_tokens_without_a_record_are_decided_live() -> None:
    old, new, x = Tiny(0), Tiny(1), tokens()
    with record(old) as recording:
        old(x)
    ids = recording.decisions().ids.clone()
    ids[0, 2] = ids[2] = -1
    with replay(new, Decisions(ids=ids, num_experts=E, layers=NAMES)), record(new) as second:
        y = new(x)
        y.sum().backward()
    found = second.decisions().ids
    merged = torch.where(ids < 0, found, ids)
    assert torch.equal(found, merged)
    assert torch.equal(found[2, :, 0], new.layers[0](x).ids_TK.view(B, L, K)[2])
    grads = [p.grad.clone() for p in new.parameters()]
    new.zero_grad()
    with replay(new, Decisions(ids=merged, num_experts=E, layers=NAMES)):
        again = new(x)
        again.sum().backward()
    assert torch.equal(again, y)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(new.parameters(), grads, strict=True))


def test_slots_without_room_are_normalised_as_before() -> None:
    """Kept as -2 - e: with -1 the weights of the slots beside them would grow."""
    model, x = Tiny(capacity_factor=0.6), tokens()
    with record(model) as recording:
        layer = model.layers[0](x)
        model.layers[1](x)
    ids = recording.decisions().ids
    assert ((ids < -1) & (ids >= -1 - E)).any()
    with replay(model, recording.decisions()):
        again = model.layers[0](x)
    assert torch.equal(again.ids_TK, layer.ids_TK)
    assert torch.equal(again.y, layer.y)


def test_each_forward_is_recorded_once_and_found_by_number() -> None:
    model, xs = Tiny(), [tokens(s).requires_grad_() for s in range(3)]
    with record(model) as recording:
        for x in xs:
            replaying(model, x).sum().backward()
    for i, x in enumerate(xs):
        with record(model) as once:
            model(x)
        assert torch.equal(recording.decisions(i).ids, once.decisions().ids)
    with pytest.raises(InputError, match="no decisions of forward 3"):
        recording.decisions(3)


@pytest.mark.parametrize("before", [False, True])
def test_replayed_decisions_hold_in_recompute(before: bool) -> None:
    """Reinforcement learning: perhaps reference scores with the model's own picks, then a step with the rollout's."""
    old, new = Tiny(0), Tiny(1)
    x = tokens().requires_grad_()
    with record(old) as recording:
        old(x)
    found = []
    for run in (Tiny.__call__, replaying):
        new.zero_grad()
        if before:
            with torch.no_grad():
                new(x)
        with replay(new, recording.decisions()):
            loss = run(new, x).square().sum()
        loss.backward()  # behind the context: the recompute takes what the first run took
        found.append([p.grad.clone() for p in new.parameters()])
    for ours, true in zip(*found, strict=True):
        assert_close(ours, true, 1e-6, "gradient")


def test_the_same_tokens_with_other_ids_in_flight() -> None:
    layer = Tiny().layers[0]
    g = torch.Generator().manual_seed(4)
    ids = [torch.rand(B, L, E, generator=g).argsort(-1)[..., :K] for _ in range(2)]
    found = []
    for again in (False, True):
        x = tokens().requires_grad_()
        calls = [lambda x, i=i: layer(x, ids=i).y for i in ids]
        ys = [replaying(call, x) if again else call(x) for call in calls]
        found.append([torch.autograd.grad(y.sum(), x)[0] for y in ys])
    for ours, true in zip(found[1], found[0], strict=True):
        assert_close(ours, true, 1e-6, "gradient")


def test_cut_and_join() -> None:
    ids = torch.randint(-1, E, (B, L, 2, K))
    whole = Decisions(ids=ids, num_experts=E, layers=("a", "b"))
    assert torch.equal(Decisions.join([whole.cut(0, 2), whole.cut(2, 2), whole.cut(2, L)]).ids, ids)
    assert torch.equal(Decisions.join([whole, whole], dim=0).ids, ids.repeat(2, 1, 1, 1))
    with pytest.raises(InputError, match="different models"):
        Decisions.join([whole, Decisions(ids=ids, num_experts=E, layers=("a", "c"))])


@pytest.mark.parametrize(("dtype", "experts"), [(torch.int8, 200), (torch.int16, 40_000)])
def test_ids_may_be_narrower_than_the_number_of_experts(dtype: torch.dtype, experts: int) -> None:
    ids = torch.tensor([-3, -1, 0, 127]).view(1, 2, 1, 2)
    narrow = Decisions(ids=ids.to(dtype), num_experts=experts, layers=("a",))
    replayer, port = Replayer(narrow), Port(RouterInfo(name="a", num_experts=experts, top_k=2, partial=True))
    replayer.begin({"a": port.info}, torch.device("cpu"))
    logits = torch.zeros(2, 1)
    run = RouterRun(port, nn.Module(), ids=logits.long(), logits_TE=logits, scores=lambda: logits, shape=(1, 2))
    assert replayer.decide(run).tolist() == [[-3, -1], [0, 127]]


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    model, x = Tiny(), tokens()
    with record(model) as recording:
        model(x)
    good = recording.decisions()
    for wrong, says in (
        ({"ids": good.ids[:, :, :1]}, "1 layers, but the names are ('layers.0.router', 'layers.1.router')"),
        ({"ids": good.ids[0]}, "[B, L, layers, K]"), ({"ids": good.ids.float()}, "hold -1 as well, got torch.float32"),
        ({"ids": good.ids.clamp(0).to(torch.uint8)}, "of int8, int16, int32 or int64, which hold -1 as well"),
        ({"ids": good.ids.clamp(0).to(torch.uint16)}, "hold -1 as well, got torch.uint16"),
        ({"num_experts": 3}, "the model has 0..2"), ({"ids": good.ids - 20}, "name experts -"),
        ({"layers": ("a", "a")}, "names are ('a', 'a')"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=re.escape(says)):
            Decisions(**{"ids": good.ids, "num_experts": E, "layers": NAMES} | wrong)
    renamed = Decisions(ids=good.ids, num_experts=E, layers=("a", "b"))
    more = Decisions(ids=good.ids, num_experts=E + 1, layers=NAMES)
    wider = Decisions(ids=torch.nn.functional.pad(good.ids, (0, 1)), num_experts=E, layers=NAMES)
    for wrong, says in (
        (renamed, "for the layers ('a', 'b')"), (more, "among 7 experts, 2 per"), (wider, "6 experts, 3 per token, but")
    ):  # fmt: skip
        with pytest.raises(InputError, match=re.escape(says)), replay(model, wrong):
            pass
    with replay(model, good), pytest.raises(InputError, match=r"layers\.0\.router.*\[B, L\] = \[3, 5\].*got \[3, 4\]"):
        model(x[:, :4])
    with replay(model, good), pytest.raises(InputError, match=r"got \[5, 3\]"):
        model(x.transpose(0, 1))
    with pytest.raises(ConfigError, match="no Router in Linear"), record(nn.Linear(2, 2)):
        pass
    path = tmp_path / "other.pt"
    for content, says in (({"format": "other"}, "is no file"), ([1], "is no file")):
        torch.save(content, path)
        with pytest.raises(InputError, match=says):
            Decisions.load(path)
    torch.save({"format": "trimtab.decisions", "version": 2}, path)
    with pytest.raises(InputError, match=r"version 2, this trimtab reads 1"):
        Decisions.load(path)
    torch.save({"format": "trimtab.decisions", "version": 1, "ids": good.ids}, path)
    with pytest.raises(InputError, match=r"lacks \['layers', 'num_experts'\]"):
        Decisions.load(path)
    torch.save({"format": "trimtab.decisions", "code": Path}, path)  # a class: not loaded
    with pytest.raises(InputError, match="is no file"):
        Decisions.load(path)
    path.write_bytes(b"not a file of torch")
    with pytest.raises(InputError, match="is no file"):
        Decisions.load(path)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="is no file"):
        Decisions.load(path)
    with pytest.raises(FileNotFoundError):
        Decisions.load(tmp_path / "missing.pt")


def test_layers_that_differ_do_not_make_one_tensor() -> None:
    model = Tiny()
    model.layers[1] = MoE(MoEConfig(dim=D, hidden=4, router=RouterConfig(num_experts=E, top_k=3)))
    with record(model) as recording:
        model(tokens())
    with pytest.raises(InputError, match="layers differ"):
        recording.decisions()


def test_no_tokens_have_decisions_too(tmp_path: Path) -> None:
    model = Tiny()
    for shape in ((0, L), (B, 0)):
        x = torch.zeros(*shape, D)
        with record(model) as recording:
            model(x)
        recording.decisions().save(tmp_path / "none.pt")
        loaded = Decisions.load(tmp_path / "none.pt")
        assert loaded.ids.shape == (shape[0], 0, 2, K)
        with replay(model, loaded):
            assert model(x).shape == x.shape


ROUTERS = [(RouterInfo(name=name, num_experts=E, top_k=K), number) for number, name in enumerate(NAMES)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("missing", range(L + 1))
def test_rows_of_a_record_lie_where_they_are_known_to_lie(packed: bool, missing: int) -> None:
    """Those behind a cached prefix, and those of an engine that stopped early, are as many."""
    rows = torch.rand(L - missing, 2, E).argsort(-1)[..., :K]
    mask, places = torch.ones(2, L), torch.arange(L).repeat(2)[None]
    layout = {"attention_mask": None if packed else mask, "position_ids": places if packed else None}
    lay = partial(lay_out, [None, rows], ROUTERS, 2, counted="auto", **layout)
    for start in (0, missing):
        ids = lay(start_len=[0, start]).ids.view(2 * L, 2, K).long()
        assert torch.equal(ids[L + start : 2 * L + start - missing], rows)
        assert int((ids >= 0).sum()) == rows.numel()
    if missing < 2:
        assert torch.equal(lay(start_len=None).ids, lay(start_len=0).ids)
    else:
        with pytest.raises(InputError, match=rf"sample 1: {L - missing} rows for {L} tokens.*start_len="):
            lay(start_len=None)
