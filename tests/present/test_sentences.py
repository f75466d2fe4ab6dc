"""What is said of a selection: what it is made of, what to expect, and whether choosing paid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from helpers.tiny import TASK, train_tiny

from sewa_cli.commands.select import run_select
from sewa_cli.objective.judge import decide
from sewa_cli.present import sentences, tables
from sewa_cli.report.select import Blend, Expected, Pulled, Report, Share
from sewa_cli.report.shared import Candidate, Interval, Scores
from sewa_cli.report.verdict import Better, Verdict
from sewa_cli.session.extensions import load_settings
from sewa_cli.task import load_task

BEST = "latest K=5"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """A real report of the default, whose details a test makes up."""
    folder = tmp_path_factory.mktemp("said")
    (folder / "task.py").write_text(TASK)
    config = load_settings(None, {"checkpoints": train_tiny(folder / "ckpts"), "device": "cpu"})
    return run_select(config, load_task(str(folder / "task.py"), {}), write=False).report


def judged(
    real: Report,
    by: float | None = None,
    interval: tuple[float, float] | None = None,
    *,
    kind: Any = "baseline",
    beaten_by: Sequence[Better] = (),
    **more: Any,
) -> Report:
    """A report whose loss differs so from the best baseline's; None: a verdict of that kind."""
    sure = interval and Interval(low=interval[0], high=interval[1])
    other = Scores(selection_loss=0.5, heldout_loss=0.6)
    verdict = Verdict(kind=kind, baseline=BEST if kind.startswith("baseline") else None)
    if by is not None:
        verdict = decide(BEST, by, sure or None, 400)
    verdict = verdict.model_copy(update={"beaten_by": [*beaten_by]})
    references = {BEST: Scores(selection_loss=0.4, heldout_loss=0.5)}
    references |= {"last": other, "uniform": other}
    return real.model_copy(update={"verdict": verdict, "references": references, **more})


def chosen(real: Report, **more: Any) -> Report:
    """A report that has chosen a baseline."""
    report = judged(real, **more)
    return report.model_copy(update={"verdict": Verdict(kind="baseline")})


def better(name: str, by: float, interval: tuple[float, float] | None = None) -> Better:
    sure = interval and Interval(low=interval[0], high=interval[1])
    return Better(name=name, score=0.2, difference=by, interval=sure or None)


def blended(
    real: Report,
    weights: Sequence[float],
    prior: Sequence[tuple[str, int | None, float]],
    path: Sequence[tuple[float | None, float]] = ((None, 0.2), (1.0, 0.3), (0.1, 0.5)),
    moved: float = 0.25,
    **more: Any,
) -> Report:
    """`prior`: name, K and share; `path`: strength and share."""
    blend = Blend(
        prior=[Share(name=name, K=K, share=share) for name, K, share in prior],
        path=[
            Pulled(strength=strength, loss=0.1, behind=0.0, error=0.01, share=share)
            for strength, share in path
        ],
        weights=[1 / len(weights)] * len(weights),
        effective=1 / sum(weight**2 for weight in weights),
        learned=moved,
    )
    some = [i for i, weight in enumerate(weights) if weight]
    return real.model_copy(
        update={
            "k": len(weights),
            "K": len(some),
            "selected": some,
            "selected_steps": [10 * i for i in some],
            "candidates": [
                Candidate(index=i, path="", step=10 * i, weight=weight)
                for i, weight in enumerate(weights)
            ],
            "blend": blend,
            **more,
        }
    )


def hoped(by: float, interval: tuple[float, float] | None) -> dict[str, Any]:
    sure = interval and Interval(low=interval[0], high=interval[1])
    return {"expected": Expected(loss=0.3, error=0.01, by=by, interval=sure or None)}


# --- what was gained


@pytest.mark.parametrize(
    ("by", "interval", "said"),
    [
        (-0.1, (-0.15, -0.05), "−0.1, 95 % CI [−0.15, −0.05], significant"),
        (0.1, (0.05, 0.15), "+0.1, 95 % CI [0.05, 0.15], significant"),
        (-0.1, (-0.25, 0.05), "−0.1, 95 % CI [−0.25, 0.05], not significant"),
        (-0.1, (-0.2, 0.0), "−0.1, 95 % CI [−0.2, 0], not significant"),
        (-0.1, None, "−0.1; too few examples for a confidence interval"),
        (0.0, None, "0; too few examples for a confidence interval"),
    ],
)
def test_a_gain_is_significant_only_where_the_interval_leaves_zero_out(
    real: Report, by: float, interval: tuple[float, float] | None, said: str
) -> None:
    assert sentences.verdict(judged(real, by, interval)) == f"vs best baseline ({BEST}): {said}"


