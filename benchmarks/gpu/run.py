"""Running stages: each with a limit, side by side where it is several files of tests, and a verdict however it ends.

Under `out` a stage leaves NUMBER_NAME.json, and a log of each of its processes; the run leaves run.json and gpu.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu.page import page
from benchmarks.gpu.stages import Stage
from trimtab.atomic_write import write_whole

ROOT = Path(__file__).parents[2]
LEAST = 3.0
"""Seconds without which a stage is not begun."""
GRACE = 8.0
"""Seconds in which a process that was interrupted says where it was."""
TAIL = 25
"""Lines of a log that failed, on the terminal."""
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """status: "ok"; "failed" a stage of tests that did not pass, or wrong numbers; "broken" it measured nothing, or not
    all; "skipped" it cannot be done here.
    """

    stage: str
    status: str
    verdict: str
    seconds: float


def run_stages(stages: Sequence[Stage], out: Path, device: str, seconds: float, say: Say = print) -> list[Outcome]:
    """Run them all, whatever becomes of one; the page is written anew after each."""
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob("[0-9]_*"):
        stale.unlink()
    end, found = time.monotonic() + seconds, list[Outcome]()
    for number, stage in enumerate(stages):
        say(f"-- {number} {stage.name}: {stage.about}")
        start = time.monotonic()
        limit = min(stage.limit, end - start)
        if stage.under and shutil.which(stage.under[0]) is None:
            status, verdict = "skipped", f"{stage.under[0]} is not here"
        elif limit < LEAST:
            status, verdict = "failed" if stage.tests else "broken", "not run: no time was left"
        else:
            status, verdict = (_test if stage.tests else _measure)(
                stage, out / f"{number}_{stage.name}", device, limit, say
            )
        took = time.monotonic() - start
        found.append(Outcome(stage=stage.name, status=status, verdict=verdict, seconds=took))
        say(f"== {number} {stage.name}: {status}, {took:.0f} s: {verdict}")
        settings = {"device": device, "minutes": seconds / 60, "outcomes": [asdict(one) for one in found]}
        write_whole(out / "run.json", json.dumps(settings, indent=1))
        write_whole(out / "gpu.md", page(out))
    return found


def code_of(outcomes: Sequence[Outcome]) -> int:
    """0; 1 where a test failed or numbers were wrong; 3 where only something measured nothing."""
    statuses = {one.status for one in outcomes}
    return 1 if "failed" in statuses else 3 if "broken" in statuses else 0


def _measure(stage: Stage, path: Path, device: str, limit: float, say: Say) -> tuple[str, str]:
    found = path.with_suffix(".json")
    command = [sys.executable, "-m", "benchmarks.gpu.child", stage.measure, device, str(limit), str(found)]
    ((log, end),) = _together({path.with_suffix(".txt"): command}, device, limit)
    data = json.loads(found.read_text()) if found.exists() else {}
    well, wrong = end == 0 and "verdict" in data, data.get("wrong")
    if not well:
        say(_tail(log))
    status = "failed" if wrong else "ok" if well else "broken"
    return status, (data["verdict"] if well else f"{_ending(end)}; see {log.name}") + (
        f"; wrong: {'; '.join(wrong)}" if wrong else ""
    )


def _test(stage: Stage, path: Path, device: str, limit: float, say: Say) -> tuple[str, str]:
    jobs = {}
    for file in stage.tests:
        log = path.with_name(f"{path.name}_{Path(file).stem.removeprefix('test_gpu_')}.txt")
        jobs[log] = [
            *stage.under, sys.executable, "-m", "pytest", "-v", "--tb=short", "--maxfail=15", "--durations=5",
            "-p", "no:cacheprovider", "-o", f"faulthandler_timeout={limit / 3:.0f}",
            file, *(["-k", stage.only] if stage.only else []),
        ]  # fmt: skip
    words, files, good = [], {}, True
    for log, end in _together(jobs, device, limit):
        counts = _counts(log)
        passed = end == 0 and counts.get("passed", 0) > 0
        good &= passed
        name = log.stem.removeprefix(f"{path.name}_")
        said = ", ".join(f"{n} {what}" for what, n in counts.items())
        words.append(f"{name}: {said or 'nothing'}" + (f", {_ending(end)}, see {log.name}" if not passed else ""))
        files[name] = counts | {"exit": end}
        if not passed:
            say(_tail(log))
    status, verdict = "ok" if good else "failed", "; ".join(words)
    write_whole(path.with_suffix(".json"), json.dumps({"verdict": verdict, "files": files}, indent=1))
    return status, verdict


def _together(jobs: dict[Path, list[str]], device: str, limit: float) -> list[tuple[Path, int | None]]:
    """(log, exit code, None for one that was stopped at its limit) of processes that run side by side."""
    running: list[tuple[Path, subprocess.Popen[bytes]]] = []
    end, ends = time.monotonic() + limit, list[int | None]()
    try:
        for log, command in jobs.items():
            with log.open("wb") as into:
                job = subprocess.Popen(
                    command, cwd=ROOT, env=_environment(device), stdout=into, stderr=into, start_new_session=True
                )
            running.append((log, job))
        for _, job in running:
            try:
                ends.append(job.wait(max(0.0, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                ends.append(None)
                job.send_signal(signal.SIGINT)
        until = time.monotonic() + GRACE
        for _, job in running:
            try:
                job.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
    finally:
        for _, job in running:
            _kill(job)
    return [(log, code) for (log, _), code in zip(running, ends, strict=True)]


def _kill(job: subprocess.Popen[bytes]) -> None:
    """With all that it started; no process is left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def _environment(device: str) -> dict[str, str]:
    """No plugin of pytest, no C++ for the truth, and this very tree."""
    paths = [str(ROOT / "src"), str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "TRIMTAB_COMPILED": "0", "PYTHONUNBUFFERED": "1"}
    rehearsed = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    return {**os.environ, **own, **rehearsed, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TRIMTAB_GPU_TESTS": device}


def _counts(log: Path) -> dict[str, int]:
    """passed, failed and so on, as pytest sums up; nothing of a process that died before."""
    (*_, said) = ["", *re.findall(r"^=+ (.*) in \d+\.\d+s\b", log.read_text(errors="replace"), re.MULTILINE)]
    return {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped|error)", said)}


def _ending(code: int | None) -> str:
    if code is None:
        return "stopped at its limit"
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    return f"exit code {code}" if code else "no result"


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-TAIL:]
    return "\n".join(f"   {line}" for line in lines)
