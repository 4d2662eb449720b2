"""The ledger: its truth is the oracle's, its patterns are what they say, and it finds what is wrong."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, Store

from helpers.commands import run_python
from helpers.router_truth import truth_losses
from trimtab import oracle
from trimtab.cli.main import main
from trimtab.errors import ConfigError
from trimtab.optim import KELLER, plain
from trimtab.routing.config import RouterConfig
from trimtab.verify import collect as collected
from trimtab.verify.cases import DTYPES, Case, plan_cases
from trimtab.verify.collect import Verdict, collect
from trimtab.verify.implementation import get_implementation
from trimtab.verify.ledger import Ledger
from trimtab.verify.on_rank import compare, has_to_replicate, key_of
from trimtab.verify.patterns import PATTERNS, make_problem, pattern_named
from trimtab.verify.run import run_local
from trimtab.verify.topologies import (
    QUICK,
    Topology,
    default_topologies,
    further_topologies,
    topologies_for,
    topology_named,
)
from trimtab.verify.truth import BALANCE, DOCUMENTS, dense_moe, make_weights, orthogonal, solve, updated

CASES = ["2r-ep2/zipf1/float32", "2r-ep2/top1/float32"]


def test_the_default_ledger_has_the_size_it_claims() -> None:
    topologies = default_topologies()
    assert len(topologies) >= 36
    assert len({t.name for t in topologies}) == len(topologies)
    assert {t.ranks for t in topologies} == set(range(1, 9))
    assert len(PATTERNS) >= 24
    assert len({p.name for p in PATTERNS}) == len(PATTERNS)
    assert len(plan_cases("default", 8)) >= 1700
    assert set(QUICK) <= {t.name for t in topologies}
    assert [topology_named(t.name) for t in topologies] == topologies
    assert all(t.ranks == 12 for t in topologies_for(12))
    assert any(c.topology.ranks == 12 for c in plan_cases("default", 12))


@pytest.mark.parametrize("topology", [t for t in default_topologies() if t.ranks in (1, 3, 4)], ids=lambda t: t.name)
def test_problems_dictate_every_choice(topology: Topology) -> None:
    for pattern in PATTERNS:
        for dtype in list(DTYPES.values())[topology.codes == "panels" :]:  # which hold no float64
            problem = make_problem(topology, pattern, dtype, seed=3)
            (first, *_) = make_weights(problem.sizes, seed=1)
            for batch in problem.batches:
                assert torch.equal(batch.x_BLD.to(dtype).double().nan_to_num(7), batch.x_BLD.nan_to_num(7))
                assert batch.cuts[-1] == batch.x_BLD.shape[1]
                if batch.replayed or batch.mask_BL is not None or pattern.spoil:
                    continue
                logits = batch.x_BLD @ first.router_ED.T
                chosen = logits.argsort(dim=-1, descending=True, stable=True)[..., : problem.sizes.top_k]
                assert torch.equal(chosen, batch.ids_BLK), pattern.name


def tokens_by_expert(topology: Topology, name: str) -> list[int]:
    pattern = next(p for p in PATTERNS if p.name == name)
    problem = make_problem(topology, pattern, torch.float32, seed=0)
    ids = torch.cat([b.ids_BLK.reshape(-1) for b in problem.batches])
    return ids[ids >= 0].bincount(minlength=topology.num_experts).tolist()


def test_patterns_are_what_they_say() -> None:
    t = Topology(ranks=4, ep=4)
    assert tokens_by_expert(t, "one_rank")[2:] == [0] * 6
    assert tokens_by_expert(t, "lone_rank")[:6] == [0] * 6
    assert tokens_by_expert(t, "cold_rank")[6:] == [0, 0]
    assert sum(tokens_by_expert(t, "one_token")) == 3
    assert sum(tokens_by_expert(t, "empty_world")) == sum(tokens_by_expert(t, "all_dropped")) == 0
    balanced = tokens_by_expert(t, "balanced")
    assert max(balanced) - min(balanced) <= 4  # each rank's 36 slots over 8 experts
    assert tokens_by_expert(t, "one_expert")[7] == 48
    assert min(tokens_by_expert(t, "top_all")) == 48


def test_the_truth_is_the_oracle() -> None:
    g = torch.Generator().manual_seed(0)
    x, up, down = (torch.randn(s, generator=g, dtype=torch.float64) for s in ((7, 6), (4, 10, 6), (4, 6, 5)))
    ids = torch.randint(-1, 4, (7, 3), generator=g)
    w = torch.rand(7, 3, generator=g, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (x, w, up, down)]
    ours, true = (f(leaves[0], ids, leaves[1], leaves[2], leaves[3]) for f in (dense_moe, oracle.moe))
    torch.testing.assert_close(ours, true, rtol=0, atol=1e-14)
    for a, b in zip(torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(true.sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_the_truth_averages_over_data_parallel_ranks() -> None:
    pattern = next(p for p in PATTERNS if p.name == "random")
    problem = make_problem(Topology(ranks=2, ep=2), pattern, torch.float64, seed=0)
    weights = make_weights(problem.sizes, seed=1)
    both = solve(problem, weights)
    alone = [solve(type(problem)(**{**vars(problem), "batches": (b,)}), weights) for b in problem.batches]
    for name, grad in both.grads.items():
        torch.testing.assert_close(grad, (alone[0].grads[name] + alone[1].grads[name]) / 2)
    assert torch.equal(both.dx[1], alone[1].dx[0])
    assert torch.equal(both.loads[0], alone[0].loads[0] + alone[1].loads[0])


def test_where_sequences_are_shared_the_truth_has_their_loss() -> None:
    """Against the four losses token by token, over sequences put together again from the ranks that share them."""
    t = Topology(ranks=4, ep=4, cp=2, data="fsdp")
    config = RouterConfig(num_experts=8, top_k=3, sequence_aux_loss=1.0)
    for name in ("masked", "uneven_shards", "empty_source", "dropped", "all_masked"):
        problem = make_problem(t, pattern_named(name), torch.float64, seed=2)
        (first,) = weights = make_weights(problem.sizes, seed=1)
        pairs = [problem.batches[i : i + 2] for i in (0, 2)]
        real = [
            [torch.ones(b.x_BLD.shape[:2]).bool() if b.mask_BL is None else b.mask_BL for b in two] for two in pairs
        ]
        xs = [[b.x_BLD.clone().requires_grad_() for b in two] for two in pairs]
        total = torch.zeros((), dtype=torch.float64)
        for two, x, mask in zip(pairs, xs, real, strict=True):
            logits = (torch.cat(x, 1) @ first.router_ED.T).flatten(0, 1)
            given = torch.cat([b.ids_BLK for b in two], 1).flatten(0, 1), torch.cat(mask, 1).flatten()
            loss = truth_losses(logits, *given, two[0].x_BLD.shape[0], config)["sequence_aux"]
            total = total + loss * max(int(given[1].sum()), 1)
        total = BALANCE * total / max(sum(int(m.sum()) for mask in real for m in mask), 1)
        leaves = [x for two in xs for x in two]
        true = torch.autograd.grad(total, leaves)
        plain = solve(replace(problem, cp=1), weights)
        ours = solve(problem, weights)
        for got, without, expected in zip(ours.dx, plain.dx, true, strict=True):
            torch.testing.assert_close(got - without, 4 * expected, rtol=0, atol=1e-13)
        assert ours.grads["0.up"].equal(plain.grads["0.up"])
        assert (name == "all_masked") == ours.grads["0.router"].equal(plain.grads["0.router"])


def test_of_packs_the_truth_has_the_loss_of_each_document() -> None:
    """Against the losses of the documents one by one, whose tokens lie on two ranks."""
    t = topology_named("2r-ep2-cp2-packed")
    config = RouterConfig(num_experts=4, top_k=2, sequence_aux_loss=1.0)
    for name in ("random", "masked", "uneven_shards"):
        problem = make_problem(t, pattern_named(name), torch.float64, seed=2)
        (first,) = weights = make_weights(problem.sizes, seed=1)
        xs = [b.x_BLD.clone().requires_grad_() for b in problem.batches]
        logits_BLE = torch.cat(xs, 1) @ first.router_ED.T
        ids_BLK = torch.cat([b.ids_BLK for b in problem.batches], 1)
        documents = [b.documents_BL for b in problem.batches if b.documents_BL is not None]
        assert {*documents[0][0].tolist()} & {*documents[1][0].tolist()}
        masks = [torch.ones(b.x_BLD.shape[:2]).bool() if b.mask_BL is None else b.mask_BL for b in problem.batches]
        real, total = torch.cat(masks, 1), torch.zeros((), dtype=torch.float64)
        for row, document in ((row, i) for row in range(len(real)) for i in range(DOCUMENTS)):
            here = (torch.cat(documents, 1)[row] == document) & real[row]
            n = int(here.sum())
            mask = torch.ones(n, dtype=torch.bool)
            total = total + n * truth_losses(logits_BLE[row, here], ids_BLK[row, here], mask, 1, config)["sequence_aux"]
        true = torch.autograd.grad(BALANCE * total / int(real.sum()), xs)
        alone = tuple(replace(batch, documents_BL=None) for batch in problem.batches)
        plain = solve(replace(problem, cp=1, batches=alone), weights)
        ours = solve(problem, weights)
        for got, without, expected in zip(ours.dx, plain.dx, true, strict=True):
            torch.testing.assert_close(got - without, 2 * expected, rtol=0, atol=1e-13)


def test_the_truth_of_a_step_iterates_by_singular_values() -> None:
    for shape in ((3, 8, 12), (3, 12, 8)):
        x = torch.randn(shape, dtype=torch.float64)
        torch.testing.assert_close(orthogonal(x), plain(x, KELLER, torch.float64), rtol=0, atol=1e-12)
    assert updated([], {}, "none") == {}
    assert {t.optimizer for t in default_topologies()} == {"none", "adamw", "muon"}


def test_some_rows_are_of_odd_widths_and_some_arrangements_share_sequences() -> None:
    cases = plan_cases("default", 8)
    for quick in (True, False):
        asked = [case for case in cases if not quick or case.topology.name in QUICK]
        assert {case.topology.cp for case in asked} == {1, 2}
        for case in asked:
            sizes = make_problem(case.topology, case.pattern, DTYPES[case.dtype], 0).sizes if case.pattern.odd else None
            assert sizes is None or sizes.dim % 2 == 1 or sizes.codes in ("nf4", "packed")
        odd = {(case.topology.name, case.dtype) for case in asked if case.pattern.odd}
        assert odd == {(case.topology.name, case.dtype) for case in asked}


def test_replicated_experts_are_asked_for_on_every_number_of_ranks() -> None:
    default = [t for t in default_topologies() if t.replicas != "none"]
    every = [*default, *further_topologies()]
    assert {t.ranks for t in every} == set(range(1, 9))
    axes = ["transport", "combine", "tokens", "data", "codes", "adapter",
            "rerun", "sink", "frozen", "etp", "packed"]  # fmt: skip
    for axis in axes:
        assert {getattr(t, axis) for t in every} >= {getattr(t, axis) for t in default_topologies()} - {"local"}
    assert {t.rerun for t in further_topologies()} == {"none", "recomputed"}
    cases = plan_cases("full", 8)
    assert len({case.name for case in cases}) == len(cases)
    assert {case.topology for case in cases} == {*default_topologies(), *every}
    (case,) = plan_cases("quick", 8, only=["8r-ep4-fsdp-replicas-recomputed/zipf1/float32"])
    assert case.topology in further_topologies()


def test_where_experts_must_be_copied_is_known_without_asking() -> None:
    t = replace(Topology(ranks=4, ep=4), replicas="replicas")
    for loads, hot in (([5, 0, 1, 4, 5, 0, 3, 2], False), ([5, 1, 1, 4, 5, 0, 3, 2], False), ([0] * 8, False)):
        assert has_to_replicate(t, torch.tensor(loads)) == hot
    for loads in ([6, 0, 1, 4, 5, 0, 2, 2], [0] * 7 + [2]):
        assert has_to_replicate(t, torch.tensor(loads))
        assert not has_to_replicate(replace(t, replicas="autoreplicas"), torch.tensor(loads))
    two = replace(Topology(ranks=4, ep=2), replicas="replicas")
    assert has_to_replicate(two, torch.tensor([3, 3, 2, 1]))
    assert not has_to_replicate(two, torch.tensor([3, 2, 2, 2])), "3 + 2 and 2 + 2, or 2 and 1 twice over"
    for loads in ([1, 0, 0, 0], [1, 1, 0, 0]):  # a slot of each group, whose mean is rounded up
        assert not has_to_replicate(two, torch.tensor(loads))


def test_ranks_that_replicate_nothing_are_found_though_their_numbers_are_right() -> None:
    cases = plan_cases("quick", 2, only=["2r-ep2-replicas/one_rank/float32", "2r-ep2-replicas/empty_world/float32"])
    (good, empty) = run_local(cases, "trimtab", deadline=30.0)
    assert (good.status, empty.status) == ("ok", "ok")
    assert good.replicas > 0 == empty.replicas
    (bad, empty) = run_local(cases, "helpers.broken_impls:AtHomeImpl", deadline=30.0)
    assert (bad.details, empty.status) == (["no expert was copied, and a rank has more slots than the mean"], "ok")
    (bad, _) = run_local(cases, "helpers.broken_impls:UnevenImpl", deadline=30.0)
    assert bad.details[0].startswith("rank 0: a rank computes ")
    ledger = Ledger(implementation="x", command="c", seed=0, verdicts=[good, empty])
    assert "1 of 2 cases with replicated experts copied some" in ledger.summary()


def test_a_mismatch_names_the_first_bad_coordinate() -> None:
    true = torch.ones(2, 3)
    ours = true.clone()
    ours[0, 2], ours[1, 0] = 1.5, float("nan")

    def compared(got: Tensor | None, true: Tensor, bound: float = 1e-6) -> tuple[float, str]:
        return compare({} if got is None else {"d up": got}, {"d up": true}, bound, {})["d up"]

    error, found = compared(ours, true)
    assert error == float("inf")
    assert found.startswith("d up[0, 2]: got 1.5, expected 1")
    assert "no tensor" in compared(None, true)[1]
    assert "shape (3, 2)" in compared(ours.T, true)[1]
    assert compared(torch.empty(0, 4), torch.empty(0, 4), 0.0) == (0.0, "")
    assert compared(torch.tensor([1e-9]), torch.zeros(1), 0.0)[1]
    assert not compared(torch.tensor(2.0), torch.tensor(2.0))[1]
    assert compared(torch.tensor(2.0), torch.tensor(1.0))[1].startswith("d up: got 2, expected 1")


def test_only_takes_names_globs_and_words() -> None:
    assert [c.name for c in plan_cases("quick", 4, only=["2r-ep2/zipf1/float64"])] == ["2r-ep2/zipf1/float64"]
    assert {c.pattern.name for c in plan_cases("default", 2, only=["*/zipf?/*"])} == {"zipf1", "zipf2"}
    assert all("sharded" in c.name for c in plan_cases("default", 8, only=["sharded"]))
    with pytest.raises(ConfigError, match="--only nonsense: no case of up to 2 rank"):
        plan_cases("default", 2, only=["zipf1", "nonsense"])


def test_implementations_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match="must be trimtab, or MODULE:CLASS"):
        get_implementation("nobody")
    with pytest.raises(ConfigError, match="no_such_module"):
        get_implementation("no_such_module:Impl")
    for name, why in (
        ("os:getcwd", ": has no name, no refusal, no lacks, no build, which .*implementation.Implementation"),
        ("os:path", " can't be judged here: 'module' object is not callable"),
        ("os:Missing", " can't be judged here: .*has no attribute 'Missing'"),
    ):
        with pytest.raises(ConfigError, match=f"--impl {name}{why}"):
            get_implementation(name)
    with pytest.raises(ConfigError, match="--impl :Impl can't be judged here"):
        get_implementation(":Impl")


def judged(implementation: str, repeat: int = 1, deadline: float = 30.0) -> list[Verdict]:
    return list(run_local(plan_cases("quick", 4, only=CASES), implementation, deadline=deadline, repeat=repeat))


def test_wrong_numbers_are_found_on_the_rank_that_has_them() -> None:
    bad, good = judged("helpers.broken_impls:OffByOneImpl")
    assert (bad.status, good.status) == ("mismatch", "ok")
    assert len(bad.details) == 1
    assert bad.details[0].startswith("rank 1: d 0.down[1, 2, 3]: got ")
    (bad, _) = judged("helpers.broken_impls:NoGradientImpl")
    assert "d 0.up: got no tensor, expected shape (4, 16, 24)" in bad.details[0]
    (bad, _) = judged("helpers.broken_impls:WidensImpl")
    assert [said.removesuffix(" (relative error inf)") for said in bad.details[:3]] == [
        "rank 0: y: got dtype torch.float64, expected dtype torch.float32",
        "rank 0: dx: got dtype torch.float64, expected dtype torch.float32",
        "rank 0: d 7.up: got shape (3,), expected no such tensor",
    ]
    bad, good = judged("helpers.broken_impls:FlakyImpl", repeat=3)
    assert (bad.status, good.status) == ("mismatch", "ok")
    assert "rank 0: in run 2, y[0, 0, 0]" in bad.details[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_an_implementation_overwrites_is_not_what_it_is_held_against(dtype: str) -> None:
    cases = plan_cases("full", 2, only=[f"2r-ep2/random/{dtype}"])
    (bad,) = run_local(cases, "helpers.broken_impls:OverwritesImpl", deadline=30.0)
    assert bad.status == "error"
    assert sorted(bad.details[:2]) == [f"rank {rank}: changed its input in place: x, dy" for rank in range(2)]
    assert any("y[" in said and "dx" not in said for said in bad.details[2:])
    assert bad.errors["y"] > 0.1
    assert bad.errors["dx"] > 0.1


def test_a_hang_and_a_death_cost_one_case_each(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for, waits = collected._wait_for, []

    def shorter(index: int, ranks: int, store: Store, seconds: float, *more: Any) -> Any:
        """For the rank that hangs alone: the others, and the next case, have the time that this machine takes."""
        waits.append(seconds)
        if len(waits) == 2:
            store.wait([key_of(index, 0)])
            seconds = 0.5
        return wait_for(index, ranks, store, seconds, *more)

    with monkeypatch.context() as patch:
        patch.setattr(collected, "_wait_for", shorter)
        hang, good = judged("helpers.broken_impls:HangsImpl", deadline=50.0)
    assert waits == [collected.START, 50.0] * 2
    assert (hang.status, good.status) == ("hang", "ok")
    assert "rank(s) 1: no answer within 50 s" in hang.details[0]
    dead, good = judged("helpers.broken_impls:DiesImpl")
    assert (dead.status, good.status) == ("error", "ok")
    assert "rank(s) 1 died: SIGKILL" in dead.details[0]
    gone, good = judged("helpers.broken_impls:LeavesImpl")
    assert (gone.status, good.status) == ("error", "ok")
    assert "rank(s) 1 died: exit code 0" in gone.details[0]


def test_a_fault_of_one_rank_is_of_its_own_case_alone() -> None:
    cases = plan_cases("quick", 4, only=["2r-ep2/random/float32", "2r-ep2/short/float32"])
    assert len({make_problem(c.topology, c.pattern, torch.float32, c.data_seed).sizes for c in cases}) == 1
    bad, good = run_local(cases, "helpers.broken_impls:RaisesOnceImpl", deadline=30.0)
    assert (bad.status, good.status, good.details) == ("error", "ok", [])
    assert len(bad.details) == 1
    assert bad.details[0].startswith("rank 1: KeyError: ")


def test_what_all_ranks_refuse_by_name_is_told_from_what_breaks() -> None:
    cases = plan_cases("quick", 4, only=["2r-ep2/top1/float32", "2r-ep2/alternating/float32", "2r-ep2/zipf1/float32"])
    verdicts = {v.case.pattern.name: v for v in run_local(cases, "helpers.broken_impls:RefusesImpl", deadline=30.0)}
    assert {name: v.status for name, v in verdicts.items()} == {
        "top1": "refused", "alternating": "error", "zipf1": "ok"
    }  # fmt: skip
    assert verdicts["top1"].failed
    assert "ValueError: takes a power of two of these" in verdicts["top1"].details[0]


def test_who_raises_is_told_from_who_waits_for_it_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have a moment more, not the deadline."""
    monkeypatch.setattr("trimtab.verify.collect.GRACE", 1.0)
    began = time.monotonic()
    bad, good = judged("helpers.broken_impls:RaisesAloneImpl", deadline=60.0)
    assert time.monotonic() - began < 50.0
    assert (bad.status, good.status) == ("error", "ok")
    assert bad.details[0].startswith("rank 1: KeyError: ")
    assert "no such slot" in bad.details[0]
    assert bad.details[1] == "rank(s) 0: no answer within 1 s of that"


