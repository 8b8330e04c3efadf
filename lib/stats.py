"""Evidence: groups of runs, paired comparisons with a verdict, the noise floor, tuning and bins of equal tokens.

Losses are in nats unless said otherwise. A run that diverged, or ended early, is counted and never averaged away.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10, nan, sqrt

import numpy as np
import pandas as pd
from scipy.stats import t as student

from lib.check import require

LOSSES = ("validation_loss", "validation_bits_per_byte")
MEANS = ("steps", "tokens", "elapsed_seconds", "tokens_per_second", "final_lr")


def completed(runs: pd.DataFrame, on: str = "validation_loss") -> pd.Series:
    """Per run: whether it finished with a finite `on`."""
    return (runs["status"] == "finished") & np.isfinite(runs[on].astype(float))


def unfinished(runs: pd.DataFrame) -> str:
    """How many runs ended otherwise than finished, and how: "2 diverged, 1 out of memory"; empty where none did."""
    counts = runs["status"][runs["status"] != "finished"].value_counts(sort=False)
    return ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in counts.items())


def losses(runs: pd.DataFrame, on: str = "validation_loss") -> pd.Series:
    """`on` of one arm's runs by seed, as `compare` takes it; NaN where the run did not finish."""
    return runs.set_index("seed")[on].where(completed(runs, on).to_numpy())


def summary(runs: pd.DataFrame, by: Sequence[str] = ("budget_kind", "arm", "lr")) -> pd.DataFrame:
    """One row a group, in order of appearance: mean and sd (n − 1) of the losses, means of steps, tokens and time.

    `n` counts the runs averaged: finished, with a finite loss. `unfinished` says how many diverged, or ended otherwise,
    so that a mean over survivors is seen to be one.
    """
    by, rows = list(by), []
    for key, group in runs.groupby(by, sort=False, dropna=False):
        done = group[completed(group)]
        row = dict(zip(by, key, strict=True))
        for name in LOSSES:
            row |= {name: done[name].mean(), f"{name}_sd": done[name].std()}
        row |= {"n": len(done), "unfinished": unfinished(group)}
        rows.append(row | {name: done[name].mean() for name in MEANS})
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class Comparison:
    """A mean paired difference, treatment − baseline, and what it shows. Negative is better, as for losses."""

    difference: float
    sd: float
    n: int  # pairs with a finite difference
    interval: tuple[float, float]  # at `confidence`
    equivalence_interval: tuple[float, float]  # of the two one-sided tests: 90 % where confidence is 95 %
    p_value: float  # of the paired t test, two-sided
    margin: float
    confidence: float
    verdict: str  # better, worse, equivalent or inconclusive
    reason: str = ""  # why there is no verdict, where the numbers alone do not say it
    lost: int = 0  # pairs in which a run has no finite loss
    unpaired: int = 0  # seeds that only one side has

    def sentence(self, name: str, baseline: str, unit: str = "nat") -> str:
        """The result in one line; numbers have two digits of the interval's half width."""
        equivalent = self.verdict == "equivalent"
        low, high = self.equivalence_interval if equivalent else self.interval
        level = 2 * self.confidence - 1 if equivalent else self.confidence
        digits = min(max(1 - floor(log10((high - low) / 2)), 0), 6) if high > low else 4
        low, high, difference = (signed(value, digits) for value in (low, high, self.difference))
        claim = {
            "equivalent": f"{name} is equivalent to {baseline} within ±{self.margin:g} {unit}",
            "inconclusive": f"{name} against {baseline} is inconclusive",
        }.get(self.verdict, f"{name} is {self.verdict} than {baseline}")
        if self.n < 2:
            return f"{claim}: {self.reason}" + (f"; the one pair differs by {difference} {unit}" if self.n else "")
        numbers = f"{difference} {unit} ({100 * level:g} % interval {low} to {high}, n = {self.n})"
        return f"{claim}: {self.reason}; the others differ by {numbers}" if self.reason else f"{claim}: {numbers}"


