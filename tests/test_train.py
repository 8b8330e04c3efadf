"""The rules of a run, each on a real run of a tiny model."""

import subprocess
import sys
from dataclasses import asdict, replace
from math import ceil, log
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lib.check import BadInput
from lib.runs import Run, load_model, load_runs, weights_sha256
from lib.step import Learner
from lib.stream import PackedStream
from lib.train import train

THREE = {"schedule": "dividers", "batch_dividers": [12, 4, 1], "stage_length": [1 / 3, 1 / 3]}


def quiet(line):
    pass


def test_a_run_directory_is_whole(tiny, stream):
    run = train(tiny(eval_every=1000), progress=quiet)
    meta, rows = run.meta, run.metrics()
    assert {path.name for path in run.path.iterdir()} == {"config.json", "run_meta.json", "run.log", "metrics.jsonl",
                                                          "model"}
    assert {path.name for path in (run.path / "model").iterdir()} == {"model.safetensors", "config.json",
                                                                      "tokenizer.json"}
    assert meta["status"] == "finished"
    assert meta["steps"] == len(rows) == 10
    assert meta["tokens"] == rows.tokens.iloc[-1] == 3840
    assert (meta["measured_steps"], meta["measured_tokens"]) == (9, 3840 - 384)
    assert meta["effective_batch_size"] == 24
    assert meta["device_batch_size"] == 2
    assert meta["accumulation_steps"] == 12
    assert meta["stream"]["range"] == [0, 3840]
    assert meta["stream"]["sha256"] == PackedStream(stream, 16).sha256
    assert [check["tokens"] for check in meta["periodic_validation_loss"]] == [1152, 2304, 3072]
    assert 0 < meta["validation_loss"] < log(400) + 0.5
    assert meta["train_loss"] == rows.loss.iloc[-1]  # one update holds the last 5 %
    assert meta["sha256"] == weights_sha256(load_model(run).state_dict())
    assert meta["environment"]["torch"] == torch.__version__
    assert "validation loss" in (run.path / "run.log").read_text()


def test_the_validation_loss_is_that_of_the_saved_model(tiny, stream):
    run = train(tiny(), progress=quiet)
    packed = PackedStream(stream, 16)
    learner = Learner(tiny(), packed.vocab_size)
    learner.model.load_state_dict(load_model(run).state_dict())
    assert learner.evaluate(packed, None) == (run.meta["validation_loss"], run.meta["validation_bits_per_byte"])


def test_training_learns(tiny):
    run = train(tiny(token_budget=19_200, tokens_per_step=128), progress=quiet)
    assert run.meta["validation_loss"] < run.metrics().loss.iloc[0] - 0.5


def test_the_same_configuration_gives_the_same_weights(tiny, tmp_path):
    first = train(tiny(**THREE), progress=quiet)
    again = train(tiny(**THREE, runs=str(tmp_path / "elsewhere")), progress=quiet)
    assert first.path != again.path
    assert first.name == again.name
    assert first.meta["sha256"] == again.meta["sha256"]
    assert train(tiny(**THREE, seed=1), progress=quiet).meta["sha256"] != first.meta["sha256"]


def test_a_finished_run_is_returned_untouched(tiny):
    run = train(tiny(), progress=quiet)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    lines = []
    assert train(tiny(), progress=lines.append).path == run.path
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
    assert lines == [f"{run}: ended before, reused"]


def test_the_micro_batch_changes_nothing(tiny):
    whole, split = train(tiny(), progress=quiet), train(tiny(device_token_capacity=384), progress=quiet)
    assert whole.metrics().loss.to_numpy() == pytest.approx(split.metrics().loss.to_numpy(), rel=1e-4)


@pytest.mark.parametrize("setting", ["skip_gc", "activation_checkpointing"])
def test_a_setting_of_speed_or_memory_leaves_the_run_as_it_is(tiny, setting):
    run = train(tiny(**{setting: True}), progress=quiet)
    assert setting in run.path.joinpath("config.json").read_text()
    assert run.meta["sha256"] == train(tiny(), progress=quiet).meta["sha256"]


