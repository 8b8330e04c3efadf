"""Bad outcomes are outcomes: recorded, told in words, and gone past; nothing of them looks like a result."""

from contextlib import contextmanager
from math import inf, isfinite, nan

import pandas as pd
import pytest
import torch

import lib.train
from lib import checkpoint
from lib.runs import load_model, load_runs
from lib.stats import summary, unfinished
from lib.step import Learner, calibrate
from lib.sweep import sweep
from lib.train import resolve, train

HUGE = {"hidden_size": 2 * 10**12, "heads": 10**12}  # no machine has the memory for one layer of it
WILD = {"lr": 1e30, "min_lr": 1e30, "grad_clip": 0.0}


def quiet(line):
    pass


@pytest.fixture
def small(tiny):
    """Makes a configuration of ten quick updates."""
    return lambda **changes: tiny(**{"device_token_capacity": 384, "validation_tokens": 160} | changes)


@contextmanager
def change(name, update, how):
    """In this call of the learner's method, `how` acts on what it gives; warming up does not count."""
    method, warm_up, calls = getattr(Learner, name), Learner.warm_up, []

    def changed(learner, *arguments):
        calls.append(1)
        return how(learner, method, *arguments) if len(calls) == update else method(learner, *arguments)

    def uncounted(learner, rows):
        warm_up(learner, rows)
        calls.pop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, name, changed)
        if name == "accumulate":
            patch.setattr(Learner, "warm_up", uncounted)
        yield


def weights_of(found):
    return found.part("model")


def equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def finite(weights):
    return all(torch.isfinite(tensor).all() for tensor in weights.values())


def nan_loss(learner, accumulate, rows, *size):
    return accumulate(learner, rows, *size) * nan


def infinite_loss(learner, accumulate, rows, *size):
    return accumulate(learner, rows, *size) + inf


def nan_gradient(learner, accumulate, rows, *size):
    loss = accumulate(learner, rows, *size)
    next(learner.model.parameters()).grad[0, 0] = nan
    return loss


@pytest.mark.parametrize("how", [nan_loss, infinite_loss, nan_gradient])
@pytest.mark.parametrize("update", [1, 2, 5, 10])
def test_a_run_diverges_at_the_update_that_is_not_finite(small, contents, update, how):
    lines = []
    with change("accumulate", update, how):
        run = train(small(), progress=lines.append)
    assert (run.meta["status"], run.meta["diverged_at"]) == ("diverged", update)
    assert run.meta["stages"][-1]["ended"] == "diverged"
    assert run.meta["steps"] == len(run.metrics()) == update - 1
    assert run.meta["validation_loss"] is None
    assert sum(f"diverged at update {update}:" in line for line in lines) == 1
    # What was good is kept: the weights before that update.
    last = checkpoint.latest(run, quiet)
    assert (last and last.tokens) == (384 * (update - 1) or None)
    model = load_model(run).state_dict()
    assert finite(model)
    assert last is None or equal(weights_of(last), model)
    # It stands, although it would not diverge again.
    before, again = contents(run.path), []
    assert train(small(), progress=again.append).path == run.path
    assert again == [f"{run}: ended before, reused"]
    assert contents(run.path) == before


def test_the_last_good_checkpoint_is_that_of_the_undisturbed_run(small, tmp_path):
    straight = train(small(runs=str(tmp_path / "straight")), progress=quiet, keep=[384 * 4])
    with change("accumulate", 5, nan_gradient):
        run = train(small(), progress=quiet)
    assert equal(weights_of(checkpoint.latest(run, quiet)), weights_of(checkpoint.kept_at(straight, 384 * 4)))


@pytest.mark.parametrize("lr", [1e6, 1e30, 1e39])  # the last is infinite as a float32: one update breaks the weights
@pytest.mark.parametrize("every", [0, 384])
def test_no_checkpoint_of_a_diverging_run_holds_broken_weights(small, lr, every):
    config = small(lr=lr, min_lr=lr, grad_clip=0.0, warmup_fraction=0.0, checkpoint_every=every, token_budget=38_400)
    run = train(config, progress=quiet)
    assert run.meta["status"] == "diverged"
    for path in checkpoint.written(run):
        assert finite(weights_of(checkpoint.read(path)))


