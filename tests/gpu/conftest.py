"""What a test that fails must not take along: its own report, where a later one hangs, and, where the device is broken,
the time of all others."""

from __future__ import annotations

import pytest
import torch


def answers() -> bool:
    """Whether the device computes. After some errors, as an illegal access, it never does again in this process."""
    try:
        return float(torch.ones(2, device="cuda").sum()) == 2.0
    except torch.OutOfMemoryError:
        return True
    except Exception:
        return False


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item):  # type: ignore[no-untyped-def]
    """Says at once in a line what failed; a device that answers nothing more ends the run."""
    report = yield
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = report.longreprtext if crash is None else crash.message
        item.config.get_terminal_writer().write(f"\n{item.name}: {why[:300]}\n", flush=True)
        if torch.cuda.is_available() and not answers():
            item.session.shouldstop = "the device answers nothing more"
    return report
