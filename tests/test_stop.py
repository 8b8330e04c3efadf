"""A file in a run's directory stops it, from anywhere, as Ctrl-C does where it trains."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path

import pytest

from lib.check import BadInput
from lib.checkpoint import tokens_of, written
from lib.interrupt import stop
from lib.runs import Run
from lib.step import Learner
from lib.sweep import sweep
from lib.train import resolve, train

THREE = {"schedule": "dividers", "batch_dividers": [12, 4, 1], "stage_length": [1 / 3, 1 / 3]}


def quiet(line):
    pass


ASKED = "a stop was asked for"


@pytest.fixture
def told():
    """Makes a context in which this run is told to stop in its update, or another step, of this number."""

    @contextmanager
    def during(run, number, step="apply"):
        original, own = getattr(Learner, step), []

        def watched(*arguments):
            if (run.path / "config.json").exists():  # not one that the sweep trains before it
                own.append(1)
                if len(own) == number:
                    stop(run)
                    assert (run.path / "stop").exists()
            return original(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Learner, step, watched)
            yield
        assert not (run.path / "stop").exists()

    return during


@pytest.mark.parametrize("updates", [1, 40, 57])
def test_a_run_that_was_told_to_stop_goes_on_to_the_same_end(tiny, tmp_path, told, same_run, updates):
    """After the warm-up update, at a boundary of stages, and after the last."""
    config = tiny(**THREE, eval_every=500, warmup_fraction=0.1, validation_tokens=160)
    straight = train(replace(config, runs=str(tmp_path / "straight")), quiet)
    run, lines = resolve(config).run, []
    with told(run, updates), pytest.raises(KeyboardInterrupt, match=f"{run.name}: {ASKED}"):
        train(config, lines.append)
    assert lines[-1] == f"stopped after update {updates}; asked for again, the run goes on from there"
    assert (run.meta["status"], run.meta["steps"]) == ("interrupted", updates)
    assert [tokens_of(path) for path in written(run)] == [run.meta["tokens"]]
    assert train(config, quiet).path == run.path
    same_run(run, straight)
    assert [attempt["after"] for attempt in run.meta["attempts"]] == [0, updates]


def test_a_command_that_was_told_to_stop_says_so(tiny, told, launch):
    config = tiny(skip_validation=True)
    with told(resolve(config).run, 3):
        assert launch(config) == (130, "interrupted; the same command continues it\n")
    assert launch(config) == (0, "")


def test_a_stop_that_comes_too_late_for_the_run_still_ends_its_caller(tiny, told):
    """In its final validation: it has its outcome, and a sweep would begin another."""
    configs = [tiny(seed=seed) for seed in (0, 1)]
    first, second = (resolve(config).run for config in configs)
    with told(first, 1, "evaluate"), pytest.raises(KeyboardInterrupt, match=ASKED):
        sweep(configs, "two")
    assert first.meta["status"] == "finished"
    assert not second.path.exists()


def test_a_stop_of_an_earlier_time_is_removed(tiny):
    run = resolve(tiny()).run
    run.path.mkdir(parents=True)
    (run.path / "stop").touch()
    assert train(tiny(), quiet).meta["status"] == "finished"
    assert not (run.path / "stop").exists()


def test_a_run_that_is_told_to_stop_ends_its_sweep_which_goes_on_when_asked_again(tiny, tmp_path, told):
    """No signal reaches a thread, but the file does."""
    configs = [tiny(seed=seed, skip_validation=True) for seed in (0, 1, 2)]
    runs, pool = [resolve(config).run for config in configs], ThreadPoolExecutor(1)
    with told(runs[1], 4), pytest.raises(KeyboardInterrupt, match=f"{runs[1].name}: {ASKED}"):
        sweep(configs, "three", pool)
    assert [run.meta["status"] for run in runs[:2]] == ["finished", "interrupted"]
    assert not (Path(configs[0].runs) / "sweeps").exists()
    alone = [train(replace(config, runs=str(tmp_path / "alone")), quiet).meta["sha256"] for config in configs]
    assert [run.meta["sha256"] for run in sweep(configs, "three", pool)] == alone
    assert [attempt["after"] for attempt in runs[1].meta["attempts"]] == [0, 4]


def test_in_a_sweep_of_processes_none_that_waits_is_begun(tiny):
    configs = [tiny(seed=seed, skip_validation=True, tokens_per_step=32, token_budget=32 * 2000) for seed in (0, 1, 2)]
    run, *others = (resolve(config).run for config in configs)

    def watch():
        while not run.rows():
            time.sleep(0.01)
        stop(run)

    with ThreadPoolExecutor(1) as aside:
        aside.submit(watch)
        with pytest.raises(KeyboardInterrupt, match=f"{run.name}: {ASKED}"):
            sweep(configs, "three", "processes:1")
    assert run.meta["status"] == "interrupted"
    assert not any(other.path.exists() for other in others)
    assert active_children() == []


def test_only_a_run_that_is_being_trained_can_be_stopped(tiny, tmp_path, contents):
    run = train(tiny(), quiet)
    before = contents(tmp_path)
    for known in (run, str(run.path), run.path):
        with pytest.raises(BadInput, match=f"run = .*{run.name}': must be one that is being trained"):
            stop(known)
    for unknown in (Run(tmp_path / "nowhere"), tmp_path / "nowhere", run.path / "config.json"):
        with pytest.raises(BadInput, match="must be a run's directory"):
            stop(unknown)
    assert contents(tmp_path) == before
