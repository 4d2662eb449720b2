"""A bfloat16 parameter and its low bits are a float32 value in every bit."""

from __future__ import annotations

import torch

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


def test_zero_low_bits_are_the_parameter() -> None:
    param = wide_values().bfloat16()
    wide = widen(param, torch.zeros_like(param, dtype=torch.int16))
    assert torch.equal(wide.nan_to_num(), param.float().nan_to_num())


def test_weights_that_bfloat16_cannot_move_learn() -> None:
    param = torch.full((4, 4), 0.5, dtype=torch.bfloat16)
    low = torch.zeros_like(param, dtype=torch.int16)
    master = param.float()
    for _ in range(1000):
        master.mul_(1 - 1e-4)
        write_back(widen(param, low).mul_(1 - 1e-4), param, low)
    assert torch.equal(widen(param, low), master)
    assert float(param[0, 0]) < 0.46