def test_arms_of_a_seed_read_the_same_tokens_and_start_alike(tiny, monkeypatch):
    seen, first, accumulate = [], [], Learner.accumulate

    def watch(learner, rows, *size):
        if not seen[-1]:
            first.append(learner.model.embed_in.weight.detach().clone())
        seen[-1].extend(rows.flatten().tolist())
        return accumulate(learner, rows, *size)

    monkeypatch.setattr(Learner, "accumulate", watch)
    for arm in ({}, THREE, {"tokens_per_step": 96}, {"data_seed": 7}, {"seed": 7, "data_seed": 0}):
        seen.append([])
        train(tiny(**arm, skip_validation=True, token_budget=3456), progress=quiet)
    constant, scheduled, small, other_order, other_weights = seen
    assert scheduled == constant[:len(scheduled)]
    assert small == constant == other_weights
    assert sorted(other_order) != other_order != constant
    assert all(torch.equal(weights, first[0]) for weights in first[1:4])
    assert not torch.equal(first[4], first[0])


def test_settings_reach_the_run(tiny, stream):
    """Each changes what it says: validation tokens, precision and clipping."""
    packed = PackedStream(stream, 16)
    run = train(tiny(validation_tokens=160), progress=quiet)
    learner = Learner(tiny(), packed.vocab_size)
    learner.model.load_state_dict(load_model(run).state_dict())
    assert run.meta["validation_loss"] == learner.evaluate(packed, 160)[0] != learner.evaluate(packed, None)[0]
    rounded = train(tiny(precision="bf16", validation_tokens=160), progress=quiet)
    assert 0 < abs(rounded.meta["validation_loss"] - run.meta["validation_loss"]) < 0.05
    clipped = train(tiny(grad_clip=0.01, validation_tokens=160), progress=quiet)
    assert clipped.meta["clipped_share"] == 1 == clipped.metrics().clipped.mean()
    assert train(tiny(grad_clip=0.0, validation_tokens=160), progress=quiet).meta["clipped_share"] == 0


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_tokens_and_rates_under_random_schedules(tiny, tmp_path_factory, data):
    count = data.draw(st.integers(1, 4))
    wanted = data.draw(st.lists(st.integers(1, 14), min_size=count, max_size=count))
    parts = data.draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
    config = tiny(schedule="dividers", batch_dividers=wanted, stage_length=[p / sum(parts) for p in parts[:-1]],
                  token_budget=data.draw(st.integers(500, 6000)), scaling_rule="none", min_lr=0.001,
                  warmup_fraction=data.draw(st.sampled_from([0.0, 0.3])), skip_validation=True,
                  runs=str(tmp_path_factory.mktemp("runs")))
    run = train(config, progress=quiet)
    meta, rows = run.meta, run.metrics()
    # Never overshot, and another update of the last stage would have been.
    assert meta["tokens"] <= config.token_budget
    position = meta["tokens"] / config.token_budget
    size = [stage for stage in config.resolved() if stage.start <= position][-1].tokens_per_step
    assert meta["tokens"] + size > config.token_budget
    # Read without gap or overlap.
    assert rows.tokens.tolist() == rows.tokens_per_step.cumsum().tolist()
    # The rate is one function of tokens for every schedule, and ends at its floor.
    first = config.resolved()[0]
    assert rows.lr.tolist() == [config.learning_rate(t / config.token_budget, first) for t in rows.tokens]
    if meta["tokens"] == config.token_budget:
        assert rows.lr.iloc[-1] == config.min_lr
    # Stages change between updates, as soon as their start is reached, and are recorded as they went.
    for row in rows.itertuples():
        before = (row.tokens - row.tokens_per_step) / config.token_budget
        assert row.stage == max(i for i, stage in enumerate(config.resolved()) if stage.start <= before)
    used = rows.groupby("stage").tokens.agg(["max", "size"])
    assert len(meta["stages"]) == count
    for i, stage in enumerate(meta["stages"]):
        if i in used.index:
            assert (stage["end_tokens"], stage["updates"]) == tuple(used.loc[i])
            assert stage["ended"] == ("budget" if i == used.index.max() else "boundary")
        else:
            assert stage["updates"] == 0
            assert stage["ended"] in ("passed", "not reached")


