"""Exact resume: a run that was stopped and continued is the run that was not, bit for bit."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lib import checkpoint
from lib.check import BadInput
from lib.clock import Costs
from lib.runs import Run
from lib.step import Learner
from lib.train import train

THREE = {"schedule": "dividers", "batch_dividers": [12, 4, 1], "stage_length": [1 / 3, 1 / 3]}
COSTS = Costs(micro_batch_seconds=0.01, update_seconds=0.002)
TIMINGS = ["elapsed", "tokens_per_second"]


def quiet(line):
    pass


def stop_after(monkeypatch, updates, how=lambda: os.kill(os.getpid(), signal.SIGINT)):
    """Send a signal to this process while the run makes its update number `updates`, once."""
    apply, calls = Learner.apply, []

    def watched(*arguments):
        calls.append(1)
        if len(calls) == updates:
            how()
        return apply(*arguments)

    monkeypatch.setattr(Learner, "apply", watched)


def untimed(value):
    """Metadata without what differs between two runs of the same thing."""
    if isinstance(value, list):
        return [untimed(item) for item in value]
    if isinstance(value, dict):
        return {name: untimed(item) for name, item in value.items() if not any(
            word in name for word in ("second", "elapsed", "started", "attempts", "environment", "past"))}
    return value


def same_run(one, other, but=TIMINGS):
    """The same weights, rows and metadata, bit for bit, timings aside."""
    assert one.metrics().drop(columns=but).equals(other.metrics().drop(columns=but))
    assert one.meta["sha256"] == other.meta["sha256"]
    assert untimed(one.meta | {"ended": None}) == untimed(other.meta | {"ended": None})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("updates", [1, 2, 3, 40, 52, 53, 54])
def test_a_stopped_run_goes_on_to_the_same_end(tiny, tmp_path, monkeypatch, updates, number):
    """After 1 update, inside warm-up, inside a stage, and on both sides of its boundary (40 and 53 updates)."""
    config = tiny(**THREE, token_budget=3840, eval_every=500, warmup_fraction=0.1)
    straight = train(replace(config, runs=str(tmp_path / "straight")), progress=quiet)
    stop_after(monkeypatch, updates, lambda: os.kill(os.getpid(), number))
    with pytest.raises(KeyboardInterrupt):
        train(config, progress=quiet)
    run = Run(Path(config.runs) / straight.name)
    assert run.meta["status"] == "interrupted"
    assert run.meta["steps"] == updates
    lines = []
    assert train(config, progress=lines.append).path == run.path
    assert f"continued after update {updates}" in lines[0]
    same_run(run, straight)
    assert [attempt["after"] for attempt in run.meta["attempts"]] == [0, updates]
