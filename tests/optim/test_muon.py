"""Muon as an optimizer: groups, state, what is refused, what it says; AdamW's part is torch's."""

from __future__ import annotations

import copy
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import trimtab
from helpers.families import build_model, forward, sample_batch
from trimtab import ConfigError, ExpertMLP, GroupedLinear, MoEConfig, RouterConfig, checkpoint
from trimtab.optim import Layout, Muon, plain
from trimtab.optim.matrices import find_matrices


class Model(nn.Module):
    """An embedding, a layer of experts, a fused projection of its own making, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.moe = MoEConfig(dim=8, hidden=12, router=RouterConfig(num_experts=4, top_k=2)).build()
        self.w_qkv = nn.Linear(8, 24)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.moe(self.embed(ids)).y
        return self.head(self.mix(x) + self.w_qkv(x).view(*x.shape, 3).sum(-1))


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, seed: int = 0) -> None:
    for step in range(steps):
        draw = torch.Generator().manual_seed(10 * seed + step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=draw).to(param.dtype)
        optimizer.step()


def rules(optimizer: Muon) -> dict[str, str]:
    """Of each parameter by name; "none" without weight decay."""
    return {
        optimizer.found(p).name: group["rule"] if group["weight_decay"] else "none"
        for group in optimizer.param_groups for p in group["params"]
    }  # fmt: skip


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_groups_are_by_what_modules_hold() -> None:
    found = rules(Muon(Model()))
    assert found == {
        "embed.weight": "adamw", "moe.router.weight": "adamw", "moe.experts.gate_up": "muon",
        "moe.experts.down": "muon", "w_qkv.weight": "adamw", "w_qkv.bias": "none", "mix.weight": "muon",
        "mix.bias": "none",
    }  # fmt: skip
    told = {"w_qkv.*t": Layout((1, 1, 1), repeats=8), "mix.weight": None}
    assert rules(Muon(Model(), router="muon", layouts=told)) == found | {
        "moe.router.weight": "muon", "w_qkv.weight": "muon", "mix.weight": "adamw",
    }  # fmt: skip


def test_what_adamw_has_gets_torchs_bits() -> None:
    model = Model()
    other = copy.deepcopy(model)
    optimizer = Muon(model, lr=1e-2)
    trained(model, optimizer, 3)
    theirs = torch.optim.AdamW(
        [{"params": [other.embed.weight, other.moe.router.weight, other.w_qkv.weight]},
         {"params": [other.w_qkv.bias, other.mix.bias], "weight_decay": 0.0}],
        lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True,
    )  # fmt: skip
    trained(other, theirs, 3)
    for name in ("embed.weight", "moe.router.weight", "w_qkv.weight", "w_qkv.bias", "mix.bias"):
        assert torch.equal(model.get_parameter(name), other.get_parameter(name)), name
    assert set(optimizer.state[model.embed.weight]) == set(theirs.state[other.embed.weight])


def test_zero_gradients_and_none_change_nothing_but_decay() -> None:
    for fill in (0.0, None):
        model = Model()
        before, optimizer = copy.deepcopy(model), Muon(model, weight_decay=0.0)
        for param in model.parameters():
            param.grad = None if fill is None else torch.zeros_like(param)
        optimizer.step()
        assert equal(model, before)
        assert bool(optimizer.state) == (fill is not None)


def test_frozen_parameters_are_left_out_and_join_later() -> None:
    model = Model()
    model.moe.requires_grad_(requires_grad=False)
    optimizer = Muon(model)
    assert not [name for name in rules(optimizer) if name.startswith("moe")]
    with pytest.raises(ConfigError, match=r"moe\.router\.weight is not Muon's \(router\)"):
        optimizer.add_param_group({"params": list(model.moe.parameters()), "rule": "muon"})
    with pytest.raises(ConfigError, match="not of the model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4, 4))]})
    model.moe.requires_grad_()
    optimizer.add_param_group({"params": list(model.moe.experts.parameters())})
    optimizer.add_param_group({"params": list(model.moe.router.parameters()), "lr": 0.5})
    assert [group["rule"] for group in optimizer.param_groups[-2:]] == ["muon", "adamw"]
    assert len(optimizer.param_groups) == 5
    trained(model, optimizer)
    assert len(optimizer.state) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": [nn.Parameter(torch.zeros(2, 2))]}, r"Pass model, not model\.parameters"),
        ({"adjust_lr_fn": "other"}, "adjust_lr_fn='other'"), ({"router": "sgd"}, "router='sgd'"),
        ({"momentum": 1.0}, "momentum=1.0"), ({"lr": -1.0}, "lr=-1.0"), ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"adamw_lr": -1.0}, "adamw_lr=-1.0"),
        ({"layouts": {"nothing": None}}, r"layouts= has \['nothing'\]"),
        ({"layouts": {"mix.weight": Layout((3,))}}, r"mix\.weight \(8, 8\) is not made of matrices as Layout"),
        ({"layouts": {"mix.bias": Layout((8,))}}, r"mix\.bias \(8,\) is not made"),
    ],
)  # fmt: skip
def test_what_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Muon(**{"model": Model(), **options})


def test_wrapped_and_renamed_modules_are_known() -> None:
    model = Model()
    expected = rules(Muon(model))
    for module in (model.moe.experts, model.mix):  # as FSDP2 does
        module.__class__ = type(f"FSDP{type(module).__name__}", (type("FSDPModule", (), {}), type(module)), {})
    assert rules(Muon(model)) == expected
    assert rules(Muon(torch.compile(model))) == expected  # type: ignore[arg-type]
    optimizer = Muon(model)
    model.mix.weight = nn.Parameter(model.mix.weight.detach().clone())  # as accelerate does
    optimizer.param_groups[0]["params"][-1] = model.mix.weight
    assert optimizer.found(model.mix.weight).name == "mix.weight"


def test_lora_factors_are_whose_one_says() -> None:
    model = nn.ModuleDict({"experts": ExpertMLP(4, 8, 12)})
    trimtab.add_adapter(model, "one", rank=2)
    own = {name: param for name, param in model.named_parameters() if "adapters" in name}
    assert {rules(Muon(model))[name] for name in own} == {"adamw"}
    optimizer = Muon(model, lora="muon")
    assert {rules(optimizer)[name] for name in own} == {"muon"}
    up_b = next(param for name, param in own.items() if name.endswith("gate_up_b"))
    layout = optimizer.found(up_b).layout  # type: ignore[arg-type]
    assert layout is not None
    assert layout.matrices(up_b.shape) == [(8, 12, 2)]


def test_under_peft_what_is_saved_whole_is_what_it_was() -> None:
    base = build_model("qwen3_next")
    config = LoraConfig(target_modules=["o_proj"], modules_to_save=["lm_head", "q_proj", "shared_expert.gate_proj"])
    model = get_peft_model(base, config)
    optimizer = Muon(model)
    found = {f.name: f for f in map(optimizer.found, (p for p in model.parameters() if p.requires_grad))}
    layouts = {re.split(r"\.(?:modules|lora)_", name)[0].split(".")[-1]: f.layout for name, f in found.items()}
    assert layouts == {"lm_head": None, "o_proj": None, "q_proj": Layout((8, 8), repeats=4), "gate_proj": Layout((16,))}
    assert {f.what for f in found.values()} == {"head", "LoRA", "dense"}


def test_a_layer_of_its_own_class_is_not_taken_for_a_linear() -> None:
    class Grouped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flip(-1))

    assert rules(Muon(nn.Sequential(Grouped(4, 6), nn.Linear(6, 1)))) == {
        "0.weight": "adamw", "0.bias": "none", "1.weight": "adamw", "1.bias": "none",
    }  # fmt: skip


def test_per_head_each_heads_rows_are_a_matrix() -> None:
    model, alone = nn.Sequential(nn.Linear(8, 12, bias=False)), [nn.Linear(8, 4, bias=False) for _ in range(3)]
    apart = nn.Sequential(*alone)
    with torch.no_grad():
        for layer, rows in zip(alone, model[0].weight.split(4), strict=True):
            layer.weight.copy_(rows)
    optimizers = Muon(model, layouts={"0.weight": Layout((4,), repeats=3, heads=True)}), Muon(apart)
    model[0].weight.grad = torch.randn(12, 8)
    for layer, rows in zip(alone, model[0].weight.grad.split(4), strict=True):
        layer.weight.grad = rows.clone()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(model[0].weight, torch.cat([layer.weight for layer in alone]))


def test_every_way_to_keep_state_resumes_to_the_same_bits(tmp_path: Path) -> None:
    def start() -> tuple[Model, Muon]:
        torch.manual_seed(0)
        model = Model()
        return model, Muon(model, lr=1e-2)

    truth, never_stopped = start()
    trained(truth, never_stopped, 2)
    first, saved = start()
    trained(first, saved)

    def go_on(model: nn.Module, optimizer: Muon) -> None:
        for param, like in zip(model.parameters(), first.parameters(), strict=True):
            param.data.copy_(like)
        draw = torch.Generator().manual_seed(1)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=draw)
        optimizer.step()
        assert equal(model, truth)

    model, optimizer = start()
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    go_on(model, optimizer)
    model, optimizer = start()
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(get_optimizer_state_dict(first, saved)))
    go_on(model, optimizer)
    checkpoint.save(tmp_path / "run", first, saved, step=1)
    model, optimizer = start()
    checkpoint.load(tmp_path / "run", model, optimizer)
    go_on(model, optimizer)
    model, optimizer = copy.deepcopy((first, saved))
    go_on(model, optimizer)


def test_state_is_loaded_by_name_whatever_the_groups() -> None:
    def alike(names: str) -> nn.ModuleDict:
        return nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in names})

    one, two = alike("abcd"), alike("bacd")
    saved, other = (Muon(model, layouts={"c.weight": None}) for model in (one, two))
    trained(one, saved)
    other.add_param_group({"params": [other.param_groups[0]["params"].pop()]})  # d, in a group of its own
    state = copy.deepcopy(saved.state_dict())
    other.load_state_dict(state)
    for name, layer in one.items():
        held, theirs = saved.state[layer.weight], other.state[two[name].weight]
        assert {key: t.tolist() for key, t in held.items()} == {key: t.tolist() for key, t in theirs.items()}, name
    assert [group["rule"] for group in other.param_groups] == ["muon", "adamw", "muon"]
    with pytest.raises(ConfigError, match=r"c\.weight is muon's, and what was loaded for it has no momentum_buffer"):
        Muon(two).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"d\.weight only in the checkpoint, e\.weight only here"):
        Muon(alike("abce")).load_state_dict(state)
    state["param_groups"][1]["lr"] = 0.5
    with pytest.raises(ConfigError, match=r"holds b\.weight and c\.weight, which had other options"):
        Muon(two).load_state_dict(state)


def test_hooks_on_loading_are_heard() -> None:
    model = Model()
    saved = Muon(model)
    trained(model, saved)
    kept = copy.deepcopy(saved.state_dict())
    optimizer = Muon(model)
    optimizer.register_load_state_dict_pre_hook(lambda _, loaded: loaded | {"state": kept["state"]})
    optimizer.load_state_dict(kept | {"state": {}})
    for param, state in saved.state.items():
        assert {name: t.tolist() for name, t in optimizer.state[param].items()} == {
            name: t.tolist() for name, t in state.items()
        }
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


def test_a_closure_is_called_and_a_learning_rate_may_be_a_tensor() -> None:
    model = build_model("qwen3_moe")
    optimizer, batch = Muon(model, lr=torch.tensor(5e-3)), sample_batch(model, 2, 16)

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = forward(model, batch)[1]
        found.backward()
        return found

    first, *_, last = (float(optimizer.step(loss).detach()) for _ in range(7))
    assert last < first - 0.2


def test_it_says_what_each_parameter_is_and_what_newton_schulz_costs() -> None:
    calls: list[Tensor] = []

    def counted(x: Tensor, *rest: Any) -> Tensor:
        calls.append(x)
        return plain(x, *rest)

    model = nn.Sequential(ExpertMLP(4, 8, 16), ExpertMLP(4, 8, 16), nn.Linear(8, 4))
    optimizer = Muon(model, newton_schulz=counted)
    said = repr(optimizer)
    assert "2 x *.gate_up: 8 x [16, 8] (experts)" in said
    assert "*.weight: 1 x [4, 8] (dense)" in said
    assert "*.bias: [4] (vector)" in said
    flops = lambda m, n: 5 * (4 * m * m * n + 2 * m**3)  # noqa: E731
    assert f"{2 * 12 * flops(8, 16) + flops(4, 8):.3g} FLOPs a step" in said
    assert not calls


def test_operands_are_small_on_a_cpu() -> None:
    seen: list[tuple[int, ...]] = []

    def newton_schulz(x: Tensor, *rest: Any) -> Tensor:
        seen.append(tuple(x.shape))
        return x.bfloat16()

    model = nn.Sequential(ExpertMLP(16, 512, 1024), *(nn.Linear(64, 64, bias=False) for _ in range(3)))
    optimizer = Muon(model, newton_schulz=newton_schulz)
    trained(model, optimizer)
    assert sum(shape[0] for shape in seen) == 16 * 3 + 3
    assert max(shape[0] * shape[1] * shape[2] * 2 for shape in seen) <= 8 << 20
    assert (3, 64, 64) in seen


def test_gate_and_up_in_one_of_our_own_modules_are_two() -> None:
    model = MoEConfig(
        dim=8, hidden=12, router=RouterConfig(num_experts=4, top_k=2), shared_hidden=12, shared_gate=True
    ).build()
    sizes = {f.name: f.layout.matrices((24, 8)) for f in find_matrices(model).values() if f.layout and "up" in f.name}
    assert sizes["shared.up.weight"] == [(1, 12, 8), (1, 12, 8)]
    of_megatron: Any = GroupedLinear(4, 8, 24, bias=False)  # as its first linear of experts says of itself
    of_megatron.halves, of_megatron.tp_size = 2, 1
    (found,) = find_matrices(of_megatron).values()
    assert found.layout == Layout((12, 12))
    of_megatron.tp_size = 2
    assert find_matrices(of_megatron)[of_megatron.weight][1:] == (None, "experts, a share of them")
    theirs = nn.ModuleDict({"fc1": nn.Linear(8, 24, bias=False), "fc2": nn.Linear(12, 8, bias=False)})
    assert [f.what for f in find_matrices(theirs).values()] == ["several projections of sizes not known", "dense"]


def test_names_that_say_several_projections_are_not_guessed() -> None:
    names = ("qkv", "in_proj", "w13", "qkv_proj", "kv_proj", "q_proj", "wq", "input_linear")
    model = nn.ModuleDict({name: nn.Linear(8, 24, bias=False) for name in names})
    said = {f.name.split(".")[0]: f.what for f in find_matrices(model).values()}
    assert [name for name in names if said[name] == "dense"] == ["q_proj", "wq", "input_linear"]
    assert {said[name] for name in names[:5]} == {"several projections of sizes not known"}
    model["o_proj"] = nn.Linear(12, 8, bias=False)  # half of what q_proj gives: it has a gate, who knows where
    assert {f.name.split(".")[0]: f.what for f in find_matrices(model).values()}["q_proj"] == said["qkv"]
