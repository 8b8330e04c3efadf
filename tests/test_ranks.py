"""Several processes train one run: as one process would, within rounding, and they agree on where it stops."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from lib.check import BadInput
from lib.checkpoint import tokens_of, written
from lib.interrupt import stop
from lib.ranks import Ranks
from lib.train import resolve, train

SAME = ["step", "tokens", "stage", "tokens_per_step", "lr"]
CLOSE = ["loss", "grad_norm"]


def quiet(line):
    pass


@pytest.fixture
def torchrun(tmp_path):
    """Starts a command with this configuration in two processes."""
    started = []

    def start(config, *command):
        file = tmp_path / f"{len(started)}.yaml"
        file.write_text(yaml.safe_dump(json.loads(json.dumps(asdict(config)))))
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        started.append(subprocess.Popen([*launch, *(command or ("-m", "lib.train")), str(file)], cwd=tmp_path,
                                        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def finish(process):
    """What it printed, when it has ended well."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def same_within_rounding(one, other):
    rows, others = one.metrics(), other.metrics()
    assert rows[SAME].equals(others[SAME])
    for name in CLOSE:
        assert rows[name].to_numpy() == pytest.approx(others[name].to_numpy(), rel=1e-4)
    assert one.meta["validation_loss"] == pytest.approx(other.meta["validation_loss"], rel=1e-5)
    assert one.meta["validation_bits_per_byte"] == pytest.approx(other.meta["validation_bits_per_byte"], rel=1e-5)
    stages = [[{name: value for name, value in stage.items() if "second" not in name} for stage in run.meta["stages"]]
              for run in (one, other)]
    assert stages[0] == stages[1]
    assert one.meta["stream"] == other.meta["stream"]


@pytest.fixture
def three(tiny):
    """Makes a configuration of three stages, of 1, 3 and 6 micro-batches an update in each of two processes."""
    return lambda **changes: tiny(schedule="dividers", batch_dividers=[6, 2, 1], stage_length=[1 / 3, 1 / 3],
                                  tokens_per_step=768, device_token_capacity=64, validation_tokens=1600, **changes)


SCRIPT = '''"""Trains a configuration, with time budgets, and as a branch of itself, in the processes there are; the
first says last how often each of its updates exchanged gradients. Costs that are not shared are other in each process.
"""

import os
import sys
from dataclasses import replace

from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import lib.train
from lib.clock import Costs
from lib.config import RunConfig, read_arguments
from lib.ranks import Ranks
from lib.step import Learner

rank, exchanges = int(os.environ["RANK"]), []
build, accumulate = Learner.__init__, Learner.accumulate


def count(group, bucket):
    exchanges[-1] += 1
    return allreduce_hook(group, bucket)


def watched(learner, *arguments):
    build(learner, *arguments)
    learner.loss.register_comm_hook(None, count)


def counted(learner, rows, *size):
    exchanges.append(0)
    return accumulate(learner, rows, *size)


lib.train.calibrate = lambda config, vocab_size: Costs(0.01 * (1 + rank), 0.002)
Learner.__init__, Learner.accumulate = watched, counted
config = read_arguments(RunConfig, sys.argv[1:])
timed = replace(config, token_budget=None, time_budget=0.6)
for one in config, replace(timed, clock="modelled"), timed:
    lib.train.train(one)
updates = len(exchanges)
lib.train.train(replace(config, branch_from=lib.train.resolve(config).run.name, branch_at=1000))
if rank == 0:
    print(*exchanges[:updates])
Ranks.join().leave()
'''


def test_two_processes_train_what_one_does(three, costs, tmp_path, torchrun, same_run):
    """Under any budget; they exchange gradients once an update, and no time budget waits for ever."""
    script = tmp_path / "budgets.py"
    script.write_text(SCRIPT)
    config = three(eval_every=1000)
    timed = replace(config, token_budget=None, time_budget=0.6)
    process = torchrun(config, str(script))
    elsewhere = {"runs": str(tmp_path / "alone")}
    pairs = [(resolve(one).run, train(replace(one, **elsewhere), quiet)) for one in (
        config, replace(timed, clock="modelled"))]
    exchanges = finish(process).splitlines()[-1].split()
    for two, alone in pairs:
        same_within_rounding(two, alone)
        assert two.meta["sha256"] != alone.meta["sha256"]  # sums of two processes are rounded otherwise
        assert [run.meta["attempts"][0]["processes"] for run in (two, alone)] == [2, 1]
        assert two.metrics().groupby("stage").tokens_per_step.unique().tolist() == [[128], [384], [768]]
    assert pairs[1][0].metrics().elapsed.tolist() == pairs[1][1].metrics().elapsed.tolist()
    measured = resolve(timed).run
    assert measured.meta["status"] == "finished"
    assert measured.metrics().elapsed.iloc[-2] < 0.6 <= measured.meta["elapsed_seconds"]
    updates = measured.meta["steps"] + sum(run.meta["steps"] for run, _ in pairs)
    assert exchanges == ["1"] * updates
    branched = replace(config, branch_from=pairs[0][0].name, branch_at=1000)  # whose past was trained again
    same_run(resolve(branched).run, pairs[0][0], aside=("parent", "stream"))
    assert train(config, quiet).path == pairs[0][0].path  # has ended, for one process too


