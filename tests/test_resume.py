"""Exact resume: a run that was stopped and continued is the run that was not, bit for bit."""

import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lib.step
from lib import checkpoint
from lib.runs import Run
from lib.step import Learner
from lib.stream import PackedStream
from lib.train import train

THREE = {"schedule": "dividers", "batch_dividers": [12, 4, 1], "stage_length": [1 / 3, 1 / 3]}


def quiet(line):
    pass


def rolling(run):
    """The tokens after which its checkpoints were written, those for branches aside."""
    return [checkpoint.tokens_of(path) for path in checkpoint.written(run) if path.parent.name == "checkpoints"]


@pytest.fixture
def twice(tiny, tmp_path, ctrl_c):
    """Trains a configuration undisturbed, and again with a stop in these updates; returns both runs."""

    def of(*stops, **changes):
        config = tiny(**{"validation_tokens": 160} | changes)
        straight = train(replace(config, runs=str(tmp_path / "straight")), progress=quiet)
        for updates in stops:
            with ctrl_c(updates):
                train(config, progress=quiet)
        run = train(config, progress=quiet)
        assert len(run.meta["attempts"]) == 1 + len(stops)
        return run, straight

    return of


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("updates", [1, 2, 3, 40, 53, 54, 57])
def test_a_stopped_run_goes_on_to_the_same_end(tiny, tmp_path, ctrl_c, same_run, updates, number):
    """After 1 update, inside warm-up, on both sides of a boundary (40, 54 updates), and after the last (57)."""
    config = tiny(**THREE, eval_every=500, warmup_fraction=0.1, validation_tokens=160)
    straight = train(replace(config, runs=str(tmp_path / "straight")), progress=quiet)
    assert straight.metrics().groupby("stage").size().tolist() == [40, 14, 3]
    with ctrl_c(updates, number):
        train(config, progress=quiet)
    run = Run(Path(config.runs) / straight.name)
    assert run.meta["status"] == "interrupted"
    assert run.meta["steps"] == updates
    lines = []
    assert train(config, progress=lines.append).path == run.path
    assert f"continued after update {updates}" in lines[0]
    same_run(run, straight)
    assert [attempt["after"] for attempt in run.meta["attempts"]] == [0, updates]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_run_stopped_anywhere_is_the_undisturbed_one(tiny, tmp_path_factory, ctrl_c, same_run, data):
    count = data.draw(st.integers(1, 3))
    dividers = data.draw(st.lists(st.integers(1, 14), min_size=count, max_size=count))
    parts = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    config = tiny(schedule="dividers", batch_dividers=dividers, stage_length=[p / sum(parts) for p in parts[:-1]],
                  token_budget=data.draw(st.integers(500, 3000)), skip_validation=True,
                  checkpoint_every=data.draw(st.sampled_from([0, 100, 700])), runs=str(tmp_path_factory.mktemp("a")))
    straight = train(replace(config, runs=str(tmp_path_factory.mktemp("b"))), progress=quiet)
    stops = sorted(data.draw(st.sets(st.integers(1, straight.meta["steps"]), min_size=1, max_size=3)))

    read, reads = PackedStream.read, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedStream, "read", lambda stream, *what: reads[-1].append(what) or read(stream, *what))
        for before, stop in zip([0, *stops], stops, strict=False):
            reads.append([])
            with ctrl_c(stop - before):
                train(config, progress=quiet)
        reads.append([])
        run = train(config, progress=quiet)

    # Each attempt after the first touches memory with the stream's first rows; all else is read once, in order.
    assert all(attempt[0] == (0, config.device_token_capacity) for attempt in reads[1:])
    cursor = 0
    for begin, size in [what for number, attempt in enumerate(reads) for what in attempt[number > 0:]]:
        assert begin == cursor
        cursor += size
    assert cursor == run.meta["tokens"] <= config.token_budget
    # Stages are recorded as they were trained.
    rows = run.metrics()
    for number, trained in rows.groupby("stage"):
        stage, first, last = run.meta["stages"][number], trained.iloc[0], trained.iloc[-1]
        assert (stage["start_tokens"], stage["start_update"]) == (first.tokens - first.tokens_per_step, first.step - 1)
        assert (stage["end_tokens"], stage["end_update"], stage["updates"]) == (last.tokens, last.step, len(trained))
    same_run(run, straight)


