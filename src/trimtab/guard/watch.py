"""Asking ranks on other hosts where they are, through the store and not through the stuck collective.

A thread of each rank looks a few times a second whether somebody asks, or has found the cause. It runs only where a
peer's record cannot be read directly, has its own connection to the store, and knows nothing of the guard it serves.

    ask        a number, raised by each that asks
    answer/r   rank r's place, with the number it answers
    cause      the first verdict; the later ones read it instead of writing their own
    left/r     why rank r has ended, if with an error
"""

from __future__ import annotations

import contextlib
import json
import threading
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from trimtab.errors import first_line
from trimtab.guard.judge import seconds_at
from trimtab.guard.place import Place, SlateView

_EVERY, _ASKING, _STORE_TIMEOUT = 0.25, 0.05, 2.0


class Watch:
    """One rank's ear at the store.

    cause: the first verdict as JSON, once there is one. heard: what each rank answered since this one asked, this
        one's own answer included. left: which ranks have ended with an error, and which.
    asking: whether this one has asked. store_error: why the store is no longer used; empty while it works.
    """

    def __init__(self, store: Store, rank: int, ranks: int, mine: SlateView) -> None:
        self.cause = ""
        self.heard: dict[int, tuple[Place | None, float]] = {}
        self.left: dict[int, str] = {}
        self.store_error = ""
        self._store, self._rank, self._ranks, self._mine = store, rank, ranks, mine
        self._verdict = self._why = ""
        self._asked = self._answered = 0
        self.asking = False
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="trimtab-guard", daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Have every rank say where it is; the answers come into `heard`."""
        if not self.asking:
            self._asked, self.heard = 0, {}  # the thread may have been in the middle of the last question
        self.asking = True
        self._wake.set()

    def rest(self) -> None:
        """What was waited for has come: the next `ask` is a new question."""
        self.asking = False

    def publish(self, cause: str) -> None:
        """Make this the first cause, unless there is one; which one stands comes into `cause`."""
        self._verdict = cause
        self._wake.set()

    def stop(self, why: str) -> None:
        """End the thread, and leave word why if it is an error. A store that does not return is left behind."""
        self._why = why
        self._stop.set()
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_STORE_TIMEOUT / 2)

    def _run(self) -> None:
        try:
            self._store = self._store.clone()  # type: ignore[attr-defined]
            with contextlib.suppress(RuntimeError):
                self._store.set_timeout(timedelta(seconds=_STORE_TIMEOUT))
            while not self._stop.is_set():
                self._wake.wait(_ASKING if self.asking else _EVERY)
                self._wake.clear()
                if not self._stop.is_set():
                    self._turn()
            if self._why:
                self._store.set(f"left/{self._rank}", self._why)
        except Exception as error:  # whatever the store raises: the rank itself may be healthy, and must not stop here
            self.store_error = first_line(error)

    def _turn(self) -> None:
        store = self._store
        if self._verdict and not self.cause:
            self.cause = store.compare_set("cause", "", self._verdict).decode()
        elif not self.cause and store.check(["cause"]):
            self.cause = store.get("cause").decode()
        if self.asking and not self._asked:
            self._asked = store.add("ask", 1)
        if store.check(["ask"]) and (number := int(store.get("ask"))) != self._answered:
            place = self._mine.place()
            answer = {"number": number, "seconds": seconds_at(place), "place": asdict(place) if place else None}
            store.set(f"answer/{self._rank}", json.dumps(answer))
            self._answered = number
        if self.asking:
            for rank in range(self._ranks):
                if rank not in self.heard and store.check([f"answer/{rank}"]):
                    self._hear(rank, json.loads(store.get(f"answer/{rank}")))
                if rank not in self.left and store.check([f"left/{rank}"]):
                    self.left[rank] = store.get(f"left/{rank}").decode()

    def _hear(self, rank: int, answer: dict[str, Any]) -> None:
        if self._asked and answer["number"] >= self._asked:
            place = Place(**answer["place"]) if answer["place"] else None
            self.heard[rank] = (place, answer["seconds"])
