"""Which kernels a shape takes on a device: what was measured there, "stock" where nothing was."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from trimtab.errors import BackendError
from trimtab.kernels import grouped, selftest
from trimtab.kernels.grouped import get_kernels, names_for
from trimtab.kernels.measured import TABLE, Measured, faster
from trimtab.kernels.selftest import KernelChoice


def line(triton_ms: float, **more: object) -> Measured:
    told = {"device": "H", "dim": 64, "hidden": 32, "experts": 8, "top_k": 2, "tokens": 128, "stock_ms": 1.0}
    return Measured(**{**told, "triton_ms": triton_ms, **more})  # type: ignore[arg-type]


def test_what_was_not_measured_takes_stock() -> None:
    assert faster("H", 64, 32) == "stock"
    assert faster("H", 64, 16, table=(line(0.5),)) == "stock"
    assert faster("another", 64, 32, table=(line(0.5),)) == "stock"


def test_the_faster_at_every_measurement_is_taken() -> None:
    assert faster("H", 64, 32, table=(line(0.5), line(0.9, tokens=16))) == "triton"
    assert faster("H", 64, 32, table=(line(0.5), line(1.1, tokens=16))) == "stock"


def test_auto_has_stock_behind_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, asked = torch.device("cuda", 0), list[object]()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H")
    monkeypatch.setattr(grouped, "faster", partial(faster, table=(line(0.5),)))
    assert names_for("auto", cuda, (64, 32)) == ("triton", "stock")
    assert names_for("auto", cuda, (64, 16)) == names_for("auto", cuda) == ("stock",)

    def asked_for(name: str, device: torch.device, shape: object) -> tuple[str, ...]:
        asked.append(shape)
        return ("loop",)

    monkeypatch.setattr(selftest, "names_for", asked_for)
    for dtype in (torch.bfloat16, torch.float32):
        KernelChoice("auto").on(torch.device("cpu"), dtype, (64, 32))
    assert asked == [(64, 32), None]  # what was measured was measured in bfloat16


def test_the_table_names_a_device_and_a_shape_once_for_each_number_of_tokens() -> None:
    keys = [(m.device, m.dim, m.hidden, m.experts, m.top_k, m.tokens) for m in TABLE]
    assert len(keys) == len(set(keys))


def test_triton_is_refused_where_there_is_no_cuda_device() -> None:
    with pytest.raises(BackendError, match="CUDA devices only"):
        get_kernels("triton", torch.device("cpu"))
