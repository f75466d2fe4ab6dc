"""Solvers by a metric: nobody is crowned for luck, what is best is found, and budgets hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from types import SimpleNamespace

import pytest
import torch
from helpers.contests import SOLVERS, Played, drawn, outcome_of

from sewa_cli.errors import TaskError
from sewa_cli.methods import mean_of
from sewa_cli.methods.family import family
from sewa_cli.objective import board
from sewa_cli.objective.board import Answer, Asked, Average, Failed
from sewa_cli.objective.evidence import SURE
from sewa_cli.settings import AUTO
from sewa_cli.solvers import LEARNED
from sewa_cli.solvers.contest import open_contest

k, K = 12, 3
LAST, LATEST = (tuple(mean_of(range(k - size, k), k)) for size in (1, K))
UNCONFIRMED = {LAST, LATEST, tuple(mean_of([2, 5, 8], k)), tuple(mean_of([3, 7, 11], k))}
BEST = frozenset({1, 4, 8})
NEEDED = {"race": 3000, "reinforce": 1000}  # evaluations


def level(average: Average) -> float:
    """The weight on the best, in steps: there is no gradient."""
    return -round(3 * sum(average[i] for i in BEST)) / 3


def known_best(average: Average, part: int) -> float:
    return level(average) + 0.2 * drawn(7)(average, part)


@pytest.mark.parametrize("kind", ["normal", "cauchy"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_pure_noise_crowns_nobody(solver: str, kind: str) -> None:
    for seed in range(20):
        played = Played(drawn(seed, kind), parts=100, budget=300)
        choice = played.choose(solver, k, K, seed)
        outcome = outcome_of(choice)
        assert outcome.crowned is False, (seed, outcome.evidence)
        assert tuple(choice.coefficients) == outcome.taken.average
        assert outcome.taken.average in UNCONFIRMED


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_best_subset_is_found(solver: str) -> None:
    for seed in range(3):
        choice = Played(known_best, parts=200, budget=NEEDED[solver]).choose(solver, k, K, seed)
        assert {*choice.selected} == BEST, (seed, outcome_of(choice))
        assert outcome_of(choice).crowned
        assert outcome_of(choice).evidence >= SURE


def test_a_race_for_any_average_finds_one_as_good() -> None:
    """`first half` and single checkpoints of the best are among those that start."""
    for seed in range(3):
        choice = Played(known_best, parts=200, budget=1000).choose("race", k, AUTO, seed)
        assert outcome_of(choice).crowned
        assert level(tuple(choice.coefficients)) == -1


@pytest.mark.parametrize(("of", "size"), [(1000, AUTO), (1000, 10), (100, AUTO), (30, 5)])
def test_the_budget_of_a_race_goes_to_those_that_lead(of: int, size: int) -> None:
    """However many start: fewer and fewer meet more and more parts, until there are two."""
    played = Played(lambda average, part: Random(f"{average} {part}").gauss(), 600, 500)
    played.choose("race", of, size)
    searched = {*open_contest(played.problem(of), size).searched}
    met = sorted(len(row.keys() & searched) for row in played.board.found.values())
    assert len(met) > 20
    assert met[len(met) // 2] <= 5
    assert met[-2] >= 16
    assert sum(met) <= 0.7 * 500


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize("parts", [1, 2, 24, 25, 60])
@pytest.mark.parametrize("solver", SOLVERS)
def test_budgets_hold(solver: str, parts: int, at_once: int) -> None:
    for budget in (1, 2, 7, 50, 333):
        played = Played(known_best, parts, budget, at_once=at_once)
        choice = played.choose(solver, k, K)
        outcome = outcome_of(choice)
        assert played.evaluations == played.board.spent <= budget
        assert all(len(call.parts) <= at_once for call in played.calls)
        asked = [(call.average, part) for call in played.calls for part in call.parts]
        assert len({*asked}) == len(asked)  # nothing twice
        chosen = tuple(choice.coefficients)
        assert chosen == LAST or sum(c != 0 for c in chosen) == K
        assert (outcome.crowned is None) == (parts < 25)
        assert (outcome.unspent is None) == (played.evaluations == budget)
        if budget <= 2:  # for one average, or for two of them on one part
            assert chosen in UNCONFIRMED or parts < 25


def test_the_duel_is_on_parts_that_had_no_say() -> None:
    for solver in SOLVERS:
        for budget in (20, 100, 333):
            played = Played(known_best, 60, budget)
            contest = open_contest(played.problem(k), K)
            choice = played.choose(solver, k, K)
            outcome = outcome_of(choice)
            two = {outcome.incumbent.average, outcome.leader.average}
            fresh = [c for c in played.calls if {*c.parts} & {*contest.fresh}]
            assert {call.average for call in fresh} <= two
            first = next((n for n, c in enumerate(played.calls) if c in fresh), len(played.calls))
            assert played.calls[first:] == fresh  # once they are asked for, nothing else is
            assert len(contest.fresh) == 24


class Clock:
    """Of a machine that nobody else uses: it goes on when something is evaluated, only then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(board, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_budget_in_seconds_is_used_and_ends_in_time(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)

    def slow(average: Average, part: int) -> float:
        clock.now += 0.002
        return known_best(average, part)

    played = Played(slow, 100, None, seconds=0.5)
    choice = played.choose(solver, k, K)
    assert 200 <= played.evaluations <= 260
    assert clock.now <= 0.52
    assert len(outcome_of(choice).entries) >= 2


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("calls", [1, 3, 10, 40])
def test_an_interrupt_at_any_time_leaves_a_choice(solver: str, calls: int) -> None:
    """The incumbent may not have been asked on any part then, nor the leader."""

    def interrupted(average: Average, part: int) -> float:
        played.board.interrupted = len(played.calls) >= calls
        return known_best(average, part)

    played = Played(interrupted, parts=60, budget=300)
    choice = played.choose(solver, k, K)
    assert tuple(choice.coefficients) in UNCONFIRMED
    assert not outcome_of(choice).crowned


def test_how_far_the_leader_was_ahead_is_of_the_duel() -> None:
    """By parts that no search has seen: on the others it was picked for its lead."""
    for seed in range(8):
        played = Played(drawn(seed), parts=100, budget=300)
        outcome = outcome_of(played.choose("race", k, K, seed))
        fresh, found = open_contest(played.problem(k, seed), K).fresh, played.board.found
        one, two = found[outcome.incumbent.average], found[outcome.leader.average]
        both = [part for part in fresh if part in one and part in two]
        assert outcome.dueled == len(both)
        if both:
            expected = sum(one[part] - two[part] for part in both) / len(both)
            assert outcome.ahead == pytest.approx(expected)


def test_what_wins_often_and_loses_in_the_mean_is_not_crowned() -> None:
    def rarely_falls(average: Average, part: int) -> float:
        if average == LATEST:
            return 0.0
        return 12.0 if Random(hash((average, part))).random() < 0.1 else -1.0

    for seed in range(6):
        choice = Played(rarely_falls, 200, 600).choose("race", k, K, seed)
        outcome = outcome_of(choice)
        ahead = {e.name: e.ahead for e in outcome.entries}[outcome.leader.name]
        assert not outcome.crowned or (ahead is not None and ahead > 0)


def test_a_part_that_fails_for_all_is_left_out() -> None:
    bad = {*range(0, 60, 7)}

    def loss(average: Average, part: int) -> float | Failed:
        return Failed("no such level") if part in bad else known_best(average, part)

    for solver in SOLVERS:
        played = Played(loss, 200, NEEDED[solver])
        choice = played.choose(solver, k, K)
        assert {*choice.selected} == BEST
        assert {"failed"}.isdisjoint(entry.state for entry in outcome_of(choice).entries)
        assert played.board.bad <= bad


def test_a_part_that_fails_now_and_then_ends_nothing() -> None:
    def flaky(average: Average, part: int) -> float | Failed:
        if Random(hash((average, part))).random() < 0.03:
            return Failed("took longer than 30 s")
        return known_best(average, part)

    for solver in SOLVERS:
        choice = Played(flaky, 200, 3 * NEEDED[solver]).choose(solver, k, K)
        assert {*choice.selected} == BEST
        failed = [entry for entry in outcome_of(choice).entries if entry.score is None]
        assert any(entry.error is None for entry in failed)


def test_an_average_that_fails_pays_for_it() -> None:
    """The best one, but on one part in four it has no score: worse than any that has."""

    def loss(average: Average, part: int) -> float:
        is_best = {i for i, c in enumerate(average) if c} == BEST
        return float("nan") if is_best and part % 4 == 0 else level(average)

    choice = Played(loss, 24, 1500).choose("race", k, K)
    assert level(tuple(choice.coefficients)) == -2 / 3


def test_where_nothing_works_it_ends_soon() -> None:
    for solver in SOLVERS:
        for parts, checkpoints in ((1, 12), (2, 2), (100, 12), (100, 2)):
            played = Played(lambda *_: Failed("it is broken"), parts, 10_000)
            with pytest.raises(TaskError, match=r"no part could be scored; part \d+: it is broken"):
                played.choose(solver, checkpoints, 1)
            assert played.evaluations <= 40
    # what is written without a metric can be scored, and nothing else
    played = Played(lambda a, _: 1.0 if a == LATEST else float("inf"), 100, 1000)
    assert tuple(played.choose("race", k, K).coefficients) == LATEST


def test_it_ends_where_there_is_nothing_more_to_ask() -> None:
    for solver in SOLVERS:
        for parts in (1, 30):
            for checkpoints, chosen in ((2, 1), (3, 2)):
                played = Played(known_small, parts, 10**6)
                choice = played.choose(solver, checkpoints, chosen)
                assert played.evaluations <= parts * 2**checkpoints
                assert choice.coefficients[0] > 0


def known_small(average: Average, part: int) -> float:
    return -average[0] + 0.01 * drawn(0)(average, part)


def test_the_same_seed_gives_the_same_choice() -> None:
    for solver in SOLVERS:
        one, two = (Played(known_best, 60, 200) for _ in range(2))
        assert one.choose(solver, k, K, 3) == two.choose(solver, k, K, 3)
        assert one.calls == two.calls


def test_what_is_made_only_once_does_not_slow_a_time_budget_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first parts take a second: an environment is made, or a file is read."""
    clock = Clock(monkeypatch)

    def slow_at_first(average: Average, _: int) -> float:
        clock.now += 0.5 if clock.now < 1 else 0.01
        return level(average)

    played = Played(slow_at_first, parts=60, budget=None, seconds=3.0)
    played.choose("race", k, AUTO)
    assert len({call.average for call in played.calls}) > 10
    assert clock.now <= 3.1


@pytest.mark.parametrize(("of", "budget"), [(1000, 60), (1000, 200), (1000, 500), (30, 60)])
def test_where_not_all_can_start_some_of_each_kind_do(of: int, budget: int) -> None:
    """Averages of the end of a run, and what is without it; checkpoints alone, and means."""
    played = Played(lambda average, part: Random(f"{average} {part}").gauss(), 600, budget)
    played.choose("race", of, AUTO)
    started = list(played.board.found)
    assert any(average[-1] != 0 for average in started)
    assert any(average[-1] == 0 for average in started)
    alone = sum(max(average) == 1 for average in started)
    assert alone >= 2
    assert len(started) - alone >= 4


@pytest.mark.parametrize(("K", "budget"), [(AUTO, 60), (AUTO, 2000), (3, 200), (3, 2000)])
@pytest.mark.parametrize("at_once", [1, 8])
def test_one_checkpoint_that_has_exploded_is_no_reason_to_give_up(
    K: int, budget: int, at_once: int
) -> None:
    """It is in every moving average, and the last of the run."""

    def loss(average: Average, part: int) -> float | Failed:
        return Failed("inf") if average[-1] != 0 else known_best(average, part)

    choice = Played(loss, parts=100, budget=budget, at_once=at_once).choose("race", k, K)
    assert choice.coefficients[-1] == 0
    if budget == 2000:
        assert level(tuple(choice.coefficients)) < level(tuple(mean_of(range(k), k)))


def test_a_budget_counts_what_was_asked_in_vain() -> None:
    """Of eight parts at once one is bad, and each is asked again alone."""

    def loss(average: Average, part: int) -> float | Failed:
        return Failed("no") if part % 8 == 3 else known_best(average, part)

    for budget in (1, 7, 40, 111):
        played = Played(loss, parts=100, budget=budget, at_once=8)
        played.choose("race", k, AUTO)
        assert played.evaluations <= budget
        assert played.board.spent == played.evaluations


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_duel_is_asked_for_at_once_and_turn_by_turn(solver: str) -> None:
    """So that all workers have something to do, and what is cut off has been met by both."""
    played, asks = Played(known_best, parts=400, budget=1200), []
    evaluate = played.board.evaluate

    def counted(asked: Sequence[Asked], until: float | None) -> Iterator[tuple[int, Answer]]:
        asks.append([one.average for one in asked])
        return evaluate(asked, until)

    played.board.evaluate = counted
    outcome = outcome_of(played.choose(solver, k, K))
    *_, duel = (some for some in asks if some)
    assert {*duel} == {outcome.incumbent.average, outcome.leader.average}
    assert len(duel) >= 200
    assert len({*duel[:16]}) == 2
    assert duel.count(outcome.leader.average) == duel.count(outcome.incumbent.average)


def test_changes_of_the_winner_are_not_called_simple_averages() -> None:
    """The best is between two that start: their blend."""
    front = [torch.tensor(average) for average in list(family(k).values())[3:5]]
    between = (front[0] + front[1]) / 2

    def loss(average: Average, part: int) -> float:
        return float((torch.tensor(average) - between).abs().sum()) + 0.001 * drawn(3)(
            average, part
        )

    choice = Played(loss, parts=200, budget=4000).choose("race", k, AUTO)
    outcome = outcome_of(choice)
    assert outcome.leader.name.split()[0] in ("blend", "tilt")
    assert outcome.crowned
    assert choice.name == LEARNED
    names = [entry.name for entry in outcome.entries if entry.name.startswith(("blend", "tilt"))]
    assert len(names) == len({*names}) > 1
