"""A bfloat16 parameter and its low bits are a float32 value in every bit."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from trimtab.optim import Muon
from trimtab.optim.low_bits import widen, write_back


def wide_values() -> torch.Tensor:
    """Every upper half with ties, their neighbors and random lower halves."""
    upper = torch.arange(-32768, 32768, dtype=torch.int32).unsqueeze(1) << 16
    drawn = torch.randint(65536, (65536, 8), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    special = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32).expand(65536, -1)
    return (upper + torch.cat([special, drawn], 1)).view(torch.float32)


def test_every_bit_comes_back_and_the_parameter_is_the_nearest() -> None:
    wide = wide_values()
    param, low = torch.empty_like(wide, dtype=torch.bfloat16), torch.full_like(wide, 7, dtype=torch.int16)
    write_back(wide, param, low)
    back = widen(param, low)
    number = ~wide.isnan()
    assert torch.equal(back.view(torch.int32)[number], wide.view(torch.int32)[number])
    assert back[~number].isnan().all()
    assert param[~number].isnan().all()
    cast = wide.bfloat16()
    tie = (wide.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(param.view(torch.int16)[number & ~tie], cast.view(torch.int16)[number & ~tie])
    half = (wide.view(torch.int32) & -65536).view(torch.bfloat16)[..., 1::2]  # cut off: magnitude below
    assert torch.equal(param.view(torch.int16)[number & tie], (half.view(torch.int16) + 1)[number & tie])


def test_a_hundred_steps_are_those_of_a_float32_master_through_a_resume() -> None:
    model = nn.ModuleDict(
        {"proj": nn.Linear(32, 48), "norm": nn.LayerNorm(48), "embed": nn.Embedding(9, 16)}
    ).bfloat16()
    master = deepcopy(model).float()
    narrow, wide = Muon(model, lr=1e-4, low_bits=True), Muon(master, lr=1e-4)
    for step in range(100):
        if step == 50:
            kept = deepcopy(narrow.state_dict())
            narrow = Muon(model, lr=1e-4, low_bits=True)
            narrow.load_state_dict(kept)
        for param, true in zip(model.parameters(), master.parameters(), strict=True):
            param.grad = torch.randn(param.shape).bfloat16()
            true.grad = param.grad.float()
        narrow.step()
        wide.step()
    assert {group["rule"] for group in wide.param_groups} == {"muon", "adamw"}
    for param, true in zip(model.parameters(), master.parameters(), strict=True):
        assert torch.equal(widen(param, narrow.state[param]["low_bits"]), true)
        assert narrow.state[param]["low_bits"].view(torch.int16).any()


def test_a_state_that_was_saved_without_them_gets_them() -> None:
    model = nn.ModuleDict({"proj": nn.Linear(32, 48), "embed": nn.Embedding(9, 16)}).bfloat16()
    plain, narrow = Muon(model), Muon(model, low_bits=True)
    for param in model.parameters():
        param.grad = torch.randn(param.shape).bfloat16()
    plain.step()
    narrow.load_state_dict(deepcopy(plain.state_dict()))
    master, wide = deepcopy(model).float(), deepcopy(plain.state_dict())
    with_master = Muon(master)
    for state in wide["state"].values():
        state |= {name: value.float() for name, value in state.items()}
    with_master.load_state_dict(wide)
    for param, true in zip(model.parameters(), master.parameters(), strict=True):
        true.grad = param.grad.float()  # type: ignore[union-attr]
    narrow.step()
    with_master.step()
    for param, true in zip(model.parameters(), master.parameters(), strict=True):
        assert torch.equal(widen(param, narrow.state[param]["low_bits"]), true)
