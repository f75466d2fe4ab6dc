"""Which way a metric is better: lower like a loss, or higher like an accuracy.

The only place that knows. A name is read word by word, so that `val_loss`, `eval/wer` and
`top1_acc` are known. Where its words disagree, or none is known, `--metric -NAME` says lower and
`--metric +NAME` higher.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Sums = tuple[float, ...]  # what a unit adds to a score that is made of sums
Goal = Literal["max", "min"]
Scores = TypeVar("Scores", float, "Tensor")

_LOWER = """
    loss losses error errors err nll crossentropy xent perplexity ppl bpb bpc bits wer cer ter der
    eer mse rmse nrmse msle rmsle mae mape smape wape fid kid fpr fnr ece brier mcd lpips
    distortion divergence kl regret cost editdistance levenshtein
"""
_HIGHER = """
    acc accs accuracy bleu sacrebleu spbleu bleurt comet chrf rouge rougel rougelsum meteor cider
    bertscore f1 fscore fmeasure auc auroc auprc roc map mrr ndcg precision recall sensitivity
    specificity iou miou dice jaccard mcc kappa r2 pearson spearman correlation likelihood psnr ssim
    snr sdr pesq stoi mos match em pass return returns reward rewards success win wins winrate elo
"""
LOWER, HIGHER = frozenset(_LOWER.split()), frozenset(_HIGHER.split())
TURNING = frozenset({"neg", "negative"})  # scikit-learn's neg_mean_squared_error is to be high
WORD = re.compile(r"[A-Z]?[a-z]+\d*|[A-Z]+(?![a-z])\d*|\d+")


def known_goal(metric: str) -> Goal | None:
    """Return which way is better, by the metric's name; None where that does not tell."""
    words = _words(metric)
    is_low, is_high = not words.isdisjoint(LOWER), not words.isdisjoint(HIGHER)
    if is_low == is_high:
        return None
    return "min" if is_low == words.isdisjoint(TURNING) else "max"


def _words(metric: str) -> set[str]:
    """Split at signs and at camelCase; BLEU4 and bleu-4 are bleu, cross_entropy is one word too."""
    parts = [part for part in re.split(r"[\W_]+", metric) if part]
    words = [word.lower() for part in parts for word in (part, *WORD.findall(part))]
    pairs = (f"{one}{two}".lower() for one, two in pairwise(parts))
    return {*words, *pairs, *(word.rstrip("0123456789") for word in words)}


def split_sign(metric: str) -> tuple[str, Goal | None]:
    """Return the name without its sign, and what the sign asks for."""
    if metric[:1] in ("-", "+"):
        return metric[1:], "min" if metric[0] == "-" else "max"
    return metric, None


def comparative(goal: Goal) -> Literal["higher", "lower"]:
    return "higher" if goal == "max" else "lower"


def loss_of(score: float, goal: Goal) -> float:
    """Return a number that is better when lower; no -0."""
    return 0.0 - score if goal == "max" else score


@dataclass(frozen=True)
class Criterion:
    """A metric to choose by, and which way it is better."""

    name: str
    goal: Goal

    def lead(self, one: Scores, two: Scores) -> Scores:
        """Return by how much `one` is better than `two`."""
        return one - two if self.goal == "max" else two - one

    def rank(self, score: float) -> float:
        """Return a key that sorts the best score first, and those that are not finite last."""
        return self.lead(0.0, score) if isfinite(score) else inf

    def below(self, low: float, high: float) -> float:
        """Return a score that is worse than all between two, by as much as these are apart."""
        gap = high - low or abs(high) or 1.0
        return low - gap if self.goal == "max" else high + gap
