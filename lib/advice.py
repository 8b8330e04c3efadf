"""What to set: the arm that did best, as a params file that runs as it stands."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from lib import stats
from lib.check import require
from lib.config import RunConfig, under_root
from lib.design import params_text
from lib.report import listed
from lib.runs import frame, make_folder, write_whole
from lib.sweep import sweep


def best_arm(runs: pd.DataFrame, arms: Mapping[str, RunConfig]) -> RunConfig:
    """The configuration whose arm has the lowest mean validation loss; an arm with a run that did not finish is none.

    Raises BadInput where none is left. The winner's own mean flatters it: verify it on seeds that had no say.
    """
    means = {arm: stats.losses(runs[runs["arm"] == arm]).mean(skipna=False) for arm in arms}
    means = {arm: mean for arm, mean in means.items() if mean == mean}
    require(bool(means), "runs", sorted(arms), "must have an arm that finished on every seed")
    return arms[min(means, key=means.get)]


def recommend(winner: RunConfig, rivals: Sequence[RunConfig], fresh_seeds: Sequence[int], margin: float, name: str,
              executor: str = "serial") -> list[str]:
    """Train the winner and its rivals on seeds that had no say, write its params file, and say what to set and gain."""
    configs = [replace(config, seed=seed) for seed in fresh_seeds for config in (winner, *rivals)]
    fresh = {arm: stats.losses(group) for arm, group in frame(sweep(configs, f"{name} verification", executor))
             .groupby("arm")}
    gains = [stats.compare(fresh[winner.arm], fresh[rival.arm], margin).sentence(winner.arm, rival.arm)
             for rival in rivals]
    path = write_params(winner, name, f"{winner.arm}, verified on seeds {[*fresh_seeds]}:\n" + "\n".join(gains))
    changes = winner.schedule != "constant"
    rule = f" at T {winner.tokens_per_step:,}, scaling rule {winner.scaling_rule}" if changes else ""
    budget = f"{winner.token_budget:,} tokens" if winner.token_budget else f"{winner.time_budget:g} seconds"
    return [f"For this model and data, and {budget}: {winner.arm}, in micro-batches of "
            f"{winner.device_token_capacity:,} tokens, lr {winner.lr:g}{rule}, betas {winner.beta1:g} and "
            f"{winner.beta2:g}; `python -m lib.train {path}` runs it", "On fresh seeds, " + listed(gains)]


def write_params(config: RunConfig, name: str, words: str) -> str:
    """Write NAME.yaml beside the runs, for `python -m lib.train`, with `words` as its comment; returns its path."""
    path = under_root(config.runs) / f"{name}.yaml"
    make_folder(path.parent)
    write_whole(path, params_text(config, words).encode())
    return f"{config.runs}/{name}.yaml"