@pytest.mark.parametrize("skip", [False, True])
def test_weights_broken_by_the_last_update_are_no_result(small, skip):
    run = train(small(lr=1e39, min_lr=1e39, grad_clip=0.0, warmup_fraction=0.0, token_budget=384, skip_validation=skip),
                progress=quiet)
    assert (run.meta["status"], run.meta["diverged_at"]) == ("diverged", 1)
    assert run.meta["validation_loss"] is None


def test_a_validation_on_the_way_that_is_not_finite_is_recorded_as_none(small):
    def broken(learner, evaluate, *arguments):
        return nan, nan

    with change("evaluate", 2, broken):
        run = train(small(eval_every=1000), progress=quiet)
    losses = [check["loss"] for check in run.meta["periodic_validation_loss"]]
    assert [loss is None for loss in losses] == [False, True, False]
    assert run.meta["status"] == "finished"


def infinite_gradient(learner, clip):
    """Before it is unscaled, as fp16 overflows."""
    next(learner.model.parameters()).grad[0, 0] = inf
    return clip(learner)


def scaler_of(run, tokens):
    return checkpoint.kept_at(run, tokens).facts["scaler"]


def test_an_update_that_fp16_skips_counts_apart(small, tmp_path):
    plain = train(small(precision="fp16", runs=str(tmp_path / "plain")), progress=quiet)
    assert (plain.meta["steps"], plain.meta["skipped_steps"]) == (10, 0)
    assert plain.metrics().grad_norm.notna().all()
    lines = []
    with change("clip", 4, infinite_gradient):
        run = train(small(precision="fp16"), progress=lines.append, keep=[384 * n for n in (3, 4, 5)])
    meta, rows = run.meta, run.metrics()
    assert meta["status"] == "finished"
    assert (meta["steps"], meta["skipped_steps"]) == (9, 1)
    assert (meta["stages"][0]["updates"], meta["tokens"]) == (9, 3840)
    # Its tokens are read, and the rate stays the same function of them.
    assert rows.tokens.tolist() == [384 * n for n in range(1, 11)]
    assert rows.lr.tolist() == plain.metrics().lr.tolist()
    assert rows.grad_norm.isna().tolist() == [step == 4 for step in rows.step]
    assert '"grad_norm": null' in run.rows().decode().splitlines()[3]
    assert not rows.clipped[3]
    assert isfinite(rows.loss[3])
    # Nothing moved in it but the scale.
    before, at, after = (checkpoint.kept_at(run, 384 * n) for n in (3, 4, 5))
    assert equal(weights_of(before), weights_of(at))
    assert equal(before.part("optimizer"), at.part("optimizer"))
    assert not equal(weights_of(at), weights_of(after))
    assert (before.facts["scaler"]["_growth_tracker"], at.facts["scaler"]["_growth_tracker"]) == (3, 0)
    assert at.facts["scaler"]["scale"] == before.facts["scaler"]["scale"] / 2
    assert meta["sha256"] != plain.meta["sha256"]


def test_a_first_update_that_fp16_skips(small):
    with change("clip", 1, infinite_gradient):
        run = train(small(precision="fp16"), progress=quiet)
    assert run.meta["status"] == "finished"
    assert (run.meta["steps"], run.meta["skipped_steps"]) == (9, 1)
    assert run.metrics().grad_norm.isna().tolist() == [True] + [False] * 9


@pytest.mark.parametrize("stops", [(3,), (4,), (5,), (2, 2, 3)])
def test_fp16_goes_on_with_its_scale(small, tmp_path, ctrl_c, same_run, stops):
    """A stop before, in and after the update that is skipped."""
    config = small(precision="fp16", checkpoint_every=384)
    with change("clip", 4, infinite_gradient):
        straight = train(small(precision="fp16", checkpoint_every=384, runs=str(tmp_path / "straight")), progress=quiet)
    with change("clip", 4, infinite_gradient):
        for stop in stops:
            with ctrl_c(stop):
                train(config, progress=quiet)
        run = train(config, progress=quiet)
    assert len(run.meta["attempts"]) == 1 + len(stops)
    assert (run.meta["steps"], run.meta["skipped_steps"]) == (9, 1)
    same_run(run, straight)
    assert scaler_of(run, 3840) == scaler_of(straight, 3840)
    assert scaler_of(run, 3840)["scale"] == 2.0**15
    assert scaler_of(run, 3840)["_growth_tracker"] == 6


