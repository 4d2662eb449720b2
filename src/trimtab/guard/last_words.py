"""What a rank says in the store as it ends before its peers have opened its record, which ends with the process."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from trimtab.guard.peers import Peer

_PATIENCE = timedelta(seconds=1)


class LastWords:
    """Of one group on this rank, over a connection of its own: another thread may be waiting in the program's."""

    def __init__(self, store: Store) -> None:
        self._store: Store | None = None
        with suppress(Exception):  # not every store has copies
            self._store = store.clone()  # type: ignore[attr-defined]
            self._store.set_timeout(_PATIENCE)

    def say(self, prefix: str, me: Peer) -> None:
        """Nothing more once the store has failed: each layer may have a word, and a process that ends waits for it."""
        if self._store is None:
            return
        try:
            PrefixStore(prefix, self._store).set(f"peer/{me.rank}", me.to_json())
        except Exception:  # whatever a store raises whose host or folder has gone
            self._store = None


_last_words: WeakKeyDictionary[dist.ProcessGroup, LastWords] = WeakKeyDictionary()
"""Guards of one group share it. Lives as long as the groups do."""


def last_words_of(group: dist.ProcessGroup, store: Store) -> LastWords:
    """The one of `group`, whose store is `store`."""
    found = _last_words.get(group)
    return _last_words.setdefault(group, LastWords(store)) if found is None else found
