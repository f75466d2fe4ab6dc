"""Solvers by a metric: nothing is confirmed for luck, what is best is found, and budgets hold."""

from random import Random
from types import SimpleNamespace

import pytest
import torch
from helpers.contests import SOLVERS, Played, drawn, outcome_of

from sewa_cli.errors import TaskError
from sewa_cli.methods import mean_of
from sewa_cli.methods.fixed import family
from sewa_cli.settings import AUTO
from sewa_cli.solvers import LEARNED, board
from sewa_cli.solvers.board import Failed
from sewa_cli.solvers.contest import open_contest
from sewa_cli.stats import SURE

k, K = 12, 3
LAST, LATEST = (tuple(mean_of(range(k - size, k), k)) for size in (1, K))
UNCONFIRMED = {LAST, LATEST, tuple(mean_of([2, 5, 8], k)), tuple(mean_of([3, 7, 11], k))}
BEST = frozenset({1, 4, 8})
NEEDED = {"race": 3000, "reinforce": 1000}  # evaluations


def level(average):
    """Return minus the weight on the best, in steps: there is no gradient."""
    return -round(3 * sum(average[i] for i in BEST)) / 3


def known_best(average, part):
    return level(average) + 0.2 * drawn(7)(average, part)


def exploded(average, part):
    """The last checkpoint fails, and with it every moving average."""
    return Failed("inf") if average[-1] != 0 else known_best(average, part)


@pytest.mark.parametrize("kind", ["normal", "cauchy"])
@pytest.mark.parametrize("solver", SOLVERS)
def test_pure_noise_confirms_nothing(solver, kind):
    for seed in range(10):
        choice = Played(drawn(seed, kind), parts=100, budget=300).choose(solver, k, K, seed)
        outcome = outcome_of(choice)
        assert outcome.confirmed is False, (seed, outcome.evidence)
        assert tuple(choice.coefficients) == outcome.taken.average
        assert outcome.taken.average in UNCONFIRMED


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_best_subset_is_found(solver):
    """Though some parts fail for all, and others now and then."""

    def some_fail(average, part):
        if part % 7 == 0 or Random(hash((average, part))).random() < 0.03:
            return Failed("took longer than 30 s")
        return known_best(average, part)

    for loss, more in ((known_best, 1), (some_fail, 3)):
        played = Played(loss, 200, more * NEEDED[solver])
        choice = played.choose(solver, k, K)
        assert {*choice.selected} == BEST
        assert outcome_of(choice).confirmed
        assert outcome_of(choice).evidence >= SURE
        assert all(part % 7 == 0 for part in played.board.bad)


def test_the_same_seed_gives_the_same_choice():
    for solver in SOLVERS:
        one, two = (Played(known_best, 60, 200) for _ in range(2))
        assert one.choose(solver, k, K, 3) == two.choose(solver, k, K, 3)
        assert one.calls == two.calls


def test_a_race_for_any_average_finds_one_as_good():
    choice = Played(known_best, parts=200, budget=1000).choose("race", k, AUTO)
    assert outcome_of(choice).confirmed
    assert level(tuple(choice.coefficients)) == -1


