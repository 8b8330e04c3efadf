"""Who trains the runs of a sweep decides nothing about them: this process, others, or threads."""

import os
import signal
import threading
import time
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing import active_children, get_context
from pathlib import Path

import distributed
import pytest

import lib.step
from lib.check import BadInput
from lib.checkpoint import written
from lib.model import MiniGPT
from lib.sweep import sweep
from lib.train import resolve, train

# As many as there are cores, so that each takes one thread, as this one does, and gives the same sums.
PROCESSES = f"processes:{max(2, os.cpu_count())}"


def quiet(line):
    pass


def weights(runs):
    return [run.meta["sha256"] for run in runs]


@pytest.fixture
def alone(tmp_path):
    """The weights of these configurations, each trained on its own."""
    return lambda configs: weights([train(replace(config, runs=str(tmp_path / "alone")), quiet) for config in configs])


@pytest.fixture
def long(tiny):
    """A run of a second or two with many checkpoints."""
    return tiny(tokens_per_step=32, token_budget=32 * 300, checkpoint_every=960, skip_validation=True)


@pytest.fixture
def when():
    """Does something in a thread as soon as this is true."""
    threads = []

    def at(condition, act):
        def watch():
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline and not condition():
                time.sleep(0.01)
            act()

        threads.append(threading.Thread(target=watch))
        threads[-1].start()

    yield at
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("executor", ["processes:0", "processes:-1", "processes:x", "processes:", "processes:²",
                                      "dask:", "dask", "nonsense", "Serial", ""])
def test_an_executor_that_cannot_work_is_bad_input(late, executor):
    with pytest.raises(BadInput, match=f"executor = {executor!r}: must be serial, processes:N or dask:ADDRESS"):
        sweep(late, "late", executor)
    assert not Path(late[0].runs).exists()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "tcp://127.0.0.1:1"])
def test_a_scheduler_that_is_not_there_is_bad_input(late, monkeypatch, address):
    client = distributed.Client
    monkeypatch.setattr(distributed, "Client", lambda where, timeout: client(where, timeout=min(timeout, 0.5)))
    with pytest.raises(BadInput, match=f"executor = 'dask:{address}': must be the address of a Dask scheduler"):
        sweep(late, "late", f"dask:{address}")
    assert not Path(late[0].runs).exists()


@pytest.mark.parametrize("executor", [PROCESSES, ThreadPoolExecutor(1), ThreadPoolExecutor(3)])
def test_any_executor_gives_the_same_weights(late, alone, executor):
    """A switch of the middle is asked for first, so that the full run, and one below it, take over its past."""
    configs = [late[2], late[0], late[3]]
    runs = sweep(configs, "late", executor)
    assert weights(runs) == alone(configs)
    assert [run.meta["past"] for run in runs] == [None, {"run": runs[0].name, "tokens": 1920},
                                                  {"run": runs[1].name, "tokens": 2880}]  # each waited for the other


def test_runs_in_threads_of_a_process_share_no_random_numbers(tiny, alone, monkeypatch):
    """Though both would have set their seeds before either draws, and draw before either puts them back."""
    configs, meet = [tiny(seed=seed, skip_validation=True) for seed in (0, 1)], threading.Barrier(2)
    expected = alone(configs)

    def build(shape):
        with suppress(threading.BrokenBarrierError):  # where one waits for the other to have done
            meet.wait(1)
        model = MiniGPT(shape)
        with suppress(threading.BrokenBarrierError):
            meet.wait(1)
        return model

    monkeypatch.setattr(lib.step, "MiniGPT", build)
    with ThreadPoolExecutor(2) as pool:
        assert weights(sweep(configs, "seeds", pool)) == expected


@pytest.fixture
def bystander():
    """Another process of this one's, which has nothing to do with a sweep."""
    process = get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    yield process
    process.kill()
    process.join()


@pytest.fixture
def broken(late):
    """Three runs, of which the second cannot be trained: its directory has a link."""
    path = resolve(late[2]).run.path
    path.mkdir(parents=True)
    (path / "run.log").symlink_to("elsewhere")
    return [late[0], late[2], late[3]]


@pytest.mark.parametrize("executor", ["serial", PROCESSES])
def test_what_a_run_raises_surfaces_and_the_others_are_there(broken, alone, executor):
    with pytest.raises(BadInput, match="is a link"):
        sweep(broken, "late", executor)
    assert resolve(broken[0]).run.ended
    assert not (Path(broken[0].runs) / "sweeps").exists()
    (resolve(broken[1]).run.path / "run.log").unlink()
    assert weights(sweep(broken, "late")) == alone(broken)


def test_a_failure_leaves_a_users_own_executor_and_processes_alone(broken, bystander, alone):
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(BadInput, match="is a link"):
            sweep(broken, "late", pool)
        bystander.join(0.5)
        assert bystander.is_alive()
        (resolve(broken[1]).run.path / "run.log").unlink()
        assert weights(sweep(broken, "late", pool)) == alone(broken)


def test_a_worker_that_is_killed_breaks_the_sweep_which_goes_on_when_asked_again(long, alone, when):
    run = resolve(long).run
    when(lambda: written(run), lambda: os.kill(active_children()[0].pid, signal.SIGKILL))
    with pytest.raises(BrokenExecutor, match="a worker died in the middle of a run; asked for again, the sweep goes"):
        sweep([long], "long", PROCESSES)
    assert not run.ended
    assert written(run)
    assert weights(sweep([long], "long")) == alone([long])
    assert [attempt["after"] > 0 for attempt in run.meta["attempts"]] == [False, True]


def test_ctrl_c_stops_the_runs_of_other_processes_with_a_checkpoint(long, alone, when):
    """And begins none of those that wait, of which a pool of processes would take some in advance."""
    config = replace(long, checkpoint_every=0)
    run, others = resolve(config).run, [replace(config, seed=1 + i) for i in range(2 * max(2, os.cpu_count()))]
    when(run.rows, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        sweep([config, *others], "long", PROCESSES)
    assert not any(resolve(other).run.ended for other in others)
    assert run.meta["status"] == "interrupted"
    assert len(written(run)) == 1
    assert active_children() == []
    assert weights(sweep([config], "long")) == alone([config])
    assert [attempt["after"] > 0 for attempt in run.meta["attempts"]] == [False, True]