def test_who_has_died_is_told_from_who_still_waits_for_them() -> None:
    (case, *_) = plan_cases("quick", 4, only=CASES)
    (verdict,) = collect([(0, case)] * 2, HashStore(), 30.0, 30.0, lambda: [1], lambda silent: "killed")
    assert (verdict.status, verdict.details) == ("error", ["rank(s) 1 died: killed"])
    (verdict,) = collect([(0, case)] * 2, HashStore(), 0.0, 0.0)
    waited = ", ".join(map(str, range(case.topology.ranks)))
    assert (verdict.status, verdict.details) == ("hang", [f"rank(s) {waited}: no answer within 0 s"])


def test_what_an_implementation_lacks_is_said_not_failed(tmp_path: Path) -> None:
    ledger = Ledger(implementation="x", command="c", seed=0, verdicts=judged("helpers.broken_impls:LacksImpl"))
    assert ledger.counts() == {"ok": 1, "lacking": 1}
    assert not ledger.failures
    ledger.write(tmp_path)
    assert json.loads((tmp_path / "ledger.json").read_text())["counts"] == {"ok": 1, "lacking": 1}


def test_the_command_prints_and_writes_the_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--only", *CASES, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "2r-ep2  .." in said
    assert "2 ok" in said
    page = (tmp_path / "ledger.md").read_text()
    assert "worst relative error, float32 (bound 2e-06):  y " in page
    assert "2 cases" in page
    cases = json.loads((tmp_path / "ledger.json").read_text())["cases"]
    assert [case["case"] for case in cases] == [f"2r-ep2/{name}/float32" for name in ("zipf1", "top1")]
    assert all(0 < error < 2e-6 for case in cases for name, error in case["errors"].items() if name != "loads")