@pytest.mark.parametrize(("of", "size"), [(1000, AUTO), (1000, 10), (30, 5)])
def test_the_budget_of_a_race_goes_to_those_that_lead(of, size):
    """However many start: fewer and fewer are asked on more and more parts, until there are two."""
    played = Played(lambda average, part: Random(f"{average} {part}").gauss(), 600, 500)
    played.choose("race", of, size)
    searched = {*open_contest(played.problem(of), size).searched}
    asked = sorted(len(row.keys() & searched) for row in played.board.found.values())
    assert len(asked) > 20
    assert asked[len(asked) // 2] <= 5
    assert asked[-2] >= 16
    assert sum(asked) <= 0.7 * 500


@pytest.mark.parametrize(("of", "budget"), [(1000, 60), (1000, 500), (30, 60)])
def test_where_not_all_can_start_some_of_each_kind_do(of, budget):
    played = Played(lambda average, part: Random(f"{average} {part}").gauss(), 600, budget)
    played.choose("race", of, AUTO)
    started = list(played.board.found)
    assert any(average[-1] != 0 for average in started)
    assert any(average[-1] == 0 for average in started)
    alone = sum(max(average) == 1 for average in started)
    assert alone >= 2
    assert len(started) - alone >= 4


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize("parts", [1, 24, 25, 60])
@pytest.mark.parametrize("solver", SOLVERS)
def test_budgets_hold(solver, parts, at_once):
    for budget in (1, 2, 50, 333):
        played = Played(known_best, parts, budget, at_once=at_once)
        choice = played.choose(solver, k, K)
        outcome, calls = outcome_of(choice), played.calls
        assert played.evaluations == played.board.spent <= budget
        asked = [(call.average, part) for call in calls for part in call.parts]
        assert len({*asked}) == len(asked)  # nothing twice
        assert (outcome.confirmed is None) == (parts < 25)
        assert (outcome.unspent is None) == (played.evaluations == budget)
        if budget <= 2:  # for one average, or for two of them on one part
            assert tuple(choice.coefficients) in UNCONFIRMED or parts < 25
        fresh = {*open_contest(Played(known_best, parts, 1).problem(k), K).fresh}
        duel = [call for call in calls if fresh & {*call.parts}]
        two = {outcome.incumbent.average, outcome.leader.average}
        assert {call.average for call in duel} <= two
        assert calls[len(calls) - len(duel) :] == duel  # nothing else is asked after the search
    wasteful = Played(lambda _, p: Failed("no") if p % 8 == 3 else 0.0, 100, 40, at_once=at_once)
    wasteful.choose(solver, k, K)  # of eight parts at once one fails, and each is asked again
    assert wasteful.board.spent == wasteful.evaluations <= 40


class Clock:
    """Clock of a machine that nobody else uses: evaluations take time, and nothing else."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(board, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_budget_in_seconds_is_used_and_ends_in_time(solver, monkeypatch):
    """The first parts take half a second: an environment is made, or a file is read."""
    clock = Clock(monkeypatch)

    def slow(average, part):
        clock.now += 0.5 if clock.now < 1 else 0.005
        return known_best(average, part)

    played = Played(slow, 100, None, seconds=2.5)
    played.choose(solver, k, K)
    assert 200 <= played.evaluations <= 310
    assert clock.now <= 2.52
    assert len(played.board.found) > 10


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("calls", [1, 3, 40])
def test_an_interrupt_at_any_time_leaves_a_choice(solver, calls):
    """The incumbent may not have been asked on any part then, nor the leader."""

    def interrupted(average, part):
        played.board.interrupted = len(played.calls) >= calls
        return known_best(average, part)

    played = Played(interrupted, parts=60, budget=300)
    choice = played.choose(solver, k, K)
    assert tuple(choice.coefficients) in UNCONFIRMED
    assert not outcome_of(choice).confirmed


def test_the_lead_is_measured_in_the_duel():
    """On the other parts the leader was picked for its lead."""
    for seed in range(4):
        played = Played(drawn(seed), parts=100, budget=300)
        outcome = outcome_of(played.choose("race", k, K, seed))
        fresh, found = open_contest(played.problem(k, seed), K).fresh, played.board.found
        one, two = found[outcome.incumbent.average], found[outcome.leader.average]
        both = [part for part in fresh if part in one and part in two]
        assert outcome.duel_parts == len(both)
        if both:
            expected = sum(one[part] - two[part] for part in both) / len(both)
            assert outcome.ahead == pytest.approx(expected)


def test_an_average_that_fails_pays_for_it():
    """It is the best one, but on one part in four it has no score: worse than any that has."""

    def loss(average, part):
        is_best = {i for i, c in enumerate(average) if c} == BEST
        return float("nan") if is_best and part % 4 == 0 else level(average)

    choice = Played(loss, 24, 1500).choose("race", k, K)
    assert level(tuple(choice.coefficients)) == -2 / 3


@pytest.mark.parametrize("solver", SOLVERS)
def test_where_nothing_works_it_ends_soon(solver):
    for parts, checkpoints in ((1, 12), (2, 2), (100, 12)):
        played = Played(lambda *_: Failed("it is broken"), parts, 10_000)
        with pytest.raises(TaskError, match=r"no part could be scored; part \d+: it is broken"):
            played.choose(solver, checkpoints, 1)
        assert played.evaluations <= 40


@pytest.mark.parametrize(("K", "budget"), [(AUTO, 60), (AUTO, 2000), (3, 200)])
@pytest.mark.parametrize("at_once", [1, 8])
def test_one_checkpoint_that_has_exploded_is_no_reason_to_give_up(K, budget, at_once):
    choice = Played(exploded, parts=100, budget=budget, at_once=at_once).choose("race", k, K)
    assert choice.coefficients[-1] == 0
    if budget == 2000:
        assert level(tuple(choice.coefficients)) < level(tuple(mean_of(range(k), k)))


@pytest.mark.parametrize("solver", SOLVERS)
def test_it_ends_where_there_is_nothing_more_to_ask(solver):
    def loss(average, part):
        return -average[0] + 0.01 * drawn(0)(average, part)

    for parts, checkpoints, chosen in ((1, 3, 2), (30, 2, 1)):
        played = Played(loss, parts, 10**6)
        choice = played.choose(solver, checkpoints, chosen)
        assert played.evaluations <= parts * 2**checkpoints
        assert choice.coefficients[0] > 0


def test_changes_of_the_winner_are_not_called_baselines():
    """The best is between two that start: their blend."""
    front = [torch.tensor(average) for average in list(family(k).values())[3:5]]
    between = (front[0] + front[1]) / 2

    def loss(average, part):
        distance = float((torch.tensor(average) - between).abs().sum())
        return distance + 0.001 * drawn(3)(average, part)

    choice = Played(loss, parts=200, budget=4000).choose("race", k, AUTO)
    outcome = outcome_of(choice)
    assert outcome.leader.name.split()[0] in ("blend", "tilt")
    assert outcome.confirmed
    assert choice.method == LEARNED
    names = [entry.name for entry in outcome.entries if entry.name.startswith(("blend", "tilt"))]
    assert len(names) == len({*names}) > 1
