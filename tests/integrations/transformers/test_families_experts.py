"""Every family computes the same under our experts as under transformers' own loop: outputs and all gradients.

Float64 is the judge, since there every difference is a mistake. Float32 then shows that nothing is lost on the way:
a gradient may differ by 2e-6 of its scale, or by as much as rounding moves it in the family's own loop (sums that
cancel, as in hyper-connections, lose digits under any implementation).
"""

from __future__ import annotations

import pytest
import torch

from helpers.families import family_names
from helpers.parity import CANCELLING, FLOAT32_INSIDE, check, reference_run, run_model

NAMES = family_names()
IMPL = "trimtab"

pytestmark = pytest.mark.usefixtures("registered", "one_thread")
BATCH, LENGTH = 2, 12


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("batch", "length"), [(BATCH, LENGTH), (1, 2)], ids=["2x12", "1x2"])
def test_float64(name: str, batch: int, length: int) -> None:
    wanted = reference_run(name, torch.float64, 0, batch, length)
    got = run_model(name, IMPL, torch.float64, 0, batch, length)
    assert got.routed_like(wanted)
    check(got, wanted, relative=FLOAT32_INSIDE.get(name, 1e-10))


@pytest.mark.parametrize("name", NAMES)
def test_float32(name: str) -> None:
    for seed in range(5):  # a near tie in a router may fall either way: then another seed
        exact = reference_run(name, torch.float64, seed, BATCH, LENGTH)
        wanted = reference_run(name, torch.float32, seed, BATCH, LENGTH)
        got = run_model(name, IMPL, torch.float32, seed, BATCH, LENGTH)
        if got.routed_like(wanted) and exact.routed_like(wanted):
            check(got, wanted, relative=CANCELLING.get(name, 2e-6), rounding=exact)
            return
    pytest.fail("no seed among 5 routes alike: that is no near tie")
