"""The words of `select`: the gain over the last checkpoint, the verdict, what was chosen."""

import pytest
from helpers.pages import raw, report

from sewa_cli.judge import decide
from sewa_cli.present.view import Words
from sewa_cli.present.views import select
from sewa_cli.report.findings import Expected
from sewa_cli.report.select import Report
from sewa_cli.report.shared import Candidate, Interval, Measured, Rival, Verdict

BEST = "latest K=5"


@pytest.fixture(scope="module")
def real():
    """A real report of the default, whose details a test changes."""
    found = report(raw("select"))
    assert isinstance(found, Report)
    return found


def interval(ends):
    return None if ends is None else Interval(low=ends[0], high=ends[1])


def judged(real, by=None, ends=None, *, kind="baseline", over=None, beaten_by=(), **more):
    """A report with such a difference from the best baseline; None: a verdict of that kind."""
    verdict = Verdict(kind=kind, baseline=over)
    if by is not None:
        verdict = decide(BEST, by, interval(ends), real.heldout_rows or 0)
    verdict = verdict.model_copy(update={"beaten_by": [*beaten_by]})
    other = Measured(selection_loss=0.5, heldout_loss=0.6, metrics={"accuracy": 0.944})
    references = {BEST: Measured(selection_loss=0.4, heldout_loss=0.5)}
    references |= {"last": other, "uniform": other}
    update = {"verdict": verdict, "references": references, **more}
    return real.model_copy(update=update)


def better(name, by, ends=None):
    return Rival(name=name, score=0.2, difference=by, interval=interval(ends))


def hoped(by, ends, error=0.01):
    return {"findings": [Expected(loss=0.3, error=error, by=by, interval=interval(ends))]}


def words(view, title):
    [section] = [one for one in view.sections if one.title == title]
    [found] = [part for part in section.parts if isinstance(part, Words)]
    return found.lines


@pytest.mark.parametrize(
    ("by", "ends", "said"),
    [
        (-0.1, (-0.15, -0.05), "−0.1, 95 % CI [−0.15, −0.05], significant"),
        (0.1, (0.05, 0.15), "+0.1, 95 % CI [0.05, 0.15], significant"),
        (-0.1, (-0.25, 0.05), "−0.1, 95 % CI [−0.25, 0.05], not significant"),
        (-0.1, (-0.2, 0.0), "−0.1, 95 % CI [−0.2, 0], not significant"),
        (-0.1, None, "−0.1; too few examples for a confidence interval"),
        (0.0, None, "0; too few examples for a confidence interval"),
    ],
)
def test_a_difference_is_significant_only_if_the_interval_leaves_zero_out(real, by, ends, said):
    assert select.verdict(judged(real, by, ends)) == f"vs best baseline ({BEST}): {said}"


def test_select_says_five_lines_and_the_rest_is_in_the_details(real):
    average = Measured(selection_loss=0.3, heldout_loss=0.4, metrics={"accuracy": 0.964})
    found = judged(real, -0.1, (-0.15, -0.05), average=average, output="out.safetensors")
    view = select.view(found)
    assert view.says == [
        "held-out loss 0.4 (last checkpoint 0.6, −33 %)",
        "accuracy 0.964 (last checkpoint 0.944, +0.02)",
        f"best baseline: {BEST}, held-out loss 0.5",
        f"vs best baseline ({BEST}): −0.1, 95 % CI [−0.15, −0.05], significant",
        "wrote out.safetensors",
    ]
    assert select.expected(found) in view.details
    assert view.headline == "Held-out loss 0.4, 33 % below the last checkpoint's"
    assert view.caveat.endswith(view.says[3])


@pytest.mark.parametrize(
    ("loss", "last", "said", "headline"),
    [
        (0.13, 0.2, "0.13 (last checkpoint 0.2, −35 %)", "0.13, 35 % below the last checkpoint's"),
        (0.21, 0.2, "0.21 (last checkpoint 0.2, +5 %)", "0.21, 5 % above the last checkpoint's"),
        (0.2, 0.2, "0.2 (last checkpoint 0.2)", "0.2, as the last checkpoint's"),
        (-2.0, -1.0, "-2 (last checkpoint -1, −1)", "-2, 1 below the last checkpoint's"),
        (0.1, None, "0.1", "0.1"),
        (None, 0.2, "– (last checkpoint 0.2)", "–"),
    ],
)
def test_the_first_line_and_the_headline_compare_with_the_last_checkpoint(
    real, loss, last, said, headline
):
    found = judged(real, average=Measured(selection_loss=0.1, heldout_loss=loss))
    before = Measured(selection_loss=0.1, heldout_loss=last)
    found = found.model_copy(update={"references": {**found.references, "last": before}})
    assert select.scores(found) == [f"held-out loss {said}"]
    assert select.headline(found) == f"Held-out loss {headline}"


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
def test_the_page_answers_whether_it_overfits(real, own, lower, heldout_rows, answer):
    beaten = [better("uniform", 0.02, lower)] if lower else []
    average = Measured(selection_loss=own, heldout_loss=0.4)
    found = judged(real, -0.1, (-0.25, 0.05), average=average, beaten_by=beaten)
    made = {"heldout_rows": heldout_rows, **hoped(-0.02, (-0.03, -0.01))}
    lines = words(select.view(found.model_copy(update=made)), "Does it overfit?")
    assert lines[0].startswith(answer)
    assert any(line.startswith("uniform has a lower held-out loss") for line in lines) == bool(
        lower
    )


