"""Balanced experts hold copies, their gradients while they go home, and nothing as large as all experts of a rank."""

from __future__ import annotations

import pytest

from helpers.balanced_memory import COPY, on_rank
from helpers.ranks import run_ranks

ODD = 0.3
"""Of a copy's bytes: rows, pre-activations and indices, which are elsewhere than without balance."""


@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
def test_two_copies_of_four_experts(main_grad: bool) -> None:
    donor, receiver = run_ranks(on_rank, 2, main_grad)
    for rank, found in enumerate((donor, receiver)):
        for again, (plain, balanced) in enumerate(found):
            copies = 2 * rank
            assert balanced.copies == copies
            forward, kept, backward = (
                (getattr(balanced, when) - getattr(plain, when)) / COPY for when in ("forward", "kept", "backward")
            )
            assert abs(kept - (0 if again else copies)) <= ODD, "copies, and none under recompute"
            assert forward <= 2 + ODD, "what leaves or comes"
            assert backward <= 2 * copies + ODD if rank else backward <= 2 + ODD, "gradients of what left or came"
