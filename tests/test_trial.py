"""Runs apart: what one that fails says, what kills a process, and the search for a micro-batch under a limit."""

import os
import signal
from functools import partial

import pytest
import torch

from lib.capacity import propose, search
from lib.gates import Experiment, Floor, decide
from lib.runs import Run
from lib.train import train
from lib.trial import apart, trial


def test_a_run_apart_is_the_run(tiny):
    row = trial(config := tiny())
    assert (row["status"], row["reason"]) == ("finished", "")
    assert row["validation_loss"] == train(config, print).meta["validation_loss"]
    assert row["peak_memory"] > 2**27
    assert trial(config, own_process=False) == row, "a run that has ended is not trained again"
    assert row["update_seconds"] * row["steps"] == pytest.approx(row["elapsed_seconds"], rel=1)


def test_a_run_without_memory_is_a_row(tiny):
    """The limit stands in for a GPU's memory."""
    row = trial(tiny(mlp_size=16_384, tokens_per_step=32_768, device_token_capacity=32_768, token_budget=32_768),
                memory=1.0)
    assert (row["status"], row["reason"]) == ("out_of_memory", "out of memory")


def test_a_process_that_is_killed_is_out_of_memory():
    with pytest.raises(MemoryError, match="killed"):
        apart(0, os.kill, 0, signal.SIGKILL)


def test_a_graph_break_is_a_row(tiny, monkeypatch):
    def broken(model, tokens):
        torch._dynamo.graph_break()
        return model(tokens).mean()

    monkeypatch.setattr("lib.model.MiniGPT.loss", broken)
    row = trial(tiny(compile="default", fullgraph=True), own_process=False)
    assert row["status"] == "failed"
    assert row["reason"].startswith("Unsupported: ")
    assert "\n" not in row["reason"]


def test_a_compiled_run_learns_the_same_without_compiling_inside_the_clock(tiny, monkeypatch):
    """However many a process has compiled before: dynamo's limit counts the run alone."""
    monkeypatch.setattr("torch._dynamo.config.recompile_limit", 1)
    plain = train(tiny(token_budget=1920), print)
    for seed in (0, 1):
        row = trial(tiny(token_budget=1920, compile="default", fullgraph=True, seed=seed), own_process=False)
        assert [row[name] for name in ("reason", "graphs", "graph_breaks", "recompilations")] == ["", 1, 0, 0]
        if seed == 0:
            assert row["validation_loss"] == pytest.approx(plain.meta["validation_loss"], abs=1e-4)
            assert row["compile_seconds"] > 0.1
    assert Run(plain.path).meta["compilation"] is None


def test_a_study_that_is_stopped_goes_on(tiny, ctrl_c, applied):
    table, margins = [Experiment("BS-1", {"tokens_per_step": 192})], {"loss": 0.01, "speed": 0.01}

    def study():
        return [*decide(table, tiny(), [0, 1], Floor(0, 0), margins, partial(trial, own_process=False))]

    with ctrl_c(35):  # in the third of four runs, of 20, 10, 10 and 20 updates
        study()
    (decision,) = study()
    assert len(applied) == 60
    assert [*decision.rows.status] == ["finished"] * 4
    assert decision.rows.run.nunique() == 4


def test_the_search_finds_what_fits(tiny):
    wide = tiny(seq_len=1024, mlp_size=16_384, tokens_per_step=4096, device_token_capacity=1024, token_budget=4096)
    tries = search(wide, 1.2, 2**20, seconds=0.1)
    fits, fails = tries[tries.fits].capacity, tries[~tries.fits].capacity
    assert fits.max() + 1024 == fails.min()
    assert tries[tries.fits].peak_memory.is_monotonic_increasing
    assert propose(tries, 4096) in {*fits}
    assert 4096 % propose(tries, 4096) == 0
