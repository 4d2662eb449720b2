"""Replicated experts hold replicas, their gradients while they go home, and nothing as large as a rank's experts."""

from __future__ import annotations

import pytest

from helpers.ranks import run_ranks
from helpers.replicated_memory import COPY, on_rank

ODD = 0.3
"""Of a replica's bytes: rows, pre-activations and indices, which are elsewhere than without replicas."""


@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
def test_two_copies_of_four_experts(main_grad: bool) -> None:
    donor, receiver = run_ranks(on_rank, 2, main_grad)
    for rank, found in enumerate((donor, receiver)):
        for again, (plain, replicated) in enumerate(found):
            replicas = 2 * rank
            assert replicated.replicas == replicas
            forward, kept, backward = (
                (getattr(replicated, when) - getattr(plain, when)) / COPY for when in ("forward", "kept", "backward")
            )
            assert abs(kept - (0 if again else replicas)) <= ODD, "replicas, and none under recompute"
            assert forward <= 2 + ODD, "what leaves or comes"
            assert backward <= 2 * replicas + ODD if rank else backward <= 2 + ODD, "gradients of what left or came"
