"""What to set: the arm that did best, as a params file that runs as it stands."""

from collections.abc import Mapping
from dataclasses import asdict, fields

import pandas as pd
import yaml

from lib import stats
from lib.check import require
from lib.config import RunConfig, under_root
from lib.runs import make_folder, write_whole


def best_arm(runs: pd.DataFrame, arms: Mapping[str, RunConfig]) -> RunConfig:
    """The configuration whose arm has the lowest mean validation loss; an arm with a run that did not finish is none.

    Raises BadInput where none is left. The winner's own mean flatters it: verify it on seeds that had no say.
    """
    means = {arm: stats.losses(runs[runs["arm"] == arm]).mean(skipna=False) for arm in arms}
    means = {arm: mean for arm, mean in means.items() if mean == mean}
    require(bool(means), "runs", sorted(arms), "must have an arm that finished on every seed")
    return arms[min(means, key=means.get)]


def write_params(config: RunConfig, name: str, words: str) -> str:
    """Write NAME.yaml beside the runs, for `python -m lib.train`, with `words` as its comment; returns its path."""
    defaults = {field.name: field.default for field in fields(RunConfig)}
    values = {name: [*map(list, value)] if name == "stages" else list(value) if isinstance(value, tuple) else value
              for name, value in asdict(config).items() if value != defaults[name]}
    path = under_root(config.runs) / f"{name}.yaml"
    text = "".join(f"# {line}\n" for line in words.splitlines()) + yaml.safe_dump(values, sort_keys=False)
    make_folder(path.parent)
    write_whole(path, text.encode())
    return f"{config.runs}/{name}.yaml"
