"""Sweeps: a past that runs have in common is trained once, whatever order they come in and whatever becomes of it."""

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

import lib.sweep
from lib.checkpoint import written
from lib.runs import load_runs
from lib.step import Learner
from lib.sweep import picture, plan, sweep
from lib.train import resolve, train

# A full run of 40 updates of 96 tokens, and what four others take of it before they go on with updates of 384.
SAVED = 960 + 1920 + 2880 + 3456
TRAINED = 3840 + (7 + 5 + 2 + 1) * 384


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.fixture
def apart(late, known, tmp_path):
    """The weights of five runs that were trained on their own, in the order of `late`."""
    if not known:
        for config in late:
            known[config.arm] = train(replace(config, runs=str(tmp_path / "apart")), quiet).meta["sha256"]
    return [known[config.arm] for config in late]


def quiet(line):
    pass


def weights(runs):
    return [run.meta["sha256"] for run in runs]


def test_one_full_run_and_four_tails(late, apart, applied):
    applied.clear()
    runs = sweep(late, "late")
    assert weights(runs) == apart
    assert len(applied) == 40 + 7 + 5 + 2 + 1
    assert sum(applied) == TRAINED
    assert [run.meta["past"] for run in runs] == [None] + [
        {"run": runs[0].name, "tokens": tokens} for tokens in (960, 1920, 2880, 3456)]
    for run in runs:
        assert run.meta["steps"] == len(run.metrics())
        assert sum(stage["updates"] for stage in run.meta["stages"]) == run.meta["steps"]
        assert run.meta["stream"]["range"] == [0, run.meta["tokens"]]
    assert json.loads((Path(late[0].runs) / "sweeps" / "late.json").read_text()) == [run.name for run in runs]
    table, updates = load_runs(late[0].runs)
    assert table.setting.nunique() == 1
    assert len(updates) == table.steps.sum()
    applied.clear()
    assert weights(sweep(late, "late")) == apart
    assert applied == []


def test_the_plan_is_printed_before_it_starts(late, capsys, monkeypatch):
    apply, said = Learner.apply, []

    def watch(*arguments):
        said.append(capsys.readouterr().out)
        return apply(*arguments)

    monkeypatch.setattr(Learner, "apply", watch)
    sweep(late, "late")
    assert said[0] == f"""late: 5 runs, 0 of them reused; {TRAINED:,} tokens to train, {SAVED:,} saved by common pasts
constant 96 · lr 0.01 · seed 0 · 3,840 tokens
├─ at 960: switch 96 to 384 at 0.25, lr unscaled · lr 0.01 · seed 0 · 2,688 tokens
├─ at 1,920: switch 96 to 384 at 0.5, lr unscaled · lr 0.01 · seed 0 · 1,920 tokens
├─ at 2,880: switch 96 to 384 at 0.75, lr unscaled · lr 0.01 · seed 0 · 768 tokens
└─ at 3,456: switch 96 to 384 at 0.9, lr unscaled · lr 0.01 · seed 0 · 384 tokens
"""
    capsys.readouterr()
    sweep(late, "late")
    assert capsys.readouterr().out.startswith("late: 5 runs, all of them reused\n")


def test_any_order_trains_the_same_number_of_tokens(late, monkeypatch):
    tasks = {config: resolve(config) for config in late}
    monkeypatch.setattr(lib.sweep, "resolve", tasks.get)
    for order in permutations(late):
        nodes = plan(order)
        assert sum(node.to_train for node in nodes) == TRAINED
        assert f"{TRAINED:,} tokens to train, {SAVED:,} saved" in picture(nodes)
        assert sum(node.parent is None for node in nodes) == 1
        for node in nodes:
            assert node.parent is None or node.shared in node.parent.keep


def test_the_order_of_the_runs_decides_nothing(late, apart, applied):
    mixed = [late[place] for place in (3, 1, 4, 0, 2)]
    applied.clear()
    assert weights(sweep(mixed, "mixed")) == [apart[place] for place in (3, 1, 4, 0, 2)]
    assert sum(applied) == TRAINED


def test_other_seeds_and_rates_have_trees_of_their_own(late):
    nodes = plan([*late, *(replace(config, seed=1) for config in late), replace(late[0], lr=0.02)])
    assert sum(node.to_train for node in nodes) == 2 * TRAINED + 3840
    assert [node.parent and nodes.index(node.parent) for node in nodes] == [None, *[0] * 4, None, *[5] * 4, None]


def test_a_past_too_short_to_be_worth_it_is_not_shared(late):
    early = replace(late[1], switch_at=0.02)
    assert [node.shared for node in plan([late[0], early])] == [0, 0]
    assert [node.shared for node in plan([late[0], replace(early, switch_at=0.1)])] == [0, 384]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x")])
def test_without_the_donors_checkpoint_a_run_is_trained_in_full(late, apart, applied, monkeypatch, damage):

    def then_lose(config, *arguments, **options):
        run = train(config, *arguments, **options)
        for path in written(run):
            damage(path)
        return run

    monkeypatch.setattr(lib.sweep, "train", then_lose)
    applied.clear()
    runs = sweep([late[0], late[2]], "late")
    assert sum(applied) == 3840 + 3840
    assert weights(runs) == [apart[0], apart[2]]
    assert runs[1].meta["past"] is None


def test_runs_that_have_ended_offer_what_they_kept(late, apart, applied, capsys):
    sweep([late[0], late[2]], "late")
    applied.clear()
    same, earlier = replace(late[2], tokens_per_step=192), late[1]
    capsys.readouterr()
    runs = sweep([late[0], late[2], same, earlier], "more")
    assert sum(applied) == 1920 + 3648  # nothing was kept at 960 tokens
    assert "4 runs, 2 of them reused; 5,568 tokens to train, 1,920 saved" in capsys.readouterr().out
    assert runs[2].meta["past"] == {"run": runs[0].name, "tokens": 1920}
    assert runs[3].meta["sha256"] == apart[1]


@pytest.mark.parametrize("update", [5, 25, 40, 41, 43, 54])
def test_a_sweep_that_was_interrupted_goes_on(late, apart, applied, ctrl_c, update):
    """In the first run, before and after it has kept checkpoints for others, in the second, and in the last but one."""
    applied.clear()
    with ctrl_c(update):
        sweep(late, "late")
    assert len(applied) == update
    assert not (Path(late[0].runs) / "sweeps").exists()
    left = sum(node.to_train for node in plan(late))
    assert left == TRAINED - sum(applied)
    assert weights(sweep(late, "late")) == apart
    assert sum(applied) == TRAINED


@pytest.mark.parametrize(("every", "update"), [(0, 25), (480, 12)])
def test_the_plan_knows_what_an_interrupted_run_did_not_keep(late, apart, applied, ctrl_c, every, update):
    """It was begun on its own, and is past where others part from it, or has a checkpoint there that is not to stay."""
    late[0] = replace(late[0], checkpoint_every=every)
    with ctrl_c(update):
        train(late[0], quiet)
    planned = sum(node.to_train for node in plan(late[:3]))
    applied.clear()
    assert weights(sweep(late[:3], "late")) == apart[:3]
    assert sum(applied) == planned