def test_without_fp16_no_update_is_skipped(small):
    with change("clip", 4, infinite_gradient):
        run = train(small(), progress=quiet)
    assert (run.meta["status"], run.meta["diverged_at"], run.meta["skipped_steps"]) == ("diverged", 4, 0)


def test_a_gradient_that_no_scale_makes_finite_is_diverged(small, monkeypatch):
    """The scale of 65,536 is halved down to 2^-10, and by then it is not the scale."""
    clip = Learner.clip
    monkeypatch.setattr(Learner, "clip", lambda learner: infinite_gradient(learner, clip))
    run = train(small(precision="fp16", token_budget=384 * 60), progress=quiet)
    assert (run.meta["status"], run.meta["diverged_at"]) == ("diverged", 27)
    assert (run.meta["steps"], run.meta["skipped_steps"]) == (0, 26)


def test_a_model_past_all_memory_is_an_outcome(small, capsys):
    run = train(small(**HUGE), progress=print)
    out, err = capsys.readouterr()
    assert run.meta["status"] == "out_of_memory"
    assert run.meta["device_token_capacity"] == 384
    assert (run.meta["steps"], run.meta["tokens"], run.meta["parameters"]) == (0, 0, None)
    assert out.splitlines()[-1] == "out of memory with device_token_capacity 384"
    assert "Traceback" not in out + err
    assert not run.ended


def test_a_model_past_all_memory_is_an_outcome_on_the_modelled_clock_too(small):
    """Where it is already the calibration that fails."""
    run = train(small(**HUGE, time_budget=1.0, token_budget=None, clock="modelled"), progress=quiet)
    assert run.meta["status"] == "out_of_memory"
    assert run.meta["device_token_capacity"] == 384


def no_memory(learner, accumulate, *arguments):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_memory_that_ends_on_the_way_is_an_outcome_and_tried_again(small, tmp_path, capsys, same_run):
    straight = train(small(runs=str(tmp_path / "straight")), progress=quiet)
    with change("accumulate", 3, no_memory):
        run = train(small(), progress=print)
    out, err = capsys.readouterr()
    assert (run.meta["status"], run.meta["device_token_capacity"]) == ("out_of_memory", 384)
    assert run.meta["steps"] == len(run.metrics()) == 2
    assert run.meta["stages"][-1]["ended"] == "out of memory"
    assert run.meta["validation_loss"] is None
    assert "out of memory with device_token_capacity 384" in out
    assert "Traceback" not in out + err
    train(small(), progress=quiet)
    assert [attempt["after"] for attempt in run.meta["attempts"]][-1] == 0
    same_run(run, straight)
    assert "error" not in run.meta


def test_memory_that_ended_is_tried_again_from_the_last_checkpoint(small, tmp_path, same_run):
    straight = train(small(runs=str(tmp_path / "straight")), progress=quiet)
    with change("accumulate", 9, no_memory):
        run = train(small(checkpoint_every=1000), progress=quiet)
    assert run.meta["status"] == "out_of_memory"
    train(small(checkpoint_every=1000), progress=quiet)
    assert [attempt["after"] for attempt in run.meta["attempts"]] == [0, 8]
    same_run(run, straight)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_memory_of_the_machine_counts_as_memory(small, error):
    def fail(*arguments):
        raise error

    with change("accumulate", 2, fail):
        assert train(small(), progress=quiet).meta["status"] == "out_of_memory"


def test_memory_that_ends_in_the_first_validation_is_an_outcome(small):
    with change("evaluate", 1, no_memory):
        run = train(small(eval_every=384), progress=quiet)
    assert (run.meta["status"], run.meta["steps"]) == ("out_of_memory", 1)


def test_memory_that_is_short_when_a_run_goes_on_loses_no_counts(small, ctrl_c):
    with ctrl_c(5):
        train(small(), progress=quiet)
    run = resolve(small()).run
    stopped = run.meta
    with change("__init__", 1, no_memory):
        train(small(), progress=quiet)
    assert run.meta["status"] == "out_of_memory"
    assert len(run.metrics()) == 5
    for name in ("steps", "tokens", "train_loss", "started"):
        assert run.meta[name] == stopped[name], name
    assert run.meta["elapsed_seconds"] == pytest.approx(stopped["elapsed_seconds"], abs=0.1)


