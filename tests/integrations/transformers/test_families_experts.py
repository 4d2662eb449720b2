"""Every family computes the same under our experts as under transformers' own loop: outputs and all gradients.

Float64 is the judge, since there every difference is a mistake. Float32 then shows that nothing is lost on the way:
a gradient may differ by 2e-6 of its scale, or by as much as rounding moves it in the family's own loop (sums that
cancel, as in hyper-connections, lose digits under any implementation).
"""

from __future__ import annotations

import pytest
import torch

from helpers.families import family_names
from helpers.parity import CANCELLING, FLOAT32_INSIDE, Run, difference, reference_run, run_model, scale

NAMES = family_names()
IMPL = "trimtab"

pytestmark = pytest.mark.usefixtures("registered", "one_thread")
BATCH, LENGTH = 2, 12


def check(got: Run, wanted: Run, relative: float, rounding: Run | None = None) -> None:
    """Fails at the first value that is off, with its name. `rounding` is `wanted` in another precision."""
    largest = max(scale(g) for key, g in wanted.values.items() if g is not None and key not in ("output", "loss"))
    for key, value in wanted.values.items():
        ours = got.values[key]
        if value is None:  # nothing came here: the loop leaves no gradient, zeros say the same
            assert ours is None or not ours.any(), f"{key}: gradient unexpected"
            continue
        assert ours is not None, f"{key}: gradient missing"
        own = None if rounding is None else rounding.values[key]
        size = max(scale(value), 1e-4 * largest)  # a gradient of nothing but rounding has no scale of its own
        allowed = max(relative * size, 0.0 if own is None else 4 * difference(value, own))
        error = difference(ours, value)
        assert error <= allowed, f"{key}: off by {error:.2e}, allowed {allowed:.2e}, scale {scale(value):.2e}"
    for key, (shape, grad) in got.experts_grads.items():
        assert grad is not None, f"{key}: no gradient"
        assert grad.shape == shape, f"{key}: gradient {tuple(grad.shape)}, parameter {tuple(shape)}"


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