def test_multipliers_of_the_stages_reach_the_optimizer(tiny):
    run = train(tiny(**THREE, lr_schedule="constant", warmup_fraction=0.0, token_budget=11_520), progress=quiet)
    rates = run.metrics().groupby("stage").lr.unique()
    assert [rate.tolist() for rate in rates] == [[pytest.approx(0.01 / d**0.5)] for d in (12, 4, 1)]
    assert [s["divider"] for s in run.meta["stages"]] == [12, 4, 1]
    assert [s["resolved_lr_multiplier"] for s in run.meta["stages"]] == pytest.approx([12**-0.5, 0.5, 1])


def test_a_modelled_time_budget_ends_with_the_first_update_past_it(tiny, costs):
    run = train(tiny(time_budget=1.0, clock="modelled", tokens_per_step=128), progress=quiet)
    meta, rows = run.meta, run.metrics()
    an_update = 4 * costs.micro_batch_seconds + costs.update_seconds
    assert meta["measured_steps"] == ceil(1.0 / an_update)
    assert meta["steps"] == meta["measured_steps"] + 1  # the warm-up update
    assert rows.elapsed.iloc[0] == 0
    assert rows.elapsed.iloc[-2] < 1.0 <= rows.elapsed.iloc[-1]
    assert meta["overshoot_seconds"] == pytest.approx(meta["measured_steps"] * an_update - 1.0)
    assert meta["budget"] == {"kind": "seconds", "value": 1.0, "clock": "modelled"}


def test_rates_of_a_time_budget_are_those_of_the_updates_ends(tiny, costs):
    config = tiny(time_budget=1.0, clock="modelled", tokens_per_step=128, min_lr=0.001, warmup_fraction=0.2)
    rows = train(config, progress=quiet).metrics()
    stage = config.resolved()[0]
    assert rows.lr[1:].tolist() == pytest.approx([config.learning_rate(at, stage) for at in rows.elapsed[1:]])
    assert rows.lr[0] == rows.lr[1] > 0  # the warm-up update, before the clock starts
    assert rows.lr.iloc[-1] == 0.001


def test_stages_of_a_time_budget_follow_the_clock(tiny, costs):
    run = train(tiny(time_budget=1.2, clock="modelled", **THREE), progress=quiet)
    rows = run.metrics()
    for boundary, stage in ((0.4, 1), (0.8, 2)):
        first = rows.index[rows.stage == stage][0]
        assert rows.elapsed[first - 1] >= boundary > rows.elapsed[first - 2]
    assert [s["ended"] for s in run.meta["stages"]] == ["boundary", "boundary", "budget"]
    assert run.meta["stages"][1]["start_seconds"] == rows[rows.stage == 0].elapsed.iloc[-1]


def test_a_measured_time_budget(tiny, seconds):
    run = train(tiny(time_budget=0.3, tokens_per_step=32), progress=quiet)
    meta, rows = run.meta, run.metrics()
    assert meta["status"] == "finished"
    assert rows.elapsed.iloc[-2] < 0.3 <= rows.elapsed.iloc[-1] + 0.002  # the clock is looked at again after the row
    assert meta["elapsed_seconds"] == meta["measured_elapsed_seconds"] == pytest.approx(0.3, abs=0.02)
    assert meta["overshoot_seconds"] == pytest.approx(meta["elapsed_seconds"] - 0.3)
    assert meta["tokens_per_second"] == pytest.approx(meta["measured_tokens"] / meta["elapsed_seconds"])


def test_initialisation_warm_up_and_validation_are_outside_the_clock(tiny, seconds, monkeypatch):
    evaluate, build, accumulate, first = Learner.evaluate, Learner.__init__, Learner.accumulate, [50.0]

    def slow_evaluate(*arguments):
        seconds[0] += 100
        return evaluate(*arguments)

    def slow_build(*arguments):
        seconds[0] += 200
        build(*arguments)

    def slow_first(*arguments):
        seconds[0] += first.pop() if first else 0
        return accumulate(*arguments)

    monkeypatch.setattr(Learner, "evaluate", slow_evaluate)
    monkeypatch.setattr(Learner, "__init__", slow_build)
    monkeypatch.setattr(Learner, "accumulate", slow_first)
    meta = train(tiny(time_budget=0.1, tokens_per_step=64, eval_every=64), progress=quiet).meta
    assert meta["elapsed_seconds"] < 1
    assert meta["warmup_elapsed_seconds"] > 50
    assert meta["steps"] > 3
    # The validation after the warm-up update comes before the clock starts; the final one after it has stopped.
    assert meta["paused_seconds"] == pytest.approx(100 * (meta["steps"] - 1), abs=2)


