"""The fewest bytes that an experts layer and its row moves read and write.

forward     weights of experts that have rows, tokens in, tokens out
backward    the same weights, tokens and output gradients in, input gradients out,
            gradients of all experts' weights out (read as well where they are added to)
"""

from __future__ import annotations


def layer_bytes(
    tokens: int, dim: int, hidden: int, *, experts: int, active: int, size: int, backward: bool, in_place: bool = False
) -> int:
    """The fewest bytes read and written.

    active: experts that have rows. size: bytes of a value. in_place: gradients are added to what is there.
    """
    one_expert, rows = 3 * dim * hidden, tokens * dim
    forward = active * one_expert + 2 * rows
    if not backward:
        return size * forward
    gradients = experts * one_expert * (2 if in_place else 1)
    return size * (forward + active * one_expert + 3 * rows + gradients)


def gather_bytes(rows: int, width: int, size: int) -> int:
    """Each row read and written."""
    return 2 * rows * width * size


def combine_bytes(rows: int, outputs: int, width: int, size: int) -> int:
    """Each row read, each sum written."""
    return (rows + outputs) * width * size
