"""Experiments one after another: each changes the best settings so far, and is kept only where that clears the noise.

A change and the best so far run in turns, seed by seed, so that a machine that slows down slows both. A single run of
each would keep whatever luck favours: the running minimum of noise.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import sqrt

import numpy as np
import pandas as pd

from lib import stats
from lib.check import BadInput, require, require_known
from lib.config import RunConfig, build
from lib.stats import Comparison

JUDGES = ("loss", "speed")
# What trains a run and returns its row: status, reason, validation_bits_per_byte and tokens_per_second.
Trial = Callable[[RunConfig], Mapping[str, object]]


@dataclass(frozen=True)
class Experiment:
    """A change of settings, when it is tried, and what decides: bits per byte, or tokens/s where T stays."""

    id: str
    change: Mapping[str, object]
    priority: str = "medium"
    judge: str = "loss"
    after: tuple[str, ...] = ()  # tried only where one of these was kept
    again: bool = False  # tried once more where T or the micro-batch has changed since
    expected: str = ""

    def __post_init__(self):
        require(self.judge in JUDGES, f"{self.id}: judge", self.judge, f"must be one of {', '.join(JUDGES)}")
        require(bool(self.change), f"{self.id}: change", self.change, "must name a setting")
        for name, value in self.change.items():
            require_known(name, [field.name for field in fields(RunConfig)], f"{self.id}: {name}", value, "RunConfig")
        require(self.judge == "loss" or not {"tokens_per_step", "lr"} & {*self.change}, f"{self.id}: judge", self.judge,
                "must be loss where T or the rate changes: tokens/s say nothing of what a token teaches then")


@dataclass(frozen=True)
class Floor:
    """What the machine alone does: sd of the difference between two runs that are alike but for `repeat`."""

    loss: float  # bits per byte
    speed: float  # log of tokens/s


@dataclass(frozen=True)
class Decision:
    """What became of an experiment: kept, dropped, failed or pruned, and why."""

    name: str
    outcome: str
    reason: str
    against: RunConfig  # the best so far
    config: RunConfig  # with the change
    loss: Comparison | None = None  # bits per byte
    speed: Comparison | None = None  # log of seconds a token: less is better, as for losses
    rows: pd.DataFrame | None = None  # of the runs, with `side`: best or change


def read(rows: Sequence[Mapping[str, object]]) -> list[Experiment]:
    """The table of experiments. Raises BadInput for an unknown field, an id given twice, or named before its turn."""
    found: list[Experiment] = []
    for row in rows:
        require("id" in row and "change" in row, "experiments", row, "must have an id and a change")
        after = row.get("after", ())
        made = build(Experiment, {**row, "after": tuple([after] if isinstance(after, str) else after)})
        known = [experiment.id for experiment in found]
        require(made.id not in known, "experiments", made.id, "is given twice")
        for name in made.after:
            require(name in known, f"{made.id}: after", name, "must stand above it")
        found.append(made)
    return found


def measure_floor(rows: pd.DataFrame) -> tuple[Floor, float]:
    """The floor, and beside it the sd of the difference between two runs that differ by seed, in bits per byte.

    `rows` are runs of one configuration: seed, repeat, validation_bits_per_byte and tokens_per_second. Raises BadInput
    below two repeats of a seed.
    """
    rows = rows.assign(pace=np.log(rows["tokens_per_second"].astype(float)))
    loss, pace = (rows.pivot(index="seed", columns="repeat", values=name).astype(float)
                  for name in ("validation_bits_per_byte", "pace"))
    floor = Floor(stats.noise_floor(loss), stats.noise_floor(pace))
    require(floor.loss == floor.loss, "repeats", loss.shape[1], "must be two or more, of a baseline that finishes")
    return floor, stats.noise_floor(loss.T)


def decide(experiments: Sequence[Experiment], baseline: RunConfig, seeds: Sequence[int], floor: Floor,
           margins: Mapping[str, float], trial: Trial, first: int = 0) -> Iterator[Decision]:
    """Try the experiments in order, then again those whose shapes have changed since, and say what became of each.

    Their runs have repeats from `first` + 1 on, a number a try, so that the best runs anew beside each change.

    A change is kept where its paired interval lies wholly below zero by more than what time noise alone does to a mean
    over so many pairs, floor / √n, and is not equivalent within the margin of its judge. Raises BadInput below two
    seeds.
    """
    require(len(seeds) > 1, "seeds", [*seeds], "must be two or more: one pair shows no noise")
    best, kept, tried, number = baseline, set(), {}, first

    def attempt(experiment: Experiment, name: str) -> Decision:
        nonlocal best, number
        try:
            config = replace(best, **experiment.change)
        except BadInput as error:
            return Decision(name, "pruned", f"does not go with the best so far: {error}", best, best)
        if experiment.after and not kept & {*experiment.after}:
            return Decision(name, "pruned", f"needs {' or '.join(experiment.after)} to be kept", best, config)
        if config == best:
            return Decision(name, "pruned", "its settings are in use already", best, config)
        number, tried[experiment.id] = number + 1, shape(best)
        rows = in_turns({"change": config, "best": best}, seeds, number, trial)
        decision = judge(experiment, name, best, config, floor, margins, rows)
        if decision.outcome == "kept":
            best = config
            kept.add(experiment.id)
        return decision

    for experiment in experiments:
        yield attempt(experiment, experiment.id)
    for experiment in experiments:
        if experiment.again and tried.get(experiment.id, shape(best)) != shape(best):
            yield attempt(experiment, f"{experiment.id} again")


def in_turns(configs: Mapping[str, RunConfig], seeds: Sequence[int], number: int, trial: Trial) -> pd.DataFrame:
    """A row a run, with its `side`: seed by seed, each seed beginning with another side.

    A side that fails gets no more seeds, and where a single one is left, there is nothing to compare.
    """
    rows, sides = [], [*configs]
    for place, seed in enumerate(seeds):
        for side in [*sides[place % len(sides):], *sides[:place % len(sides)]]:
            failed = {row["side"] for row in rows if row["status"] != "finished"}
            if side not in failed and len(failed) < len(sides) - 1:
                rows.append({**trial(replace(configs[side], seed=seed, repeat=number)), "seed": seed, "side": side})
    return pd.DataFrame(rows)


def shape(config: RunConfig) -> tuple[int, int]:
    """What a compiled graph, and the time of an update, hang on."""
    return config.tokens_per_step, config.device_token_capacity


def judge(experiment: Experiment, name: str, best: RunConfig, config: RunConfig, floor: Floor,
          margins: Mapping[str, float], rows: pd.DataFrame) -> Decision:
    """Keep or drop the change that these rows tried."""
    failed = rows[(rows["side"] == "change") & (rows["status"] != "finished")]
    if len(failed):
        return Decision(name, "failed", str(failed["reason"].iloc[0]), best, config, rows=rows)
    tests = {kind: compared(rows, kind, margins[kind]) for kind in JUDGES}
    test, least = tests[experiment.judge], getattr(floor, experiment.judge) / sqrt(tests[experiment.judge].n)
    clears = test.verdict == "better" and test.interval[1] < -least
    if clears or test.verdict != "better":
        reason = f"{experiment.judge}: {test.verdict}"
    else:
        reason = f"{experiment.judge}: better, but by less than the floor of {least:.2g}"
    return Decision(name, "kept" if clears else "dropped", reason, best, config, tests["loss"], tests["speed"], rows)


def compared(rows: pd.DataFrame, kind: str, margin: float, sides: Sequence[str] = ("change", "best")) -> Comparison:
    """The first side against the second, paired over seeds: bits per byte, or the log of seconds a token."""
    value = rows["validation_bits_per_byte"].astype(float) if kind == "loss" else -np.log(
        rows["tokens_per_second"].astype(float))
    value = value.where(rows["status"] == "finished")
    change, best = (value[rows["side"] == side].set_axis(rows["seed"][rows["side"] == side]) for side in sides)
    return stats.compare(change, best, margin)


def ratio(test: Comparison) -> str:
    """A comparison of the log of seconds a token as tokens/s over those of the best, with its interval."""
    middle, high, low = (np.exp(-value) for value in (test.difference, *test.interval))
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def described(decisions: Sequence[Decision]) -> pd.DataFrame:
    """A row a decision, in words and numbers."""
    rows = {}
    for decision in decisions:
        numbers = {"bits per byte": "–", "interval": "–", "tokens/s, ratio": "–", "speed": "–"}
        if decision.loss:
            faster = {"better": "faster", "worse": "slower"}
            numbers = {
                "bits per byte": stats.signed(decision.loss.difference, 4),
                "interval": " to ".join(stats.signed(end, 4) for end in decision.loss.interval),
                "tokens/s, ratio": ratio(decision.speed),
                "speed": faster.get(decision.speed.verdict, decision.speed.verdict)}
        rows[decision.name] = numbers | {"outcome": decision.outcome, "reason": decision.reason}
    return pd.DataFrame.from_dict(rows, orient="index")


def throughput(decisions: Sequence[Decision], peak: float) -> pd.DataFrame:
    """A row a change that ran: medians over its runs. `peak` is the matrix-product peak, FLOP/s."""
    rows = {}
    for decision in decisions:
        if decision.loss:
            sides = decision.rows.groupby("side").median(numeric_only=True)
            here, memory = sides.loc["change"], sides["peak_memory"]
            rows[decision.name] = {
                "tokens/s": f"{here['tokens_per_second']:,.0f}", "ms an update": f"{1e3 * here['update_seconds']:,.1f}",
                "model GFLOP/s": f"{here['flops_per_second'] / 1e9:,.1f}",
                "share of the peak": f"{here['flops_per_second'] / peak:.0%}",
                "peak memory, MB": f"{here['peak_memory'] / 1e6:,.0f}",
                "of the best so far": f"{memory['change'] / memory['best']:.2f}",
                "compiling, s": f"{here['compile_seconds']:.1f}", "graph breaks": f"{here['graph_breaks']:.0f}",
                "recompilations": f"{decision.rows['recompilations'].max():.0f}"}
    return pd.DataFrame.from_dict(rows, orient="index")


def changed(config: RunConfig, baseline: RunConfig) -> str:
    """The settings in which a configuration differs from the baseline, in words."""
    differ = {name: value for name, value in vars(config).items() if value != getattr(baseline, name)}
    return ", ".join(f"{name} {value:,}" if type(value) is int else f"{name} {value}"
                     for name, value in differ.items() if name not in ("seed", "repeat")) or "nothing"
