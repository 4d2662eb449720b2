"""All parts of the check-up, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.doctor import backends, loopback, machine, versions
from trimtab.doctor.findings import Part


def checkup() -> Iterator[Part]:
    """Each part's name and findings, as soon as they are known. Starts two processes for the last part."""
    yield "versions", versions.judge(versions.look())
    yield "machine and environment", machine.judge(machine.look())
    groups = backends.look()
    yield "process groups and transports", backends.judge(groups)
    yield "kernels, self-tested", backends.judge_kernels(backends.try_kernels(backends.devices()))
    yield "loopback", [finding for found in loopback.look() for finding in loopback.judge(found)]
