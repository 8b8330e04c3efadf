"""A run as it is trained, by this process or another: read while it is written, and stopped."""

import json
import os
from contextlib import contextmanager

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

from lib import live
from lib.check import BadInput
from lib.interrupt import stop
from lib.live import Log, draw, look, noise_scales, runs_begun, status_of, watch
from lib.runs import Run
from lib.train import resolve, train


def quiet(line):
    pass


@pytest.fixture
def begun(tiny):
    """A run's directory as training makes it, held, with rows added as the test says."""

    @contextmanager
    def make(**changes):
        config = tiny(**changes)
        run = Run.of(config, {})
        with run.hold(quiet):
            run.open(config, b"")
            yield run
            run.close({"status": "interrupted"})

    return make


def row(step, size=384, seconds=0.5, g2=None, s=None, elapsed=None):
    return {"step": step, "tokens": step * size, "elapsed": (step - 1) * seconds if elapsed is None else elapsed,
            "stage": 0, "tokens_per_step": size, "lr": 0.01, "loss": 5 - step / 100, "grad_norm": 1.0, "clipped": False,
            "noise_g2": g2, "noise_s": s, "tokens_per_second": size / seconds}


def test_a_line_half_written_is_read_when_it_is_whole(begun):
    with begun() as run:
        log = Log(run)
        assert log.read().empty
        run.record(row(1))
        assert log.read().step.tolist() == [1]
        text = json.dumps(row(2)).encode() + b"\n"
        with open(run.path / "metrics.jsonl", "ab") as file:
            file.write(text[:40])
            file.flush()
            assert log.read().step.tolist() == [1]
            file.write(text[40:])
        assert log.read().step.tolist() == [1, 2]
        assert log.read() is log.read()  # nothing new, nothing made anew
        assert log.read().equals(run.metrics())


def test_a_run_that_goes_on_from_a_checkpoint_is_read_anew(begun):
    with begun() as run:
        log = Log(run)
        for step in (1, 2, 3):
            run.record(row(step))
        assert len(log.read()) == 3
        run.close({})
        run.open(run.config, json.dumps(row(1)).encode() + b"\n")
        for step in (2, 3, 4):
            run.record(row(step, seconds=1.0))
        assert log.read().step.tolist() == [1, 2, 3, 4]
        assert log.read().equals(run.metrics())


def test_the_status_is_what_the_directory_says(tiny, begun):
    with begun() as run:
        run.record(row(1))
        assert status_of(run) == look(Log(run)).status == "training"
    assert status_of(run) == "interrupted"
    (run.path / "run_meta.json").unlink()
    assert status_of(run) == "killed"
    assert status_of(train(tiny(), quiet)) == "finished"


@pytest.mark.parametrize("changes", [{"token_budget": 384 * 100}, {"time_budget": 50.0}])
def test_numbers_over_the_last_updates(begun, changes):
    """Half of the budget; the last updates take twice as long as the first ones did."""
    with begun(**changes) as run:
        slow = {"seconds": 1.0, "g2": 2.0, "s": 600.0}
        for step in range(1, 51):
            run.record(row(step, elapsed=step / 2, **(slow if step > 30 else {"seconds": 0.5, "g2": -1.0, "s": 0.0})))
        view = look(Log(run))
        assert view.done == pytest.approx(0.5)
        assert view.tokens_per_second == pytest.approx(384)
        assert view.seconds_left == pytest.approx(50.0)
        assert view.noise_scale == pytest.approx(300)
        assert view.line == ("training · 50% · update 50 · 19,200 tokens · loss 4.500 · T 384 · lr 0.01 · noise scale "
                             "300 tokens · 384 tokens/s · 50 s left")
        scales = noise_scales(view.updates)
        assert scales[:29].isna().all()
        assert scales.iloc[-1] == pytest.approx(300)
    assert "left" not in look(Log(run)).line


def test_a_figure_at_every_moment(begun):
    with begun(tokens_per_step=64) as run:
        log = Log(run)
        figure = draw(look(log))
        assert [text.get_text() for text in figure.axes[0].texts] == ["no update yet"]
        for step in range(1, 60):
            run.record(row(step, 64, g2=1.0 if step % 2 else None, s=500.0 if step % 2 else None))
            if step in (1, 2, 59):
                figure = draw(look(log))
                figure.draw_without_rendering()
        loss, size, rate, speed = figure.axes
        assert [line.get_ydata()[-1] for line in (loss.lines[0], size.lines[0], rate.lines[0], speed.lines[0])] == [
            pytest.approx(value) for value in (5 - 0.59, 64, 0.01, 128)]
        assert size.lines[1].get_ydata()[-1] == pytest.approx(500)
        assert figure.get_suptitle() == "constant 64 · lr 0.01 · seed 0: training"


def test_the_run_that_was_logged_to_last_comes_first(tiny):
    runs = [train(tiny(seed=seed), quiet) for seed in (0, 1, 2)]
    for age, run in enumerate(runs):
        os.utime(run.path / "metrics.jsonl", (age * 1000, age * 1000))
    assert [run.name for run in runs_begun(tiny().runs)] == [run.name for run in reversed(runs)]
    (runs[0].path / "metrics.jsonl").unlink()  # one that has its configuration, and no update yet
    assert runs_begun(tiny().runs)[0].name == runs[0].name
    assert runs_begun(str(tiny().runs) + "/none") == []


def test_a_directory_that_is_not_whole_is_told(begun):
    with begun() as run:
        (run.path / "config.json").write_text("{")
        with pytest.raises(BadInput, match=r"must hold a whole config\.json"):
            look(Log(run))


def test_a_stop_is_a_file_in_the_directory(begun):
    with begun() as run:
        stop(run)
        assert (run.path / "stop").read_bytes() == b""


@pytest.fixture
def notebook():
    """IPython in this process, as a kernel would have it."""
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    yield shell
    InteractiveShell.clear_instance()


def test_a_run_watched_in_a_notebook_leaves_one_figure(notebook, tiny, monkeypatch):
    monkeypatch.setattr("lib.train.PROGRESS_SECONDS", 0)
    with capture_output() as captured:
        run = watch(tiny())
    assert run.meta["status"] == "finished"
    first, *updates = captured.outputs
    assert first.data == {"text/plain": ""}
    assert len(updates) > 5
    assert {output.transient["display_id"] for output in captured.outputs} == {first.transient["display_id"]}
    assert all(output.update for output in updates)
    assert "image/png" in updates[-1].data
    assert updates[-1].data["text/plain"] == updates[-1].metadata["image/png"]["alt"]
    assert "finished · 100% · update 10 · 3,840 tokens" in updates[-1].data["text/plain"]
    assert captured.stdout == ""


def test_a_run_watched_elsewhere_prints_its_lines(tiny, capsys):
    assert live.get_ipython() is None
    run = watch(tiny())
    assert capsys.readouterr().out.startswith("constant 384")
    assert run.path == resolve(tiny()).run.path
