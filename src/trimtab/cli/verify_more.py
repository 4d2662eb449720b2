"""`trimtab verify` without the ledger: fuzz, faults and mutants."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.cli.progress import Progress
from trimtab.errors import ConfigError


def fuzz(cases: int, seed: int) -> int:
    """Random cases over simulated ranks."""
    from trimtab.verify.fuzz import run_fuzz

    if cases < 1:
        raise ConfigError(f"--fuzz {cases}: must be at least 1")
    with Progress(cases) as progress:
        result = run_fuzz(
            cases, seed, report=lambda done, failures: progress.step(f"{failures} failed", done - progress.done)
        )
    speed = result.cases / max(result.seconds, 1e-9)
    print(
        f"seed {result.seed}: {result.cases} cases in {result.worlds} worlds, {len(result.failures)} failure(s), "
        f"{result.seconds:.1f} s, {speed:.0f} cases/s"
    )
    for failure in result.failures:
        print(failure)
    return int(bool(result.failures))


def fuzz_case(text: str) -> int:
    """One case of a fuzz run."""
    from trimtab.verify.fuzz import parse_case, run_case

    failure = run_case(*parse_case(text))
    print(f"case {text}: no failure" if failure is None else failure)
    return int(failure is not None)


def faults() -> int:
    """Break ranks on purpose."""
    from trimtab.verify.faults import run_faults
    from trimtab.verify.faults_cases import FaultResult, fault_cases

    cases = fault_cases()
    with Progress(len(cases), unit="fault") as progress:

        def report(result: FaultResult) -> None:
            progress.say(str(result))
            progress.step()

        results = run_faults(report, cases=cases)
    bad = [result for result in results if not result.good]
    slowest = max((r.seconds for r in results if r.fault.kind == "kill"), default=0.0)
    print(f"{len(results)} faults, {len(bad)} not as they should be; slowest answer to a killed rank {slowest:.2f} s")
    return int(bool(bad))


def mutants(names: Sequence[str], seed: int) -> int:
    """Put known bugs in, one at a time."""
    from trimtab.verify.mutants import MUTANTS
    from trimtab.verify.mutants.score import MutantScore, score_mutants

    known = [mutant.name for mutant in MUTANTS]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"--mutants {' '.join(unknown)}: no such mutant; there are {', '.join(known)}")
    with Progress(len(names or known), unit="mutant") as progress:

        def report(score: MutantScore) -> None:
            mark = "killed" if score.killed else "ALIVE "
            progress.say(f"{mark} {score.name:28} {score.by}  {score.how} ({score.seconds:.1f} s)")
            progress.step()

        scores = score_mutants(report, names=list(names) or None, seed=seed)
    killed = sum(score.killed for score in scores)
    print(f"{killed} of {len(scores)} mutants killed")
    return int(killed < len(scores))