def signed(value: float, digits: int) -> str:
    """A difference as text: its sign always written, with a true minus."""
    return f"{value:+.{digits}f}".replace("-", "−")


def compare(treatment: pd.Series, baseline: pd.Series, margin: float, confidence: float = 0.95) -> Comparison:
    """Compare two arms over the seeds they share; Series, or frames of one column, indexed by seed.

    The verdict: "equivalent" where the interval of the two one-sided tests (Schuirmann 1987; level 2·confidence − 1)
    lies within ±margin, first because a difference below the margin stated in advance does not matter; then "better"
    or "worse" where the t interval excludes 0; else "inconclusive". It is always "inconclusive" below two pairs, and
    where a run of a pair has no finite loss: dropping that seed would favour the arm that fails. Raises BadInput for a
    margin that is not positive, a confidence outside (0.5, 1), or a seed given twice.
    """
    require(isfinite(margin) and margin > 0, "margin", margin, "must be positive and stated in advance")
    require(0.5 < confidence < 1, "confidence", confidence, "must lie between 0.5 and 1")
    treatment, baseline = by_seed("treatment", treatment), by_seed("baseline", baseline)
    seeds = treatment.index.intersection(baseline.index)
    differences = treatment[seeds] - baseline[seeds]
    finite = differences[np.isfinite(differences)]
    n, lost = len(finite), len(differences) - len(finite)
    mean, sd = float(finite.mean()), float(finite.std())
    error = sd / sqrt(n) if n > 1 else nan

    def interval(level: float) -> tuple[float, float]:
        half = student.ppf((1 + level) / 2, n - 1) * error if n > 1 else nan
        return float(mean - half), float(mean + half)

    p_value = float(2 * student.sf(abs(mean) / error, n - 1)) if error else float(mean == 0)
    (low, high), (least, most) = interval(confidence), interval(2 * confidence - 1)
    reason = ""
    if lost:
        reason = f"{lost} of {len(seeds)} pairs lack a finite loss"
    elif n < 2:
        reason = f"a verdict takes two pairs or more, there {'is' if n == 1 else 'are'} {n}"
    if reason:
        verdict = "inconclusive"
    elif -margin < least and most < margin:
        verdict = "equivalent"
    else:
        verdict = "better" if high < 0 else "worse" if low > 0 else "inconclusive"
    return Comparison(mean, sd, n, (low, high), (least, most), p_value, margin, confidence, verdict, reason, lost,
                      len(treatment.index.symmetric_difference(baseline.index)))


def by_seed(name: str, values: pd.Series | pd.DataFrame) -> pd.Series:
    """One loss a seed, or BadInput."""
    if isinstance(values, pd.DataFrame):
        require(values.shape[1] == 1, name, list(values.columns), "must have one column, the loss, indexed by seed")
        values = values.iloc[:, 0]
    twice = values.index[values.index.duplicated()]
    require(twice.empty, name, list(twice), "must hold each seed once; choose one learning rate and budget")
    return values.astype(float).sort_index()  # sorted, so that sums do not depend on the order given


def noise_floor(losses: pd.DataFrame) -> float:
    """Sd of the difference between two runs of one arm that differ by seed only; a frame of arm × seed, in its unit.

    √2 · the within-arm sd, pooled over arms with weights n − 1. It is the same as the root mean square difference over
    all pairs of seeds of an arm, (x − x')² having the mean 2σ², so no choice of pairs enters. Two arms compared by
    single runs differ by this much from the seed alone; the sd of *paired* differences is smaller where a common seed
    makes both arms lucky together. NaN where no arm has two finite losses.
    """
    finite = losses.astype(float).where(np.isfinite)
    degrees = (finite.count(axis="columns") - 1).clip(lower=0)
    squares = finite.var(axis="columns").fillna(0) * degrees
    return sqrt(2 * squares.sum() / degrees.sum()) if degrees.sum() else nan