def test_skipping_validation(tiny):
    meta = train(tiny(skip_validation=True, eval_every=500), progress=quiet).meta
    assert meta["skip_validation"] is True
    assert meta["validation_loss"] is None
    assert meta["periodic_validation_loss"] == []


def test_an_exhausted_stream_ends_the_run_and_says_so(tiny, stream):
    lines, held = [], PackedStream(stream, 16).tokens
    run = train(tiny(token_budget=10**9, tokens_per_step=16_384, device_token_capacity=16_384), progress=lines.append)
    assert run.meta["status"] == "stream_exhausted"
    assert run.meta["stages"][0]["ended"] == "stream exhausted"
    assert run.meta["tokens"] == held // 16_384 * 16_384
    assert any("used up" in line for line in lines)
    more = train(tiny(token_budget=2 * held, epochs=3, tokens_per_step=16_384, device_token_capacity=16_384),
                 progress=quiet)
    assert more.meta["status"] == "finished"


def test_a_diverged_run_is_an_outcome(tiny):
    run = train(tiny(lr=1e30, min_lr=1e30, grad_clip=0.0), progress=quiet)
    assert run.meta["status"] == "diverged"
    assert run.meta["validation_loss"] is None
    assert run.meta["steps"] < 10
    assert run.ended


def test_weights_broken_by_the_last_update_are_diverged_too(tiny):
    run = train(tiny(lr=1e30, min_lr=1e30, grad_clip=0.0, warmup_fraction=0.0, token_budget=384), progress=quiet)
    assert run.meta["steps"] == 1
    assert run.meta["status"] == "diverged"
    assert run.meta["validation_loss"] is None


def test_warnings_and_tracebacks_reach_the_log(tiny, monkeypatch):
    import warnings

    def fail(*arguments):
        warnings.warn("a warning to keep", stacklevel=1)
        raise RuntimeError("a failure to keep")

    monkeypatch.setattr(Learner, "apply", fail)
    with pytest.raises(RuntimeError, match="a failure"):
        train(tiny(), progress=quiet)
    runs, _ = load_runs(tiny().runs)
    assert runs.status.tolist() == ["failed"]
    log_text = (Run(Path(tiny().runs) / runs.run[0]).path / "run.log").read_text()
    assert "a warning to keep" in log_text
    assert "Traceback" in log_text
    assert "a failure to keep" in log_text


def test_loading_many_runs(tiny):
    made = [train(tiny(seed=seed, **arm), progress=quiet) for seed in (0, 1) for arm in ({}, THREE)]
    runs, updates = load_runs(tiny().runs)
    assert sorted(runs.run) == sorted(run.name for run in made)
    assert set(runs.arm) == {"constant 384", "dividers 12,4,1 of 384"}
    assert runs.setting.nunique() == 1
    train(tiny(seed=0, beta2=0.9), progress=quiet)
    again, _ = load_runs(tiny().runs)
    assert (len(again), again.setting.nunique()) == (5, 2)
    assert len(updates) == runs.steps.sum()
    assert updates.groupby("run").tokens.max().to_dict() == dict(zip(runs.run, runs.tokens, strict=True))
    assert runs.seed.tolist() == runs.data_seed.tolist()