@pytest.mark.parametrize("stops", [(1,), (2,), (9, 1, 13)])
def test_a_modelled_time_budget_goes_on_with_the_time_it_had(twice, costs, same_run, stops):
    run, straight = twice(*stops, **THREE, time_budget=1.2, clock="modelled", eval_every=500)
    same_run(run, straight, but=["tokens_per_second"])
    assert run.meta["elapsed_seconds"] == straight.meta["elapsed_seconds"] >= 1.2
    for stage, same in zip(run.meta["stages"], straight.meta["stages"], strict=True):
        assert (stage["start_seconds"], stage["end_seconds"]) == (same["start_seconds"], same["end_seconds"])


def test_on_the_measured_clock_neither_the_gap_nor_another_start_counts(tiny, seconds, ctrl_c, monkeypatch):
    def slow(name, more):
        method = getattr(Learner, name)

        def slowly(*arguments):
            seconds[0] += more
            return method(*arguments)

        monkeypatch.setattr(Learner, name, slowly)

    slow("__init__", 200)
    slow("warm_up", 50)
    slow("evaluate", 100)
    config = tiny(time_budget=0.3, tokens_per_step=32, eval_every=320, validation_tokens=160)
    with ctrl_c(25):
        train(config, progress=quiet)
    run = Run(next(Path(config.runs).iterdir()))
    stopped = run.meta
    seconds[0] += 10_000
    meta, rows = train(config, progress=quiet).meta, run.metrics()
    assert stopped["steps"] == 25
    assert meta["steps"] == len(rows) > 30
    assert stopped["elapsed_seconds"] == pytest.approx(rows.elapsed[24], abs=0.02)
    assert 0 < rows.elapsed[25] - rows.elapsed[24] < 0.03
    assert rows.elapsed.is_monotonic_increasing
    assert rows.elapsed.iloc[-2] < 0.3 <= rows.elapsed.iloc[-1] + 0.002  # the clock is looked at again after the row
    assert meta["elapsed_seconds"] == meta["measured_elapsed_seconds"] == pytest.approx(0.3, abs=0.02)
    assert stopped["paused_seconds"] == pytest.approx(200, abs=1)
    assert len(meta["periodic_validation_loss"]) > 2
    assert meta["paused_seconds"] == pytest.approx(100 * len(meta["periodic_validation_loss"]), abs=1)


def test_the_validation_after_the_warm_up_update_stays_outside_the_clock(tiny, seconds, ctrl_c, monkeypatch):
    """A run that is stopped after its first update has used no time."""
    evaluate = Learner.evaluate

    def slow(*arguments):
        seconds[0] += 100
        return evaluate(*arguments)

    monkeypatch.setattr(Learner, "evaluate", slow)
    config = tiny(time_budget=0.1, tokens_per_step=32, eval_every=32, validation_tokens=160)
    with ctrl_c(1):
        train(config, progress=quiet)
    rows = train(config, progress=quiet).metrics()
    assert rows.elapsed[0] == 0
    assert 0 < rows.elapsed[1] < 0.03


def noisy(monkeypatch):
    """Add noise from torch's generator to every gradient."""
    accumulate = Learner.accumulate

    def with_noise(learner, rows, *size):
        loss = accumulate(learner, rows, *size)
        for weights in learner.model.parameters():
            weights.grad += 0.01 * torch.randn_like(weights)
        return loss

    monkeypatch.setattr(Learner, "accumulate", with_noise)


def test_random_states_go_on(twice, tiny, monkeypatch, same_run):
    plain = train(tiny(seed=0, validation_tokens=160, runs=tiny().runs + "-plain"), progress=quiet)
    noisy(monkeypatch)
    run, straight = twice(1, 3)
    same_run(run, straight)
    assert run.meta["sha256"] != plain.meta["sha256"]  # the noise counts
    other, _ = twice(seed=1)
    assert other.meta["sha256"] != run.meta["sha256"]


def test_the_callers_random_state_is_its_own(tiny, ctrl_c, monkeypatch):
    noisy(monkeypatch)
    seen = []
    for number, runs in enumerate(("one", "other")):
        torch.manual_seed(number)
        before = torch.get_rng_state()
        config = tiny(validation_tokens=160, runs=tiny().runs + runs)
        with ctrl_c(3):
            train(config, progress=quiet)
        assert torch.equal(torch.get_rng_state(), before)
        seen.append(train(config, progress=quiet).meta["sha256"])
        assert torch.equal(torch.get_rng_state(), before)
    assert seen[0] == seen[1]  # and it does not reach the run


