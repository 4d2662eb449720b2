"""Instructions for the compiled kernels' products of bfloat16: the fastest that run here and pass their test.

    amx-bf16      tiles of 16 x 16 sums (Sapphire Rapids and later, where the system permits it)
    avx512-bf16   sums of two products each (Cooper Lake, Zen 4 and later)
    widened       to float32 as they are brought into cache: everywhere

All three take their sums in float32; the first two round hidden rows and gradients of pre-activations to bfloat16, as
operands. Their bits differ from each other. On a CPU with AVX512-BF16 denormals become zero in what is stored in
bfloat16.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

from trimtab.errors import BackendError

PRODUCTS = ("widened", "avx512-bf16", "amx-bf16")
"""In the order of their numbers in cpu/call.h, and of their speed."""
_LACKS = (
    "",
    "this CPU does not have it",
    "the compiler that made the kernels does not know it",
    "the operating system does not permit it",
)
"""By their numbers in cpu/experts.cpp."""


class Bf16Products:
    """The instructions in use.

    name: one of `PRODUCTS`. number: its own in cpu/call.h. refused: what would be faster, and why it does not run.

    Args:
        lack: the number of what a library lacks for the products of a number.
        wanted: those alone instead of the fastest.

    Raises:
        BackendError: those wanted cannot run.
    """

    def __init__(self, lack: Callable[[int], int], wanted: str | None = None) -> None:
        if wanted is not None and wanted not in PRODUCTS:
            raise BackendError(f"no products of bfloat16 called {wanted!r}: choose one of {PRODUCTS}")
        self._lack, self._alone = lack, wanted is not None
        self.refused: dict[str, str] = {}
        self._take(PRODUCTS[::-1] if wanted is None else (wanted,))

    def give_up(self, fault: str) -> bool:
        """Take the next ones instead of these, which failed a test, and say so.

        False where there are no others, or these alone are wanted.
        """
        failed = self.name
        if not self.number or self._alone:
            return False
        self.refused[failed] = f"wrong results: {fault}"
        self._take(PRODUCTS[: self.number][::-1])
        warnings.warn(f"{failed} products: {fault}. Those called {self.name!r} are used instead", stacklevel=4)
        return True

    def __str__(self) -> str:
        return "; ".join((self.name, *(f"not {name}: {why}" for name, why in self.refused.items())))

    def _take(self, names: Iterable[str]) -> None:
        for name in names:
            why = _LACKS[self._lack(PRODUCTS.index(name))]
            if not why:
                self.name, self.number = name, PRODUCTS.index(name)
                return
            self.refused[name] = why
        raise BackendError("; ".join(f"products of bfloat16 by {name}: {why}" for name, why in self.refused.items()))