BAD = {
    "tokens_per_step not a multiple": ({"tokens_per_step": 100}, "tokens_per_step = 100: must be a multiple"),
    "both budgets": ({"time_budget": 3}, "token_budget, time_budget = (3840, 3.0): set exactly one"),
    "no budget": ({"token_budget": None}, "token_budget, time_budget = (None, None): set exactly one"),
    "lengths that do not match": ({"schedule": "dividers", "batch_dividers": [4, 1]}, "stage_length = []: must give 1"),
    "missing stream": ({"stream": "nowhere"}, "stream = "),
    "NaN lr": ({"lr": float("nan")}, "lr = nan: must be a finite number"),
    "text for a number": ({"lr": "6e-4"}, "lr = '6e-4': must be a number; YAML reads 6e-4 as text"),
    "negative budget": ({"token_budget": -5}, "token_budget = -5: must be positive"),
    "capacity below a row": ({"device_token_capacity": 8}, "device_token_capacity = 8: must hold at least one row"),
    "unknown name": ({"tokens_per_stp": 3}, "tokens_per_stp = 3: is not a parameter of RunConfig; did you mean"),
    "unknown device": ({"device": "abacus"}, "device = 'abacus': must be auto, cpu"),
    "a device that is not here": ({"device": "cuda:77"}, "device = 'cuda:77': is not available here"),
    "dividers of a constant": ({"batch_dividers": [2]}, "batch_dividers = [2.0]: belongs to schedule dividers"),
    "past any float": ({"lr": 10**400}, "lr = 1000"),
    "a seed past 64 bits": ({"seed": 2**64}, "seed = 18446744073709551616: must be below 2^63"),
    "nobody's home": ({"stream": "~nobody-of-that-name/x"}, "stream = '~nobody-of-that-name/x': must be a usable path"),
    "a name too long": ({"runs": "x" * 300}, "runs = 'xxx"),
    "a NUL in a name": ({"runs": "a\0b"}, "runs = 'a\\x00b': must be a usable path"),
    "no name": ({"runs": ""}, "runs = '': must not be empty"),
    "a file for a folder": ({"runs": "README.md/x"}, "runs = "),
    "a file for a folder, on the modelled clock": ({"runs": "README.md/x", "token_budget": None, "time_budget": 1.0,
                                                    "clock": "modelled"}, "runs = "),
    "too many validation tokens": ({"validation_tokens": 10**9}, "validation_tokens = 1000000000: must not exceed"),
    "a budget below one update": ({"token_budget": 100}, "token_budget = 100: must hold at least one update"),
    "an update past the stream": ({"token_budget": 10**10, "tokens_per_step": 10**8 * 32}, "stream = "),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_with_status_2_and_nothing_written(name, tiny, refused):
    change, said = BAD[name]
    assert refused(asdict(tiny()) | change).startswith(f"error: {said}")


def test_the_command_line_trains_and_prints_the_directory_last(tiny, stream, tmp_path):
    file = tmp_path / "arm.yaml"
    file.write_text(f"stream: {stream}\nruns: {tmp_path / 'runs'}\nseq_len: 16\nhidden_size: 16\nlayers: 1\nheads: 2\n"
                    "mlp_size: 32\ntokens_per_step: 64\ndevice_token_capacity: 32\n")
    command = [sys.executable, "-m", "lib.train", str(file), "token_budget=640"]
    first = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    run = Run(Path(first.stdout.splitlines()[-1]))
    assert run.meta["steps"] == 10
    other = subprocess.run([*command, f"runs={tmp_path / 'other'}"], capture_output=True, text=True, check=True)
    assert Run(Path(other.stdout.splitlines()[-1])).meta["sha256"] == run.meta["sha256"]
    bad = subprocess.run([*command, "lr=-1"], capture_output=True, text=True, check=False)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr == "error: lr = -1.0: must be positive\n"


def test_names_are_hashes_of_what_decides(tiny, tmp_path):
    facts = {"stream": "abc"}
    name = Run.of(tiny(), facts).name
    assert Run.of(tiny(runs=str(tmp_path / "x")), facts).name == name
    assert Run.of(tiny(), {"stream": "abd"}).name != name
    for change in ({"lr": 0.011}, {"seed": 1}, {"precision": "bf16"}, {"token_budget": 3841}, {"beta2": 0.96}):
        assert Run.of(replace(tiny(), **change), facts).name != name


def test_both_budgets_raise_where_the_configuration_is_built(tiny):
    with pytest.raises(BadInput, match="set exactly one"):
        tiny(time_budget=1.0, token_budget=5000)