@pytest.mark.parametrize(
    ("loss", "last", "said", "headline"),
    [
        (0.13, 0.2, "0.13 (last checkpoint 0.2, −35 %)", "0.13, 35 % below the last checkpoint's"),
        (0.21, 0.2, "0.21 (last checkpoint 0.2, +5 %)", "0.21, 5 % above the last checkpoint's"),
        (0.2, 0.2, "0.2 (last checkpoint 0.2)", "0.2, as the last checkpoint's"),
        (-2.0, -1.0, "-2 (last checkpoint -1)", "-2; the last checkpoint's is -1"),
        (0.1, None, "0.1", "0.1"),
        (None, 0.2, "– (last checkpoint 0.2)", "–"),
    ],
)
def test_the_first_line_and_the_headline_compare_with_the_last_checkpoint(
    real: Report, loss: float | None, last: float | None, said: str, headline: str
) -> None:
    own = Scores(selection_loss=0.1, heldout_loss=loss, metrics={"accuracy": 0.969})
    before = Scores(selection_loss=0.1, heldout_loss=last, metrics={"accuracy": 0.95})
    report = judged(real, average=own)
    report = report.model_copy(update={"references": {**report.references, "last": before}})
    accuracy = "accuracy 0.969 (last checkpoint 0.95, +2 %)"
    assert sentences.scores(report) == [f"held-out loss {said}", accuracy]
    assert sentences.headline(report) == f"Held-out loss {headline}"


@pytest.mark.parametrize(
    ("own", "lower", "heldout_rows", "answer"),
    [
        (0.3, (0.01, 0.03), 400, "yes: `uniform` has a significantly lower held-out loss"),
        (0.6, (0.01, 0.03), 400, "no"),  # it was worse on selection data, too
        (0.3, (-0.01, 0.05), 400, "no"),
        (0.3, None, 400, "no"),
        (0.3, None, None, "yes: cross-validation"),
    ],
)
def test_does_it_overfit_is_answered(
    real: Report,
    own: float,
    lower: tuple[float, float] | None,
    heldout_rows: int | None,
    answer: str,
) -> None:
    beaten = [better("uniform", 0.02, lower)] if lower else []
    average = Scores(selection_loss=own, heldout_loss=0.4)
    report = judged(real, -0.1, (-0.25, 0.05), average=average, beaten_by=beaten)
    made = {"heldout_rows": heldout_rows, **hoped(-0.02, (-0.03, -0.01))}
    assert sentences.overfits(report.model_copy(update=made)).startswith(answer)


@pytest.mark.parametrize(
    ("interval", "others", "named"),
    [
        ((-0.15, -0.05), [better("uniform", 0.02, (-0.01, 0.05))], "uniform"),
        ((-0.25, 0.05), [better("uniform", 0.02, (0.01, 0.03))], "uniform"),
        ((-0.15, -0.05), [better("uniform", 0.02)], "uniform"),
        (
            (-0.15, -0.05),
            [better("last", 0.03, (-0.1, 0.7)), better("uniform", 0.02, (0.01, 0.03))],
            "uniform",
        ),
        ((-0.25, 0.05), [better("uniform", 0.02, (-0.01, 0.05))], None),
    ],
)
def test_another_average_with_a_lower_loss_is_named(
    real: Report, interval: tuple[float, float], others: Sequence[Better], named: str | None
) -> None:
    said = sentences.verdict(judged(real, -0.1, interval, beaten_by=others))
    assert (f"; vs {named}: +0.02" in said) == (named is not None)


def test_a_choice_that_is_the_best_baseline_is_called_that(real: Report) -> None:
    assert sentences.verdict(judged(real)) == (
        f"no gain over the best baseline: the choice is `{BEST}` itself"
    )


def test_what_was_written_instead_is_named_whatever_the_verdict(real: Report) -> None:
    fallen: dict[str, Any] = {
        "written": "last",
        "instead_of": "learned",
        "learned": Scores(selection_loss=0.3, heldout_loss=0.7),
    }
    for by, interval in ((0.1, (0.05, 0.2)), (0.1, None), (None, None)):
        said = sentences.verdict(judged(real, by, interval, **fallen))
        assert said.endswith("; `last` was written instead")


def test_losses_that_are_not_finite_are_told_and_not_compared(real: Report) -> None:
    said = sentences.verdict(judged(real, kind="not finite"))
    assert said == "the held-out loss of what was chosen is NaN or Inf"
    assert sentences.verdict(judged(real, kind="baseline not finite")) == (
        f"the held-out loss of the best baseline (`{BEST}`) is NaN or Inf"
    )


def test_a_baseline_that_was_chosen_has_nothing_to_gain(real: Report) -> None:
    said = "no gain over the best baseline: `uniform` was chosen, a baseline"
    assert sentences.verdict(chosen(real, written="uniform")) == said
    # folds that praise the procedure do not praise what it came to
    unheld = chosen(real, written="uniform", heldout_rows=None, **hoped(1, (0.5, 2)))
    assert sentences.verdict(unheld) == said