SLOW = '''"""Trains a configuration with another seed, then as it is, slowly enough to be stopped on the way."""

import sys
import time
from contextlib import suppress
from dataclasses import replace

import lib.train
from lib.config import RunConfig, command, read_arguments
from lib.step import Learner

accumulate = Learner.accumulate


def slowly(learner, *rows):
    time.sleep(0.05)
    return accumulate(learner, *rows)


Learner.accumulate = slowly
with suppress(KeyboardInterrupt):
    lib.train.train(replace(read_arguments(RunConfig, sys.argv[1:]), seed=1))
command(lib.train.main)
'''


def test_a_run_stopped_in_two_processes_goes_on_in_any_number(three, tmp_path, torchrun):
    """One by its file, which the first process sees, and the next by a signal. The first process keeps the board."""
    script, config = tmp_path / "slow.py", three(token_budget=12_800, tensorboard=True)
    script.write_text(SLOW)
    first, run = resolve(replace(config, seed=1)).run, resolve(config).run
    process = torchrun(config, str(script))
    for begun, end in (first, partial(stop, first)), (run, process.terminate):
        while not begun.rows() and process.poll() is None:
            time.sleep(0.01)
        end()
    process.communicate(timeout=60)
    assert [told.meta["status"] for told in (first, run)] == ["interrupted", "interrupted"]
    assert [tokens_of(path) for path in written(first)] == [first.meta["tokens"]]
    assert not (first.path / "stop").exists()
    before = run.meta["steps"]
    assert [tokens_of(path) for path in written(run)] == [run.meta["tokens"]]
    assert 0 < before == len(run.metrics())
    copy = replace(config, runs=str(shutil.copytree(config.runs, tmp_path / "copy")))

    process = torchrun(config)
    one = train(copy, quiet)
    alone = train(replace(config, runs=str(tmp_path / "alone")), quiet)
    said = finish(process).splitlines()
    assert said[-1] == str(run.path)
    assert sum("continued after update" in line for line in said) == said.count(str(run.path)) == 1  # by the first
    for again, processes in (run, 2), (one, 1):
        assert again.meta["status"] == "finished"
        same_within_rounding(again, alone)
        rows = again.metrics()
        assert rows.step.tolist() == list(range(1, len(rows) + 1))
        assert rows.tokens.tolist() == rows.tokens_per_step.cumsum().tolist()
        attempts = [(attempt["after"], attempt["processes"]) for attempt in again.meta["attempts"]]
        assert attempts == [(0, 2), (before, processes)]
        file, = (again.path / "tensorboard").iterdir()
        assert [event.step for event in EventFileLoader(str(file)).Load() if event.summary.value
                and event.summary.value[0].tag == "train/loss"] == rows.tokens.tolist()


def test_a_t_that_does_not_split_over_the_processes_is_bad_input(tiny, torchrun):
    process = torchrun(tiny(tokens_per_step=96))
    out, err = process.communicate(timeout=60)
    assert process.returncode
    assert out == ""
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert said == ["error: device_token_capacity = 32: must split every T into whole micro-batches on 2 processes; 96 "
                    "is not a multiple of 64"]
    assert not Path(tiny().runs).exists()


@pytest.mark.parametrize("change", [{}, {"schedule": "dividers", "batch_dividers": [4, 1], "stage_length": [0.5]},
                                    {"time_budget": 1.0, "clock": "modelled"}])
def test_every_t_has_to_split_before_anything_is_written(tiny, monkeypatch, change):
    """Here without the other process."""
    monkeypatch.setattr(Ranks, "join", lambda: Ranks(0, 2))
    monkeypatch.setattr(Ranks, "share", lambda self, make: make())
    config = tiny(**{"tokens_per_step": 96, "schedule": "constant"} | change | (
        {"tokens_per_step": 384} if "batch_dividers" in change else {}))
    with pytest.raises(BadInput, match="device_token_capacity = 32: must split every T"):
        train(config, quiet)
    assert not Path(config.runs).exists()


def test_a_stop_that_another_process_was_asked_for_interrupts_this_one_too(tiny, monkeypatch):
    """Here without the other process."""
    agreed = []

    def agree(self, asked, *readings):
        agreed.append(asked)
        return len(agreed) > 3, *readings

    monkeypatch.setattr(Ranks, "agree", agree)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), quiet)
    run = resolve(tiny()).run
    assert run.meta["status"] == "interrupted"
    assert [tokens_of(path) for path in written(run)] == [3 * 384]


def test_a_signal_that_comes_while_the_processes_agree_is_not_lost(tiny, monkeypatch):
    agreed, agree = [], Ranks.agree

    def interrupted(self, *asked):
        agreed.append(asked)
        if len(agreed) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return agree(self, *asked)

    monkeypatch.setattr(Ranks, "agree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), quiet)
    assert (resolve(tiny()).run.meta["status"], resolve(tiny()).run.meta["steps"]) == ("interrupted", 3)
