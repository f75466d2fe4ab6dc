"""The board of a contest: each score once, a budget that holds, failures that are reported."""

from math import inf, isfinite, nan

import pytest
import torch
from helpers.contests import Played
from hypothesis import given
from hypothesis import strategies as st

from sewa_cli import interrupts
from sewa_cli.errors import TaskError
from sewa_cli.solvers.board import Failed

A, B, C = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)


def by_part(average, part):
    return part - 2 * average[1]


@given(
    st.lists(
        st.tuples(st.sampled_from([A, B, C]), st.lists(st.integers(0, 19), max_size=20)), max_size=6
    ),
    st.integers(1, 60),
    st.sampled_from([1, 3, 8]),
)
def test_each_score_is_asked_for_once_and_within_the_budget(wanted, budget, at_once):
    played = Played(by_part, 20, budget, at_once=at_once)
    needed = {(average, part) for average, parts in wanted for part in parts}
    is_enough = played.ask(*wanted)
    assert is_enough == (len(needed) <= budget)
    assert played.board.spent == played.evaluations == min(budget, len(needed))
    assert played.board.left == budget - played.board.spent
    known = {(average, part) for average, row in played.board.found.items() for part in row}
    assert known <= needed
    assert is_enough == (known == needed)
    assert played.ask(*wanted) == is_enough  # again: what is known costs nothing
    assert played.evaluations <= budget


@pytest.mark.parametrize("at_once", [1, 3, 8])  # asked beside others, they do not fail with it
def test_a_part_is_bad_when_it_fails_for_all(at_once):
    def loss(average, part):
        return Failed("no such level") if part == 1 or (part, average) == (2, A) else part

    played = Played(loss, 4, 100, at_once=at_once)
    assert played.ask((A, range(4)))
    assert played.board.bad == set()  # perhaps it is the average
    assert played.board.has_failed(A)
    assert played.ask((B, range(4)))
    assert played.board.bad == {1}
    assert played.board.parts_of(A) == played.board.parts_of(B) == [0, 2, 3]
    assert played.board.has_failed(A)
    assert not played.board.has_failed(B)
    before = played.evaluations
    assert played.ask((C, [1]))  # nobody is asked on it again
    assert played.evaluations == before
    # a failure is worse than all scores, 0 … 3; so much as the best is better than the worst
    assert played.board.scores(A, [0, 2, 3]).tolist() == [0, 6, 3]
    assert played.board.mean(A) == 3
    assert played.board.mean(B, [0, 2, 3]) == pytest.approx(5 / 3)
    assert played.board.leads(B, A, [0, 2, 3]).tolist() == [0, 4, 0]
    assert played.board.failures == [
        "part 1: no such level",
        "part 2: no such level",
        "part 1: no such level",
    ]


def test_means_and_differences_are_weighted():
    played = Played(by_part, 3, 100)
    played.board.weights = torch.tensor([1.0, 1.0, 4.0], dtype=torch.float64)
    played.ask((A, [2, 0, 1]), (B, range(3)))
    assert played.board.mean(A) == (0 + 1 + 4 * 2) / 6
    differences = played.board.leads(B, A, range(3))
    assert differences.tolist() == [1, 1, 4]  # of the mean weight, 2
    assert float(differences.mean()) == played.board.mean(A) - played.board.mean(B)
    assert played.board.rank(C) == inf


@pytest.mark.parametrize("values", [(1e308, -1e308), (5.0, 5.0), (0.0, 0.0), (-1e308, nan)])
def test_numbers_at_the_end_of_what_there_is(values):
    played = Played(lambda _, part: values[part % 2] if part < 4 else nan, 5, 100)
    played.ask((A, range(5)), (B, range(4)))
    assert played.board.scores(A, range(4))[0] == values[0]
    assert not torch.isnan(played.board.leads(B, A, range(4))).any()
    assert isfinite(played.board.mean(B)) or nan in values
    assert float(played.board.scores(A, [4])) > values[0]


@pytest.mark.parametrize("at_once", [1, 4])
def test_what_never_works_ends_soon(at_once):
    played = Played(lambda *_: Failed("broken"), 40, 1000, at_once=at_once)
    with pytest.raises(TaskError, match="no part could be scored; part 0: broken"):
        played.ask(*((one, range(n, n + 8)) for n in range(0, 40, 8) for one in (A, B)))
    assert len(played.calls) in (4, 9)  # at the latest with the first of another checkpoint
    assert {call.average for call in played.calls} == {A, B}
    word = Played(lambda *_: Failed("found str", is_final=True), 40, 1000)
    with pytest.raises(TaskError, match="found str"):
        word.ask((A, range(40)))
    assert len(word.calls) == 1


def test_one_bad_checkpoint_or_part_ends_nothing():
    played = Played(lambda average, _: Failed("exploded") if average[0] else 1.0, 40, 1000)
    half = (0.5, 0.5, 0.0)
    assert played.ask((A, range(20)), (half, range(20)), (B, range(20)))
    assert played.board.mean(B) == 1.0
    assert played.board.has_failed(A)
    assert played.board.has_failed(half)
    played = Played(lambda _, part: Failed("broken") if part == 0 else 1.0, 40, 1000, at_once=2)
    for average in (A, B, C, (0.5, 0.5, 0.0), (0.0, 0.5, 0.5)):
        played.ask((average, range(2)))
    assert played.ask((A, range(2, 40)))


def test_ctrl_c_ends_the_asking(monkeypatch):
    def stop(average, part):
        if part == 5:
            raise KeyboardInterrupt
        return by_part(average, part)

    monkeypatch.setattr(interrupts, "resume", lambda: True)
    played = Played(stop, 20, 100)
    assert not played.ask((A, range(20)))
    assert played.board.interrupted
    assert played.board.spent == 5
    assert played.board.left == 0
    assert not played.ask((B, [0]))  # nobody is asked any more
    assert len(played.calls) == 6
    monkeypatch.setattr(interrupts, "resume", lambda: False)
    with pytest.raises(KeyboardInterrupt):
        Played(stop, 20, 100).ask((A, range(20)))