@pytest.mark.parametrize(
    ("ends", "others", "named"),
    [
        ((-0.15, -0.05), [better("uniform", 0.02, (-0.01, 0.05))], "uniform"),
        ((-0.25, 0.05), [better("uniform", 0.02, (0.01, 0.03))], "uniform"),
        ((-0.15, -0.05), [better("uniform", 0.02)], "uniform"),
        ((-0.15, -0.05), [better("last", 0.03), better("uniform", 0.02, (0.01, 0.03))], "uniform"),
        ((-0.25, 0.05), [better("uniform", 0.02, (-0.01, 0.05))], None),
    ],
)
def test_another_average_with_a_lower_loss_is_named(real, ends, others, named):
    said = select.verdict(judged(real, -0.1, ends, beaten_by=others))
    assert (f"; vs {named}: +0.02" in said) == (named is not None)


NO_GAIN = "no gain over the best baseline: "
INSTEAD = "; `last` was written instead"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"over": BEST}, f"{NO_GAIN}the choice is `{BEST}` itself"),
        ({"written": "uniform"}, f"{NO_GAIN}`uniform` was chosen, a baseline"),
        (
            {"written": "last", "instead_of": "ema-window K=20"},
            f"{NO_GAIN}`ema-window K=20` was chosen, a baseline{INSTEAD}",
        ),
        (
            {"kind": "not finite", "written": "last", "instead_of": "learned"},
            f"the held-out loss of what was chosen is NaN or Inf{INSTEAD}",
        ),
        (
            {"kind": "baseline not finite", "over": BEST},
            f"the held-out loss of the best baseline (`{BEST}`) is NaN or Inf",
        ),
        (
            {"kind": "no held-out data"},
            "no held-out data: define heldout_data in the task, or try --guard 0.2",
        ),
    ],
)
def test_without_a_difference_the_verdict_says_why(real, made, said):
    assert select.verdict(judged(real, **made)) == said


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            hoped(-0.02, (-0.05, 0.01)),
            "on new data 0.3, 95 % CI [0.28, 0.32]; vs best baseline: +0.02, 95 % CI "
            "[−0.01, 0.05], not significant",
        ),
        (hoped(None, None, None), "on new data 0.3"),
        (
            {**hoped(-0.02, (-0.05, 0.01)), "heldout_rows": 400},
            "on new data (cross-validated on the selection data) 0.3, 95 % CI [0.28, 0.32]",
        ),
        (
            {**hoped(None, None, None), "written": "last", "instead_of": "uniform"},
            "of `uniform` on new data 0.3",
        ),
    ],
)
def test_the_expected_loss_has_its_interval_and_the_best_baseline(real, made, said):
    found = real.model_copy(update={"heldout_rows": None, **made})
    assert select.expected(found) == f"expected loss {said}"


def test_without_held_out_data_the_expected_loss_comes_first(real):
    found = judged(real, kind="no held-out data", heldout_rows=None, **hoped(-0.02, None))
    view = select.view(found)
    assert view.says[0] == select.expected(found)
    assert view.headline == "Expected loss on new data 0.3"
    assert view.caveat.index("expected loss on new data") < view.caveat.index("--guard 0.2")


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (
            [0.2, 0.0, 0.1, 0.3, 0.4],
            "4 of 5 checkpoints used (effective number 3.33), half of the weight on steps 30–40",
        ),
        ([0.2, 0.8], "2 of 2 checkpoints used (effective number 1.47), half of the weight on step"),
        ([0.0, 0.5, 0.5], "2 of 3 checkpoints used with equal weights: steps 10, 20"),
        ([0.0, 1.0], "1 of 2 checkpoints used: step 10"),
    ],
)
def test_what_was_chosen_is_said_in_one_line(real, weights, said):
    used = [i for i, weight in enumerate(weights) if weight]
    candidates = [Candidate(index=i, path="", step=10 * i, weight=w) for i, w in enumerate(weights)]
    made = {"k": len(weights), "K": len(used), "candidates": candidates, "selected": used}
    made |= {"selected_steps": [10 * i for i in used], "instead_of": "learned"}
    [first, *_] = select.view(judged(real, **made)).details
    assert first.startswith(said)
