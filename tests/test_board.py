"""What TensorBoard reads of a run is what the run logged, however often it was stopped."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from lib.plan import common_past
from lib.train import resolve, train

CURVES = ("tokens_per_step", "lr", "loss", "grad_norm", "noise_g2", "noise_s", "tokens_per_second")
ON = {"tensorboard": True, "validation_tokens": 160}


def quiet(line):
    pass


def files(run):
    return [*(run.path / "tensorboard").iterdir()]


def read(run):
    """Curves by name, each as steps and values, and the seconds of each from the first."""
    events = EventAccumulator(str(run.path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {name: events.Scalars(name) for name in events.Tags()["scalars"]}


def pairs(events):
    return [(event.step, event.value) for event in events]


def logged(run):
    """The same, of metrics.jsonl and run_meta.json, as TensorBoard's float32."""
    curves = {f"train/{name}": [(row["tokens"], np.float32(row[name])) for row in run.metrics().to_dict("records")
                                if row[name] is not None and row[name] == row[name]] for name in CURVES}
    last = {"tokens": run.meta["tokens"], "loss": run.meta["validation_loss"],
            "bits_per_byte": run.meta["validation_bits_per_byte"]}
    checks = run.meta["periodic_validation_loss"] + [last]
    for name in ("loss", "bits_per_byte"):  # a check at the end and the final one are the same
        curves[f"validation/{name}"] = sorted({(check["tokens"], np.float32(check[name])) for check in checks})
    return {name: curve for name, curve in curves.items() if curve}


def holds_what_was_logged(run):
    curves = read(run)
    assert {name: pairs(events) for name, events in curves.items()} == logged(run)
    seconds = np.array([event.wall_time for event in curves["train/loss"]])
    assert seconds - seconds[0] == pytest.approx(run.metrics().elapsed, abs=1e-5)
    file, = files(run)  # so that a reader that knows of no restarts sees each update once as well
    raw = [event.step for event in EventFileLoader(str(file)).Load()
           if event.summary.value and event.summary.value[0].tag == "train/loss"]
    assert raw == run.metrics().tokens.tolist()
    return curves


def test_an_undisturbed_run(tiny, costs):
    """A check falls on the last update; the single micro-batches of the small T have no noise estimate."""
    config = tiny(**ON, eval_every=960, schedule="stages", stages=[[0, 32], [384, 384]])
    run = train(config, quiet)
    curves = holds_what_was_logged(run)
    assert len(curves["train/loss"]) > len(curves["train/noise_s"]) > 0
    assert len(curves["validation/loss"]) == len(run.meta["periodic_validation_loss"]) > 1
    timed = train(replace(config, token_budget=None, time_budget=0.5, clock="modelled", stages=[[0, 32]]), quiet)
    assert "train/noise_s" not in holds_what_was_logged(timed)


def test_a_stopped_run_logs_no_update_twice_and_misses_none(tiny, tmp_path, ctrl_c, same_run):
    """Three attempts; the power may have cut off what the first wrote to its events, which lag behind checkpoints."""
    config = tiny(**ON, eval_every=500, checkpoint_every=1152)
    with ctrl_c(4):
        train(config, quiet)
    run = resolve(config).run
    file, = files(run)
    file.write_bytes(file.read_bytes()[:file.stat().st_size // 2])
    with ctrl_c(3):
        train(config, quiet)
    assert [event.step for event in read(run)["train/loss"]] == run.metrics().tokens.tolist()
    assert len(run.metrics()) == 7
    train(config, quiet)
    assert [attempt["after"] for attempt in run.meta["attempts"]] == [0, 4, 7]
    holds_what_was_logged(run)
    same_run(run, train(replace(config, tensorboard=False, runs=str(tmp_path / "plain")), quiet))


def test_updates_past_the_last_checkpoint_are_those_made_again(tiny, ctrl_c):
    """As after a kill: the checkpoint of the stop is gone, the events are further than the one before it."""
    config = tiny(**ON, checkpoint_every=1152)
    with ctrl_c(5):
        train(config, quiet)
    run = resolve(config).run
    max((run.path / "checkpoints").glob("*.safetensors")).unlink()
    assert len(read(run)["train/loss"]) == 5
    train(config, quiet)
    assert [attempt["after"] for attempt in run.meta["attempts"]] == [0, 3]
    holds_what_was_logged(run)


def test_what_is_taken_over_is_on_the_board_and_a_users_files_stay(tiny):
    """A run with the past of another, and a branch; that of the parent is off."""
    parent = train(tiny(validation_tokens=160), quiet, keep=[1152])
    other = tiny(**ON, lr=0.02, branch_from=parent.name, branch_at=1152)
    mine = resolve(other).run.path / "tensorboard" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.touch()
    branch = train(other, quiet)
    assert not (parent.path / "tensorboard").exists()
    mine.unlink()
    assert holds_what_was_logged(branch)["train/loss"][0].step == 384


def test_it_decides_nothing(tiny):
    on, off = tiny(**ON), tiny(validation_tokens=160)
    assert resolve(on).run.path == resolve(off).run.path
    for schedule in ({}, {"schedule": "adaptive", "max_tokens_per_step": 768}):
        assert common_past(*(replace(config, **schedule) for config in (on, off)), None) == 3840
    run = train(off, quiet)
    assert not (run.path / "tensorboard").exists()
    lines = []
    assert train(on, lines.append).path == run.path
    assert lines == [f"{run}: ended before, reused"]


def test_without_the_package_it_is_bad_input(tiny, launch, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # what cannot be imported
    config = tiny(**ON)
    assert launch(config) == (2, "error: tensorboard = True: needs the package; "
                                 "install it with pip install -e '.[tensorboard]'\n")
    assert not Path(config.runs).exists()
    assert launch(replace(config, tensorboard=False))[0] == 0