def test_a_calibration_leaves_the_callers_random_state(tiny, monkeypatch):
    noisy(monkeypatch)
    monkeypatch.setattr(lib.step, "measure_step", partial(lib.step.measure_step, seconds=0.0))
    before = torch.get_rng_state()
    train(tiny(time_budget=0.1, clock="modelled", validation_tokens=160), progress=quiet)
    assert torch.equal(torch.get_rng_state(), before)


def test_bf16_goes_on(twice, same_run):
    run, straight = twice(1, 4, precision="bf16", device_token_capacity=384)
    same_run(run, straight)


def test_the_mean_loss_of_the_end_counts_what_came_before_a_stop(twice, same_run):
    """It spans the last 6 of 120 updates."""
    run, straight = twice(117, tokens_per_step=32)
    losses = straight.metrics().loss
    assert straight.meta["train_loss"] == pytest.approx(losses[-6:].mean()) != pytest.approx(losses[-3:].mean())
    same_run(run, straight)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_stops_at_once(tiny, tmp_path, ctrl_c, same_run, number):
    """In the middle of its update, which is not counted and is made again."""
    config = tiny(validation_tokens=160, checkpoint_every=1000)
    straight = train(replace(config, runs=str(tmp_path / "straight")), progress=quiet)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is there acts, which else is the end
    try:
        with ctrl_c(5, number, number):
            train(config, progress=quiet)
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert handlers == {number: signal.getsignal(number) for number in handlers}
    run = Run(Path(config.runs) / straight.name)
    assert run.meta["status"] == "interrupted"
    assert run.meta["steps"] == len(run.metrics()) == 4
    assert rolling(run) == [1152]  # none was written at the stop
    train(config, progress=quiet)
    same_run(run, straight)


def test_a_run_that_failed_goes_on_from_its_last_checkpoint(tiny, tmp_path, monkeypatch, same_run):
    config = tiny(validation_tokens=160, checkpoint_every=1000)
    straight = train(replace(config, runs=str(tmp_path / "straight")), progress=quiet)
    apply, calls = Learner.apply, []

    def fails(*arguments):
        calls.append(1)
        if len(calls) == 8:
            raise RuntimeError("a failure")
        return apply(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "apply", fails)
        with pytest.raises(RuntimeError, match="a failure"):
            train(config, progress=quiet)
    run = Run(Path(config.runs) / straight.name)
    assert (run.meta["status"], run.meta["steps"]) == ("failed", 7)
    train(config, progress=quiet)
    assert [attempt["after"] for attempt in run.meta["attempts"]] == [0, 6]
    same_run(run, straight)


def test_the_last_two_checkpoints_are_kept_and_no_more(tiny):
    config, seen = tiny(checkpoint_every=384, skip_validation=True), []
    for updates in range(1, 11):
        run = train(config, progress=quiet, keep=[384, 1152], until=384 * updates)
        seen.append(rolling(run))
    assert seen[-1] == [3840, 3456]
    # Those for branches are kept besides, and written once.
    assert [len(found) for found in seen] == [0, 1, 1, *[2] * 7]
    kept = {checkpoint.tokens_of(path) for path in checkpoint.written(run) if path.parent.name == "kept"}
    assert kept == {384, 1152}
    assert len(checkpoint.written(run)) == 4


@pytest.mark.parametrize(("every", "expected"), [(0, []), (10**9, []), (1000, [3072, 2304]), (1, [3840, 3456])])
def test_checkpoints_are_written_as_often_as_asked_for(tiny, every, expected):
    run = train(tiny(checkpoint_every=every, skip_validation=True), progress=quiet)
    assert rolling(run) == expected
    assert (run.path / "checkpoints").exists() == bool(expected)


def test_without_checkpoints_a_stop_still_writes_one(tiny, ctrl_c):
    config = tiny(checkpoint_every=0, skip_validation=True)
    with ctrl_c(4):
        train(config, progress=quiet)
    run = Run(next(Path(config.runs).iterdir()))
    assert rolling(run) == [4 * 384]
    train(config, progress=quiet)
    assert run.meta["status"] == "finished"
    assert rolling(run) == [4 * 384]