def best(runs: pd.DataFrame, within: Sequence[str] = ("arm",), choose: str = "lr",
         on: str = "validation_loss") -> pd.DataFrame:
    """The `choose` with the lowest mean `on` in each group, over the seeds that every tried value has.

    A value with a run that did not finish never wins (NaN where none is left), but counts as tried: `at_edge` is true
    where the winner is the smallest or largest value tried, and the search ought to go on. Of equals the smaller wins.
    Raises BadInput where the tried values have no seed in common.
    """
    within, rows = list(within), []
    for key, group in runs.groupby(within, sort=False, dropna=False):
        common = set.intersection(*(set(seeds) for _, seeds in group.groupby(choose)["seed"]))
        require(bool(common), choose, sorted(set(group[choose])), f"the values tried for {key} share no seed")
        group = group[group["seed"].isin(common)]
        scores = group[on].where(completed(group, on)).groupby(group[choose]).mean(skipna=False)
        winner = scores.idxmin() if scores.notna().any() else nan
        rows.append(dict(zip(within, key, strict=True)) | {
            choose: winner, on: scores.min(), "at_edge": winner not in scores.index[1:-1], "tried": len(scores),
            "unfinished": unfinished(group)})
    return pd.DataFrame(rows)


def bins(updates: pd.DataFrame, width_tokens: float | None = None, edges: Sequence[float] | None = None
         ) -> pd.DataFrame:
    """Token-weighted mean training loss of each run in bins of tokens: [0, width), [width, 2·width) …, or `edges`.

    An update across an edge is split in proportion. `tokens` is what the run has in the bin, less than its width at the
    run's ends. A loss that is not finite leaves its bin and the later ones NaN. Raises BadInput unless exactly one of
    the two is given.
    """
    require((width_tokens is None) != (edges is None), "width_tokens, edges", (width_tokens, edges), "give one of two")
    require(width_tokens is None or width_tokens > 0, "width_tokens", width_tokens, "must be positive")
    tables = []
    for run, log in updates.sort_values("step").groupby("run", sort=False):
        sizes, ends = log["tokens_per_step"].to_numpy(float), log["tokens"].to_numpy(float)
        places = np.column_stack([ends - sizes, ends]).ravel()  # what is left out between two updates counts nothing
        # The sum of losses up to a token is linear inside an update, so reading it at the edges splits updates exactly.
        loss = log["loss"].where(np.isfinite(log["loss"])).to_numpy(float)  # pandas' own cumsum would step over a NaN
        total, count = (np.repeat(np.concatenate([[0], np.cumsum(x)]), 2)[1:-1] for x in (loss * sizes, sizes))
        cuts = np.arange(ends[-1] // width_tokens + 2) * width_tokens if edges is None else np.asarray(edges, float)
        tokens, sums = (np.diff(np.interp(cuts, places, x)) for x in (count, total))
        table = pd.DataFrame({"run": run, "start_tokens": cuts[:-1], "end_tokens": cuts[1:], "tokens": tokens})
        tables.append(table[tokens > 0].assign(loss=sums[tokens > 0] / tokens[tokens > 0]))
    return pd.concat(tables, ignore_index=True)


def mean_interval(values: pd.Series, confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean of the finite values, and its t interval; NaN ends below two values."""
    finite = values[np.isfinite(values.astype(float))]
    n = len(finite)
    half = student.ppf((1 + confidence) / 2, n - 1) * finite.std() / sqrt(n) if n > 1 else nan
    return float(finite.mean()), float(finite.mean() - half), float(finite.mean() + half)


def by_choice(values: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
    """Mean of `y` over seeds at each `x`, with its 95 % interval: x, middle, low, high."""
    rows = [(place, *mean_interval(group[y])) for place, group in values.groupby(x)]
    return pd.DataFrame(rows, columns=["x", "middle", "low", "high"])


def front(cost: Sequence[float], loss: Sequence[float]) -> list[int]:
    """Places of the points that no other beats on both, from the cheapest on (Pareto); of equals the first."""
    best, found = float("inf"), []
    for place in np.lexsort((loss, cost)):
        if loss[place] < best:
            best = loss[place]
            found.append(int(place))
    return found
