"""A TCP port for ranks to meet at."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

FIRST, LAST = 20_000, 32_000
"""Below those that Linux gives to connections: one of them might be taken before the ranks listen there."""


def free_port() -> int:
    """Of this host, and at random: nobody listens there, and whoever else asks at this moment is given another."""
    draw = random.SystemRandom()
    while True:
        port = draw.randint(FIRST, LAST)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("localhost", port))
            return port
