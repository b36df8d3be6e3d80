"""What paired losses say: differences, their bounds, and the verdict beside a margin.

A method and its baseline are run with the same seeds, so with the same first weights and the same
batches; only the method differs. Judged is the mean of the differences, by Student's t:

    no worse         the upper 95 % bound of the mean difference is at most the margin
    worse            even the lower bound is above the margin
    not shown        anything between: too few seeds, or too much noise
    loses            of what is known to be bad: at least 5 standard errors above the baseline

A run that diverged counts as DIVERGED nats, what a guess among all symbols has.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

DIVERGED = math.log(103)
STANDARD_ERRORS = 5.0  # by which what is known to be bad has to lose

#: Student's t, one-sided 95 %, by degrees of freedom.
_T95 = (
    6.314,
    2.920,
    2.353,
    2.132,
    2.015,
    1.943,
    1.895,
    1.860,
    1.833,
    1.812,
    1.796,
    1.782,
    1.771,
    1.761,
    1.753,
    1.746,
    1.740,
    1.734,
    1.729,
    1.725,
    1.721,
    1.717,
    1.714,
)


@dataclasses.dataclass(frozen=True)
class Paired:
    """Differences of a method to its baseline, seed by seed.

    Attributes:
        mean: of the differences; above 0 the method is worse.
        error: the standard error of that mean.
        upper, lower: the one-sided 95 % bounds of the mean.
        seeds: how many pairs.
        sign_flip: the two-sided p value of the sign-flip test.
    """

    mean: float
    error: float
    upper: float
    lower: float
    seeds: int
    sign_flip: float


def t95(degrees: int) -> float:
    """Student's t, one-sided 95 %."""
    assert degrees > 0
    return _T95[degrees - 1] if degrees <= len(_T95) else 1.645 + 1.65 / degrees


def loss_of(value: float | None) -> float:
    """A run's loss; of one that diverged, DIVERGED."""
    if value is None or not math.isfinite(value):
        return DIVERGED
    return min(value, DIVERGED)


def paired(method: Mapping[int, float | None], baseline: Mapping[int, float | None]) -> Paired:
    """Losses by seed of both; only seeds that both have count. At least two."""
    seeds = sorted(set(method) & set(baseline))
    return of_differences([loss_of(method[seed]) - loss_of(baseline[seed]) for seed in seeds])


def of_differences(differences: Sequence[float]) -> Paired:
    """The same of the differences themselves."""
    count = len(differences)
    if count < 2:
        raise ValueError(f"{count} pairs of seeds: two are needed at least")
    mean = sum(differences) / count
    variance = sum((one - mean) ** 2 for one in differences) / (count - 1)
    error = math.sqrt(variance / count)
    reach = t95(count - 1) * error
    return Paired(mean, error, mean + reach, mean - reach, count, sign_flip(differences))


def sign_flip(differences: Sequence[float]) -> float:
    """The share of all sign patterns whose sum is as far from 0 as the one seen."""
    if len(differences) > 16:
        return float("nan")
    seen = abs(sum(differences)) - 1e-12
    patterns = list(itertools.product((1, -1), repeat=len(differences)))
    far = sum(
        abs(sum(sign * one for sign, one in zip(pattern, differences, strict=True))) >= seen
        for pattern in patterns
    )
    return far / len(patterns)


def non_inferior(pair: Paired, margin: float) -> str:
    """The verdict on a method that ought to be no worse than its baseline by more than a margin."""
    if pair.upper <= margin:
        return "no worse"
    return "worse" if pair.lower > margin else "not shown"


def loses(pair: Paired) -> str:
    """The verdict on a method that is known to be bad."""
    if pair.mean > 0 and pair.mean >= STANDARD_ERRORS * pair.error:
        return "loses"
    return "does not lose"


def null(pair: Paired, margin: float) -> str:
    """The verdict on a baseline beside itself: no worse, and no difference that is significant."""
    significant = pair.lower > 0 or pair.upper < 0
    if significant:
        return "differs"
    return "same" if pair.upper <= margin else "not shown"


def share_left(stale: Paired, corrected: Paired) -> float:
    """Of a gap, the part that a correction leaves; nan where there is no gap."""
    return corrected.mean / stale.mean if stale.mean > 0 else float("nan")
