"""A tiny stream of generated text, and a tiny model to train on it in a fraction of a second."""

import json
import os
import random
import signal
import sys
from contextlib import contextmanager
from dataclasses import asdict

import pytest
import torch
import yaml

import lib.train
from lib.clock import Costs
from lib.config import Preparation, RunConfig, command
from lib.prepare import prepare
from lib.step import Learner

collect_ignore = ["test_browser.py"]  # unless it is named: it drives a browser
# One thread is fastest for models this small, and tests stay quick on a busy machine.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# A worker of pytest-xdist ignores Ctrl-C, which many tests press.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items):
    """Notebooks build on each other's runs, so one worker takes them all, in order."""
    for item in items:
        if item.nodeid.partition("::")[0].endswith(".ipynb"):
            item.add_marker(pytest.mark.xdist_group("notebooks"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Files of sentences over a few hundred words, as a glob."""
    chance, folder = random.Random(0), tmp_path_factory.mktemp("corpus")
    words = ["".join(chance.choices("abcdefghijklmnopąęśżź", k=chance.randint(2, 9))) for _ in range(300)]
    for i in range(200):
        text = " ".join(chance.choices(words, weights=range(300, 0, -1), k=150))
        (folder / f"{i:03}.txt").write_text(text, encoding="utf-8")
    return str(folder / "*.txt")


@pytest.fixture(scope="session")
def stream(corpus, tmp_path_factory):
    """A folder with about 60,000 tokens of these sentences."""
    made = tmp_path_factory.mktemp("streams") / "tiny"
    prepare(Preparation(corpus=corpus, vocab_size=400, validation_fraction=0.1, stream=str(made)),
            progress=lambda line: None)
    return made


@pytest.fixture
def tiny(stream, tmp_path):
    """Makes a RunConfig of a two-layer model; keywords override."""

    def make(**changes):
        values = {"stream": str(stream), "runs": str(tmp_path / "runs"), "seq_len": 16, "hidden_size": 16, "layers": 2,
                  "heads": 2, "mlp_size": 32, "tokens_per_step": 384, "device_token_capacity": 32, "lr": 0.01}
        budget = {} if "time_budget" in changes else {"token_budget": 3840}
        return RunConfig(**(values | budget | changes))

    return make


@pytest.fixture
def late(tiny):
    """A constant small T, and switches from it to a large one at four places."""
    same = {"lr_schedule": "constant", "scaling_rule": "none", "device_token_capacity": 96, "skip_validation": True}
    return [tiny(**same, tokens_per_step=96)] + [
        tiny(**same, schedule="late_switch", small_tokens_per_step=96, switch_at=at) for at in (0.25, 0.5, 0.75, 0.9)]


@pytest.fixture
def costs(monkeypatch):
    """What a micro-batch and an update cost on the modelled clock, without measuring this machine."""
    known = Costs(micro_batch_seconds=0.01, update_seconds=0.002)
    monkeypatch.setattr(lib.train, "calibrate", lambda config, vocab_size: known)
    return known


@pytest.fixture
def applied(monkeypatch):
    """The tokens of each update made in this process, over all runs."""
    sizes, accumulate, apply = [], Learner.accumulate, Learner.apply

    def count(learner, rows, *size):
        learner.size = rows.size
        return accumulate(learner, rows, *size)

    def watch(learner, *arguments):
        sizes.append(learner.size)
        return apply(learner, *arguments)

    monkeypatch.setattr(Learner, "accumulate", count)
    monkeypatch.setattr(Learner, "apply", watch)
    return sizes


@pytest.fixture
def ctrl_c():
    """Makes a context in which Ctrl-C, or these signals, come in this update, counted over its runs, and end them."""

    @contextmanager
    def during(update, *signals):
        apply, calls = Learner.apply, []

        def watched(*arguments):
            calls.append(1)
            if len(calls) == update:
                for number in signals or (signal.SIGINT,):
                    os.kill(os.getpid(), number)
            return apply(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Learner, "apply", watched)
            with pytest.raises(KeyboardInterrupt):
                yield

    return during


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    """Has the command line train these values, and returns the one line that it refuses them with."""

    def said(values):
        file = tmp_path / "arm.yaml"
        file.write_text(yaml.safe_dump(json.loads(json.dumps(values)), allow_unicode=True))
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.setattr(sys, "argv", ["train", str(file)])
        with pytest.raises(SystemExit) as ended:
            command(lib.train.main)
        out, err = capsys.readouterr()
        assert ended.value.code == 2
        assert err.count("\n") == 1
        assert out == ""
        assert sorted(tmp_path.rglob("*")) == before
        return err

    return said


@pytest.fixture
def seconds(monkeypatch):
    """Time that passes by a millisecond a look, and as far as a test turns it on."""
    now = [0.0]

    def look():
        now[0] += 0.001
        return now[0]

    monkeypatch.setattr("time.perf_counter", look)
    return now


def untimed(value):
    """Metadata without what differs between two runs of the same thing."""
    if isinstance(value, list):
        return [untimed(item) for item in value]
    if isinstance(value, dict):
        return {name: untimed(item) for name, item in value.items() if not any(
            word in name for word in ("second", "elapsed", "started", "attempts", "environment", "memory", "past"))}
    return value


@pytest.fixture
def same_run():
    """Asserts that two runs have the same weights, rows and metadata, bit for bit, timings aside."""

    def compare(one, other, but=("elapsed", "tokens_per_second"), aside=()):
        assert one.metrics().drop(columns=[*but]).equals(other.metrics().drop(columns=[*but]))
        assert one.meta["sha256"] == other.meta["sha256"]
        aside = dict.fromkeys(["ended", *aside])
        assert untimed(one.meta | aside) == untimed(other.meta | aside)

    return compare


@pytest.fixture
def contents():
    """Every file and folder below one, with when it was changed, and its bytes."""

    def of(folder):
        return {path: (path.lstat().st_mtime_ns, path.is_file() and path.read_bytes())
                for path in [folder, *folder.rglob("*")]}

    return of


@pytest.fixture
def launch(capsys, monkeypatch):
    """The command line that trains this configuration: its exit status, and what it says on stderr."""

    def run(config):
        values = [f"{name}={yaml.safe_dump(value, default_flow_style=True)}"
                  for name, value in json.loads(json.dumps(asdict(config))).items()]
        monkeypatch.setattr(sys, "argv", ["train", *values])
        capsys.readouterr()
        try:
            command(lib.train.main)
        except SystemExit as ended:
            return ended.code, capsys.readouterr().err
        return 0, capsys.readouterr().err

    return run
