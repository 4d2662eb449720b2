"""Other tensors in the place of parameters: gone afterwards, and never another thread's."""

from __future__ import annotations

import threading

import torch
from torch import nn

from trimtab.errors import InputError
from trimtab.experts.stand_in import standing_in


def test_the_parameter_is_back_whatever_was_raised() -> None:
    module = nn.Linear(2, 2)
    weight, other = module.weight, torch.zeros(2, 2)
    inside = standing_in([(module, "weight")], [other])
    inside.__enter__()
    assert module.weight is other
    assert not inside.__exit__(RuntimeError, RuntimeError(), None)
    assert module.weight is weight
    assert vars(module).keys() == vars(nn.Linear(2, 2)).keys()


def test_a_second_thread_is_refused_and_changes_nothing() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    weights, other = (one.weight, two.weight), torch.zeros(2, 2)
    found: list[BaseException | None] = []

    def enter(tensor: torch.Tensor) -> None:
        try:
            with standing_in([(two, "weight"), (one, "weight")], [two.weight, tensor]):
                found.append(None)
        except InputError as error:
            found.append(error)

    with standing_in([(one, "weight")], [other]):
        for tensor in (torch.ones(2, 2), one.weight):  # what is there already changes nothing
            thread = threading.Thread(target=enter, args=(tensor,))
            thread.start()
            thread.join()
        assert one.weight is other
    assert "Linear is entered twice at once" in str(found[0])
    assert found[1] is None
    assert (one.weight, two.weight) == weights
    enter(torch.ones(2, 2))
    assert found[2] is None
    assert (one.weight, two.weight) == weights