def test_a_simple_average_that_another_was_written_for_is_not_praised(real: Report) -> None:
    simple = chosen(real, written="uniform", instead_of="ema-window K=20")
    assert sentences.verdict(simple) == (
        "no gain over the best baseline: `ema-window K=20` was chosen, a baseline; `uniform` was "
        "written instead"
    )
    told = sentences.expected(simple.model_copy(update=hoped(0.0, None)))
    assert told.startswith("expected loss of `ema-window K=20` on new data 0.3, 95 % CI [")


# --- what to expect


def test_the_expected_loss_is_told_with_its_interval_and_against_the_best_baseline(
    real: Report,
) -> None:
    assert sentences.expected(real.model_copy(update=hoped(-0.02, (-0.05, 0.01)))) == (
        "expected loss on new data 0.3, 95 % CI [0.28, 0.32]; vs best baseline: +0.02, 95 % CI "
        "[−0.01, 0.05], not significant"
    )


def test_few_rows_give_an_expected_loss_without_an_interval(real: Report) -> None:
    few = Expected(loss=0.3, error=None, by=None, interval=None)
    told = sentences.expected(real.model_copy(update={"expected": few}))
    assert told == "expected loss on new data 0.3"


@pytest.mark.parametrize("written", ["learned", "uniform", BEST])
def test_the_table_has_the_expected_loss_beside_what_was_chosen(real: Report, written: str) -> None:
    report = judged(real, written=written, **hoped(0.02, None))
    rows = {row["average"]: row["expected_loss"] for row in tables.select(report).rows}
    assert rows.pop(written) == 0.3
    if written != BEST:
        assert rows.pop(BEST) == pytest.approx(0.32)
    assert set(rows.values()) == {None}


def test_where_nothing_is_held_out_the_expected_loss_comes_first(real: Report) -> None:
    unheld = judged(real, kind="no held-out data", heldout_rows=None)
    first, *others = sentences.select(unheld)
    assert first == sentences.expected(unheld)
    assert others[-1].startswith("no held-out data: define heldout_data in the task")
    assert sentences.expected(unheld) not in sentences.select_details(unheld)


def test_select_says_five_lines_and_the_rest_is_in_the_details(real: Report) -> None:
    report = judged(
        real, -0.1, (-0.15, -0.05), average=Scores(selection_loss=0.3, heldout_loss=0.4)
    )
    assert sentences.select(report) == [
        "held-out loss 0.4 (last checkpoint 0.6, −33 %)",
        f"best baseline: {BEST}, held-out loss 0.5",
        f"vs best baseline ({BEST}): −0.1, 95 % CI [−0.15, −0.05], significant",
    ]
    assert sentences.expected(real) in sentences.select_details(real)


# --- what was taken


def test_a_blend_is_told_by_its_size_its_age_its_start_and_what_was_learned(real: Report) -> None:
    prior = [("last", None, 0.04), ("ema-window", 4, 0.26), ("uniform", None, 0.7)]
    report = blended(real, [0.1, 0.0, 0.2, 0.3, 0.4], prior)
    told = (
        "weighed 4 of 5 checkpoints, worth 3.33 equal ones, half of the weight on the last 2: from "
        "uniform (70 %), ema-window K=4 (26 %); learning moved 25 % of the weight, most under a "
        "pull of 0.1"
    )
    assert sentences.taken(report) == told
    assert told in sentences.select_details(report)


def test_a_blend_that_stayed_at_its_start_says_that_nothing_was_learned(real: Report) -> None:
    alone = [(None, 1.0), (1.0, 0.0)]
    said = sentences.taken(blended(real, [0.25] * 4, [("uniform", None, 1.0)], alone, 0.0))
    assert said == (
        "weighed 4 of 4 checkpoints, worth 4 equal ones, half of the weight on the last 2: from "
        "uniform (100 %); nothing was learned on top"
    )


def test_no_pull_is_named_where_most_of_the_answer_is_the_start_itself(real: Report) -> None:
    mostly = [(None, 0.8), (1.0, 0.2)]
    said = sentences.taken(blended(real, [0.2, 0.8], [("last", None, 1.0)], mostly, 0.1))
    assert said.endswith("from last (100 %); learning moved 10 % of the weight")


def test_a_start_of_many_small_shares_is_named_by_the_largest(real: Report) -> None:
    many = [("ema-window", K, 0.04 + K / 10_000) for K in range(2, 26)]
    said = sentences.taken(blended(real, [0.5, 0.5], many))
    assert "from ema-window K=25; learning moved" in said


def test_a_blend_that_was_not_written_is_not_told(real: Report) -> None:
    fallen: dict[str, Any] = {"written": "last", "instead_of": "learned", "learned": real.average}
    report = blended(real, [0.0, 0.0, 1.0], [("uniform", None, 1.0)], **fallen)
    assert sentences.taken(report) == "chose 1 of 3: steps 20"
