"""Memory that tensors use in turn: never two at once, and no more than were in use at once."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.dispatch.workspace import SMALLEST, Workspace


def address(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def test_a_slot_is_taken_again_only_when_the_last_view_of_it_is_gone() -> None:
    workspace = Workspace()
    first = workspace.take(100).bytes(100)
    view = first[8:24].view(torch.float32).view(2, 2).data
    where = address(first)
    del first
    assert address(workspace.take(100).bytes(100)) != where, "a view is left"
    held = torch.ones(2, 2, requires_grad=True) * view
    del view
    assert address(workspace.take(100).bytes(100)) != where, "autograd has saved it"
    held.sum().backward()
    del held
    assert address(workspace.take(100).bytes(100)) == where
    kept = workspace.take(100).bytes(100).untyped_storage()
    assert kept.data_ptr() == where
    assert address(workspace.take(100).bytes(100)) != where, "its storage is held without a tensor"
    del kept
    assert address(workspace.take(100).bytes(100)) == where
    assert len(workspace.slots) == 2


def test_the_smallest_that_is_large_enough_is_taken_and_the_largest_grows() -> None:
    workspace = Workspace()
    sizes = [SMALLEST, 4 * SMALLEST, 2 * SMALLEST]
    held = [workspace.take(size).bytes(size) for size in sizes]
    assert [slot.size for slot in workspace.slots] == sizes
    del held
    assert workspace.take(2 * SMALLEST).size == 2 * SMALLEST
    assert workspace.take(0).size == SMALLEST
    assert workspace.take(0, besides=workspace.slots[0]).size == 2 * SMALLEST
    grown = workspace.take(5 * SMALLEST)
    assert grown.bytes(5 * SMALLEST).shape == (5 * SMALLEST,)
    assert [slot.size for slot in workspace.slots] == [SMALLEST, 8 * SMALLEST, 2 * SMALLEST]


def test_what_evaluation_has_used_training_uses_again() -> None:
    workspace = Workspace()
    with torch.inference_mode():
        workspace.take(16).bytes(16).fill_(1)
    again = workspace.take(16).bytes(16).view(torch.float32)
    assert not again.is_inference()
    weight = torch.ones(4, requires_grad=True)
    (weight * again.data).sum().backward()
    assert weight.grad is not None


def test_no_tensor_keeps_a_slot() -> None:
    workspace = Workspace()
    for size in (0, 1, SMALLEST + 1, 10 * SMALLEST):
        for _ in range(3):
            kept = workspace.take(size).bytes(size)
            assert not workspace.slots[0].free
            del kept
            assert workspace.slots[0].free
    assert len(workspace.slots) == 1
