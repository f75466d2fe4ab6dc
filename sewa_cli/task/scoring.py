"""A user's metric: parts, and scores of them.

    def score_parts(**args): ...      # seeds of episodes, questions: whatever `score` is given
    def heldout_parts(**args): ...    # others, for the report
    def score(model, part): ...       # a number, or {"return": 1242.0, "length": 410}
    def scores(model, parts): ...     # several at once, where that is faster
    def corpus(name, sums): ...       # a score of many parts that is no mean of theirs

Without score_parts, the parts are the batches of selection_data (and heldout_data). A task with
`metrics(model)` alone has one part, and nothing can be said about its noise.

A score may also be a list of numbers, such as {"wer": [errors, words]}. These are added up over
parts, and `corpus` makes the metric of the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from numbers import Real
from typing import TYPE_CHECKING, Any

from sewa_cli.direction import Sums
from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.task.fence import user_code
from sewa_cli.text import few

if TYPE_CHECKING:
    from torch import nn

FUNCTIONS = ("score_parts", "heldout_parts", "score", "scores", "corpus")
METRICS = "metrics"  # the name of its one part
MOST = 1_000_000  # parts; more is a generator without end
Value = float | Sums
Score = Mapping[str, Value]  # by name; "": a number that was not given one
Corpus = Callable[[str, Sums], float]  # what the sums of a metric make


@dataclass(frozen=True)
class Parts:
    """Made when they are first asked for, and once: parts are named by their place in the list."""

    make: Callable[[], Iterable[Any]]
    name: str

    def list(self) -> list[Any]:
        with user_code(self.name):
            found = self.make()
            if not isinstance(found, Iterable) or isinstance(found, str | bytes | Mapping):
                raise TaskError(
                    f"{self.name}() must return a list of parts, found {type(found).__name__}"
                )
            parts = list(islice(found, MOST + 1))
        if len(parts) > MOST:
            raise TaskError(f"{self.name}() lists more than {MOST:,} parts; return a finite list")
        if not parts:
            raise TaskError(f"{self.name}() lists no parts; return one or more")
        return parts


@dataclass(frozen=True)
class Scoring:
    """How the task scores a model; the parts are batches of its data unless it lists its own."""

    score: Callable[[nn.Module, Sequence[Any]], list[Score]]
    parts: Parts | None  # None: batches of data
    heldout: Parts | None
    name: str  # the function that gives the scores
    at_once: bool = False  # several parts in one call are faster than one by one
    corpus: Corpus | None = None

    def pick(self, scores: Sequence[Score], metric: str) -> list[Value]:
        """Return the metric of each part; a number without a name is the metric."""
        found = [score.get(metric, score.get("")) for score in scores]
        for score, value in zip(scores, found, strict=True):
            if value is None:
                given = few(sorted(score), 8) or "nothing"
                raise ConfigError(
                    f"--metric {metric}: is not in what {self.name}() returns ({given}); add it "
                    "there, or name another"
                )
        return [value for value in found if value is not None]


def total(
    name: str, values: Sequence[Value], weights: Sequence[float], corpus: Corpus | None
) -> float:
    """Return the score of all parts: the weighted mean, or what the sums make."""
    if corpus is not None and isinstance(values[0], tuple):
        return corpus(name, tuple(map(sum, zip(*values, strict=True))))
    numbers = (w * v for w, v in zip(weights, values, strict=True) if not isinstance(v, tuple))
    return sum(numbers) / sum(weights)


def totals(
    scores: Sequence[Score], weights: Sequence[float], corpus: Corpus | None
) -> dict[str, float]:
    """Return the `total` of each name, over the parts that have it."""
    found = {}
    for name in dict.fromkeys(name for score in scores for name in score):
        having = [(s[name], w) for s, w in zip(scores, weights, strict=True) if name in s]
        found[name] = total(name, [s for s, _ in having], [w for _, w in having], corpus)
    return found


def scoring_of(
    functions: Mapping[str, Callable[..., Any]],
    with_args: Callable[[str], Callable[[], Any]],
    source: str,
) -> Scoring | None:
    """None: the task has no metric to choose by."""
    if "score" not in functions and "scores" not in functions:
        if listed := [name for name in FUNCTIONS if name in functions]:
            raise TaskError(f"{source}: {listed[0]} needs score(model, part)")
        if "metrics" not in functions:
            return None
        metrics, alone = functions["metrics"], Parts(lambda: [None], METRICS)
        return Scoring(lambda model, _: [_call(METRICS, metrics, model)], alone, None, METRICS)
    if "heldout_parts" in functions and "score_parts" not in functions:
        raise TaskError(f"{source}: heldout_parts() needs score_parts(), the parts to choose by")
    listed_parts = {
        name: Parts(with_args(name), name) for name in FUNCTIONS[:2] if name in functions
    }
    parts, heldout = (listed_parts.get(name) for name in FUNCTIONS[:2])
    if parts is None and "selection_data" not in functions:
        raise TaskError(f"{source} lacks score_parts(**args), the list of parts for score()")
    corpus = partial(_made_of_sums, functions["corpus"]) if "corpus" in functions else None
    if "scores" in functions:
        several = _several(functions["scores"], corpus is not None)
        return Scoring(several, parts, heldout, "scores", at_once=True, corpus=corpus)
    one, sums = functions["score"], corpus is not None
    return Scoring(
        lambda model, some: [_call("score", one, model, part, sums=sums) for part in some],
        parts,
        heldout,
        "score",
        corpus=corpus,
    )


def _call(name: str, function: Callable[..., Any], *args: Any, sums: bool = False) -> Score:
    with user_code(name):
        return _checked(name, function(*args), sums)


def _made_of_sums(corpus: Callable[..., Any], name: str, sums: Sums) -> float:
    with user_code("corpus"):
        return _number("corpus", corpus(name, list(sums)))


def _several(
    scores: Callable[..., Any], sums: bool
) -> Callable[[nn.Module, Sequence[Any]], list[Score]]:
    def score(model: nn.Module, parts: Sequence[Any]) -> list[Score]:
        with user_code("scores"):
            found = scores(model, parts)
            found = found.tolist() if hasattr(found, "tolist") else found
            if not isinstance(found, Sequence) or isinstance(found, str | bytes):
                raise TaskError(f"scores() must return a list, found {type(found).__name__}")
            if len(found) != len(parts):
                raise TaskError(
                    f"scores() gave {len(found)} scores for {len(parts)} parts; return one for each"
                )
            return [_checked("scores", one, sums) for one in found]

    return score


def _checked(name: str, value: Any, sums: bool) -> Score:
    if not isinstance(value, Mapping):
        return {"": _number(name, value)}
    return {
        str(key): tuple(_number(name, number) for number in one)
        if sums and isinstance(one, list | tuple)
        else _number(name, one)
        for key, one in value.items()
    }


def _number(name: str, value: Any) -> float:
    if hasattr(value, "item") and getattr(value, "size", 1) in (1, ()):
        value = value.item()  # of NumPy
    elif hasattr(value, "numel") and value.numel() == 1:
        value = value.item()
    if not isinstance(value, Real):
        raise TaskError(
            f'{name}() must return a number, or a dict like {{"return": 1242.0}}; found '
            f"{type(value).__name__}"
        )
    return float(value)
