"""Adapters on experts beyond the grid of pairs: what they cost and keep, how several are one, graphs, a row's bits."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.flop_counter import FlopCounterMode

from experts.test_shapes import at
from helpers.comparing import assert_close
from helpers.pairs import Pair, Subject
from helpers.weights import expert_weights
from trimtab.experts.lora import add_adapter, merge_adapter, stack_factors
from trimtab.experts.mlp import expert_mlp
from trimtab.experts.module import ExpertMLP
from trimtab.experts.plan import plan_experts
from trimtab.experts.weight import GroupedWeight, LoraFactors

RANK, DIM, HIDDEN = 8, 64, 96
PAIR = replace(at(37, DIM, HIDDEN, "lora", rank=RANK), dtype=torch.float32, fenced=False)


def test_frozen_weights_cost_no_product_and_get_no_gradient() -> None:
    subject = Subject(PAIR)
    with FlopCounterMode(display=False) as counter:
        found = subject.run(subject.trained)
    rows = len(subject.e_S)
    own, thin = 2 * rows * 3 * DIM * HIDDEN, 2 * rows * RANK * (DIM + 2 * HIDDEN + HIDDEN + DIM)
    assert counter.get_total_flops() == own + thin + own + 2 * thin
    assert found["gate_up"] is found["down"] is None


def test_saved_are_the_rows_the_pre_activations_and_thin_rows() -> None:
    subject, saved = Subject(PAIR), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda s: saved.append(s) or s, lambda s: s):
        subject.call(subject.leaves["x"], subject.leaves["w"])
    own = {value.data_ptr() for value in subject.leaves.values()}
    floats = [tuple(s.shape) for s in saved if s.is_floating_point() and s.data_ptr() not in own]
    rows = len(subject.e_S)
    assert sorted(floats) == sorted([(rows, 2 * HIDDEN), (rows, RANK), (rows, RANK)])


def factors(groups: tuple[int, int], scale: float, outs: int = 10, ins: int = 8) -> LoraFactors:
    g = torch.Generator().manual_seed(outs)
    a, b = torch.randn(groups[0], 3, ins, generator=g), torch.randn(groups[1], outs, 3, generator=g)
    return LoraFactors(a=a.double(), b=b.double(), scale=scale)


def test_factors_of_several_adapters_are_one_adapter_s() -> None:
    def delta(of: LoraFactors) -> Tensor:
        return of.scale * (of.b @ of.a)

    own, shared = factors((4, 4), 2.0), factors((1, 1), 0.5)
    total = stack_factors([own, shared])
    assert total is not None
    torch.testing.assert_close(delta(total), delta(own) + delta(shared))
    assert stack_factors([]) is None
    assert stack_factors([own]) is own


def test_one_factor_may_be_shared_and_the_other_each_expert_s_own() -> None:
    ids, x, w = torch.randint(0, 4, (9, 2)), torch.randn(9, 8).double(), torch.rand(9, 2).double()
    up, down = torch.randn(4, 10, 8).double(), torch.randn(4, 8, 5).double()
    lora = {"up": factors((1, 4), 2.0), "down": factors((4, 1), 0.5, 8, 5)}
    leaves = [t.requires_grad_() for of in lora.values() for t in (of.a, of.b)]
    deltas = [up + 2.0 * (lora["up"].b @ lora["up"].a), down + 0.5 * (lora["down"].b @ lora["down"].a)]
    found = []
    for weights in (expert_weights(up, down, lora=lora), [GroupedWeight(values=(t,)) for t in deltas]):
        y = expert_mlp(x, w, plan_experts(ids, 4), *weights, "swiglu", "torch")
        found.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for got, true in zip(*found, strict=True):
        assert_close(got, true, 1e-12, "y, or a factor")


def test_dropout_drops_other_values_in_each_call_and_none_in_evaluation() -> None:
    pair = Pair(module="mlp", weights="lora", dropout=0.5)
    subject = Subject(pair)
    x, ids, w = subject.leaves["x"], subject.ids, subject.leaves["w"]
    one, two = subject.layer(x, ids, w), subject.layer(x, ids, w)
    assert not torch.allclose(one, two)
    subject.layer.eval()
    assert torch.equal(subject.layer(x, ids, w), subject.layer(x, ids, w))


def test_a_wrapped_module_gets_an_adapter_once() -> None:
    model = nn.ModuleList([checkpoint_wrapper(ExpertMLP(4, 8, 6)), torch.compile(ExpertMLP(4, 8, 6))])
    factors = add_adapter(model, rank=2)
    assert len(factors) == len({id(factor) for factor in factors}) == 8
    merge_adapter(model, "default")
    assert not [name for name, _ in model.named_parameters() if "default" in name]


def test_a_row_has_the_same_bits_whatever_rows_are_beside_it() -> None:
    subject = Subject(replace(at(80, DIM, HIDDEN, "lora+whole", rank=16), fenced=False))
    x, w, ids = subject.leaves["x"], subject.leaves["w"], subject.ids

    def results(n: int) -> list[Tensor]:
        rows = x.detach()[:n].clone().requires_grad_()
        y = subject.layer(rows, ids[:n], w.detach()[:n])
        return [y.detach(), *torch.autograd.grad(y, [rows], subject.dy[:n])]

    whole = results(80)
    for n in (1, 7, 40):
        assert all(torch.equal(part, all_[:n]) for part, all_ in zip(results(n), whole, strict=True))


def test_compiled_without_a_break() -> None:
    subject = Subject(replace(PAIR, weights="lora+whole"))
    leaves = [leaf for leaf in subject.leaves.values() if leaf.requires_grad]
    x, w, ids = subject.leaves["x"].requires_grad_(), subject.leaves["w"].requires_grad_(), subject.ids
    expected = torch.autograd.grad(subject.layer(x, ids, w), leaves, subject.dy)
    found = torch.autograd.grad(torch.compile(subject.layer, fullgraph=True)(x, ids, w), leaves, subject.dy)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