@pytest.mark.parametrize("budget", [{}, {"time_budget": 0.05, "token_budget": None}])
def test_a_first_update_of_any_length_is_no_failure(small, monkeypatch, budget):
    """Every update is as long as that which says how far the run has come: the clock starts after the first."""
    monkeypatch.setattr(lib.train, "PROGRESS_SECONDS", 0)
    lines = []
    run = train(small(**budget), progress=lines.append)
    assert run.meta["status"] == "finished"
    assert sum("tokens/s" in line for line in lines) >= run.meta["steps"] - 1 > 0


def test_a_stream_that_is_used_up_is_an_outcome(small, stream):
    config = small(token_budget=10**6, tokens_per_step=15_360, device_token_capacity=15_360)
    run = train(config, progress=quiet)
    assert (run.meta["status"], run.meta["stages"][-1]["ended"]) == ("stream_exhausted", "stream exhausted")
    assert isfinite(run.meta["validation_loss"])
    lines = []
    train(config, progress=lines.append)
    assert lines == [f"{run}: ended before, reused"]


def test_a_sweep_goes_past_bad_outcomes_and_counts_them(small, capsys):
    configs = [small(**HUGE), small(**WILD), small(),
               small(token_budget=10**6, tokens_per_step=15_360, device_token_capacity=15_360), small(seed=1)]
    runs = sweep(configs, "all kinds")
    statuses = ["out_of_memory", "diverged", "finished", "stream_exhausted", "finished"]
    assert [run.meta["status"] for run in runs] == statuses
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert out.splitlines()[-1].startswith("all kinds: 5 done, 5 trained now")

    table, updates = load_runs(small().runs)
    found = table.set_index("run").status
    assert [found[run.name] for run in runs] == statuses
    assert unfinished(table).split(", ") == [
        words for status in table.status if (words := {"diverged": "1 diverged", "out_of_memory": "1 out of memory",
                                                       "stream_exhausted": "1 stream exhausted"}.get(status))]
    groups = summary(table).set_index(["arm", "lr"])
    assert groups.loc[("constant 384", 0.01), ["n", "unfinished"]].tolist() == [2, "1 out of memory"]
    assert groups.loc[("constant 384", 1e30), ["n", "unfinished"]].tolist() == [0, "1 diverged"]
    assert groups.loc[("constant 15,360", 0.01), ["n", "unfinished"]].tolist() == [0, "1 stream exhausted"]
    assert pd.isna(groups.loc[("constant 384", 1e30), "validation_loss"])
    means = table[(table.status == "finished")].validation_loss
    assert groups.loc[("constant 384", 0.01), "validation_loss"] == means.mean()
    assert set(updates.run) == {run.name for run in runs[1:]}  # the first made none

    # Asked for again, outcomes stand; what ran out of memory is tried again.
    ended = [run.meta["ended"] for run in runs]
    assert [run.path for run in sweep(configs, "all kinds")] == [run.path for run in runs]
    assert "5 runs, 4 of them reused" in capsys.readouterr().out
    assert [run.meta["ended"] for run in runs][1:] == ended[1:]


def test_a_sweep_goes_past_a_calibration_that_runs_out_of_memory(small, costs, monkeypatch):
    monkeypatch.setattr(lib.train, "calibrate", lambda config, vocab_size: (
        calibrate(config, vocab_size) if config.hidden_size == HUGE["hidden_size"] else costs))
    timed = {"time_budget": 0.1, "token_budget": None, "clock": "modelled"}
    runs = sweep([small(**timed), small(**HUGE, **timed), small(**timed, seed=1)], "timed")
    assert [run.meta["status"] for run in runs] == ["finished", "out_of_memory", "finished"]


def test_what_a_diverged_run_leaves_its_followers(small, capsys):
    """A run with the same past as one that diverged before they part is trained on its own."""
    late = {"schedule": "late_switch", "small_tokens_per_step": 384, "tokens_per_step": 768}
    configs = [small(**late, switch_at=0.8), small(**late, switch_at=0.6)]
    with change("accumulate", 3, nan_gradient):
        runs = sweep(configs, "late")
    assert "└─ at 2,304: " in capsys.readouterr().out
    assert [run.meta["status"] for run in runs] == ["diverged", "finished"]
    assert runs[1].meta["past"] is None
    assert len(runs[1].metrics()) == runs[1].meta["steps"]