def test_a_failure_ends_with_the_command_that_runs_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = "helpers.broken_impls:OffByOneImpl"
    assert main(["verify", "--impl", broken, "--only", *CASES, "--out", str(tmp_path), "--seed", "5"]) == 1
    again = f"again: trimtab verify --impl {broken} --only 2r-ep2/zipf1/float32 --seed 5"
    assert again in capsys.readouterr().out
    assert again in (tmp_path / "ledger.md").read_text()
    case = Case(topology=Topology(ranks=12, ep=12), pattern=PATTERNS[0], dtype="float32", seed=0)
    asked = f"--impl x --only {case.name} --seed 0"
    ledger = Ledger(implementation="x", command="c", seed=0, repeat=3)
    assert ledger.again(case) == f"trimtab verify {asked} --repeat 3 --nproc 12"
    ledger = Ledger(implementation="x", command="c", seed=0, program="torchrun … -m trimtab")
    assert ledger.again(case) == f"torchrun … -m trimtab verify {asked}"
    assert main(["verify", "--only", "nonsense"]) == 2
    assert main(["verify", "--nproc", "0"]) == 2


def under_torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    return run_python(*launcher, "-m", "trimtab", "verify", *arguments, cwd=Path(__file__).parents[1])


@pytest.mark.xdist_group("ranks2")
def test_under_torchrun(tmp_path: Path) -> None:
    done = under_torchrun("--only", *CASES, "1r-local/random", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "ledger.json").read_text())["cases"]) >= 3
    broken = ("--impl", "helpers.broken_impls:HangsImpl", "--deadline", "5")
    assert under_torchrun("--only", *CASES, "--out", tmp_path, *broken).returncode != 0
    assert "no answer within 5 s" in (tmp_path / "ledger.md").read_text()


def test_a_ledger_shows_the_worst_of_its_dtypes() -> None:
    one, two = (p for p in PATTERNS if p.name in ("random", "balanced"))
    t = Topology(ranks=2, ep=2)
    ledger = Ledger(implementation="x", command="c", seed=0)
    for pattern, dtype, status in ((one, "float32", "ok"), (one, "bfloat16", "hang"), (two, "float32", "ok")):
        case = Case(topology=t, pattern=pattern, dtype=dtype, seed=0)
        ledger.verdicts.append(Verdict(case=case, status=status))  # type: ignore[arg-type]
    assert "2r-ep2  H." in ledger.table()
