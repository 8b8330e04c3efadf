"""A sweep on a Dask cluster: a worker may die in the middle of a run."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import distributed
import pytest
import torch

from lib.check import BadInput
from lib.checkpoint import written
from lib.interrupt import stop
from lib.sweep import sweep
from lib.train import resolve, train

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
SHARE = max(1, CORES // 2)


@pytest.fixture(scope="module")
def cluster():
    """Two workers of a thread, whose libraries would take another number of threads if left alone."""
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as made:
        with distributed.Client(made) as client:
            client.run(torch.set_num_threads, SHARE + 1)
        yield made


@pytest.fixture
def runs(tiny):
    """A run of a second or more, and two others that take over what it has done by the middle, and later."""
    same = {"lr_schedule": "constant", "scaling_rule": "none", "skip_validation": True, "token_budget": 32 * 400,
            "checkpoint_every": 640}
    return [tiny(**same, tokens_per_step=32)] + [
        tiny(**same, schedule="late_switch", small_tokens_per_step=32, switch_at=at) for at in (0.5, 0.75)]


@pytest.fixture
def undisturbed(tmp_path):
    """The weights of these configurations, each trained on its own, with the threads of a worker."""

    def alone(configs):
        before = torch.get_num_threads()
        torch.set_num_threads(SHARE)
        try:
            return [train(replace(config, runs=str(tmp_path / "alone")), lambda line: None).meta["sha256"]
                    for config in configs]
        finally:
            torch.set_num_threads(before)

    return alone


def test_a_run_whose_worker_is_killed_goes_on_with_another(cluster, runs, undisturbed):
    first = resolve(runs[0]).run
    with ThreadPoolExecutor(1) as aside, distributed.Client(cluster) as client:
        sweeping = aside.submit(sweep, runs, "on dask", f"dask:{cluster.scheduler_address}")
        while not written(first) and not sweeping.done():
            time.sleep(0.01)
        busy, = (address for address, tasks in client.processing().items() if tasks)  # the others wait for this run
        worker, = (nanny for nanny in cluster.workers.values() if nanny.worker_address == busy)
        os.kill(worker.pid, signal.SIGKILL)
        assert not first.ended
        made = sweeping.result(120)
    assert [attempt["after"] > 0 for attempt in first.meta["attempts"]] == [False, True]
    assert [run.meta["past"] for run in made] == [None, *({"run": first.name, "tokens": 32 * n} for n in (200, 300))]
    assert {run.meta["environment"]["threads"] for run in made} == {SHARE}
    assert [run.meta["sha256"] for run in made] == undisturbed(runs)


def test_a_run_that_is_told_to_stop_ends_the_sweep_and_no_worker(cluster, runs, undisturbed):
    run = resolve(runs[0]).run
    with ThreadPoolExecutor(1) as aside, distributed.Client(cluster) as client:
        workers = client.run(os.getpid)
        sweeping = aside.submit(sweep, runs[:1], "on dask", f"dask:{cluster.scheduler_address}")
        while not run.rows() and not sweeping.done():
            time.sleep(0.01)
        stop(run)
        with pytest.raises(KeyboardInterrupt, match=f"{run.name}: a stop was asked for"):
            sweeping.result(60)
        assert client.run(os.getpid) == workers
    assert run.meta["status"] == "interrupted"
    assert len(run.meta["attempts"]) == 1  # no other worker went on with it
    made = sweep(runs[:1], "on dask", f"dask:{cluster.scheduler_address}")
    assert [run.meta["sha256"] for run in made] == undisturbed(runs[:1])


def test_what_a_run_raises_on_a_cluster_surfaces(cluster, tiny):
    config = tiny(skip_validation=True)
    path = resolve(config).run.path
    path.mkdir(parents=True)
    (path / "run.log").symlink_to("elsewhere")
    executor = f"dask:{cluster.scheduler_address}"
    with pytest.raises(BadInput, match="is a link"):
        sweep([config], "late", executor)
    (path / "run.log").unlink()
    run, = sweep([config], "late", executor)  # the cluster is still there
    assert run.ended


def test_a_scheduler_without_workers_is_bad_input(tiny):
    with distributed.LocalCluster(n_workers=0, dashboard_address="127.0.0.1:0") as empty:
        executor = f"dask:{empty.scheduler_address}"
        with pytest.raises(BadInput, match=f"executor = '{executor}': must have a worker"):
            sweep([tiny()], "late", executor)
