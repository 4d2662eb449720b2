"""Megatron's own experts split rows on the host: by counts that came with the exchange's."""

from __future__ import annotations

import pytest

from gpu_evidence import test_fake_cuda as fake
from helpers import megatron_cpu  # noqa: F401

pytestmark = fake.pytestmark


def test_the_host_waits_once_for_the_exchange_and_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "WITH_TRITON", {"megatron": None})
    fake.check(fake.counts.__wrapped__()["megatron"], fake.Budget(116, 30, waits=1))
