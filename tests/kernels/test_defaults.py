"""What a process sets as its default dtype and device changes neither the self-tests nor what layers compute."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

RUN = """
import sys
import torch
torch.set_default_dtype(getattr(torch, sys.argv[1]))
torch.set_default_device(sys.argv[2])
import trimtab
cpu = {"dtype": torch.float32, "device": "cpu"}
torch.manual_seed(0)
x = torch.randn(40, 64, generator=torch.Generator("cpu").manual_seed(0), **cpu).requires_grad_()
experts = trimtab.ExpertMLP(8, 64, 32, **cpu)
ids = torch.arange(80, device="cpu").view(40, 2) * 3 % 8
experts(x, ids, torch.ones(40, 2, **cpu)).square().sum().backward()
linear = trimtab.GroupedLinear(3, 64, 32, **cpu)
linear(x, [10, 0, 20]).square().sum().backward()
print([p.grad.double().sum().item() for p in (x, *experts.parameters(), *linear.parameters())])
"""


def ran(dtype: str, device: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the kernels of a process are tested once, and wild writes end it."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_CHECK_": "3", "PYTHONWARNINGS": "error::UserWarning"}
    command = [sys.executable, "-c", RUN, dtype, device]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)


@pytest.fixture(scope="module")
def plain() -> str:
    found = ran("float32", "cpu")
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.parametrize(
    ("dtype", "device"), [("bfloat16", "cpu"), ("float16", "cpu"), ("float64", "cpu"), ("float32", "meta")]
)
def test_as_with_the_usual_defaults(plain: str, dtype: str, device: str) -> None:
    found = ran(dtype, device)
    assert found.returncode == 0, found.stderr
    assert found.stdout == plain
