"""Random routes over simulated ranks: `python -m fuzz 100000`, with tests/ on the path."""

from __future__ import annotations

import argparse
import sys
import time

from fuzz.run import parse_case, run_case, run_fuzz
from trimtab.cli import Progress
from trimtab.cli.main import exit_code
from trimtab.errors import ConfigError


def fuzz(cases: int, seed: int) -> int:
    """Random cases over simulated ranks."""
    if cases < 1:
        raise ConfigError(f"{cases} cases: must be at least 1")
    progress, start = Progress(cases), time.perf_counter()
    result = run_fuzz(
        cases, seed, report=lambda done, failures: progress.step(f"{failures} failed", done - progress.done)
    )
    progress.close()
    print(
        f"seed {seed}: {result.cases} cases in {result.worlds} worlds, {len(result.failures)} failure(s), "
        f"{time.perf_counter() - start:.1f} s"
    )
    for failure in result.failures:
        print(failure)
    return int(bool(result.failures))


def fuzz_case(text: str) -> int:
    """One case of a fuzz run."""
    failure = run_case(*parse_case(text))
    print(f"case {text}: no failure" if failure is None else failure)
    return int(failure is not None)


def main() -> int:
    """Parse, run; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("cases", nargs="?", type=int, default=3000, metavar="N", help="how many (default 3000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of all data (default 0)")
    parser.add_argument("--case", metavar="SEED:INDEX", help="one case, as its failure names it")
    options = parser.parse_args()
    return fuzz(options.cases, options.seed) if options.case is None else fuzz_case(options.case)


if __name__ == "__main__":
    sys.exit(exit_code(main))
