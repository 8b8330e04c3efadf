"""Branches: with the full state they go on as the parent would have; with its weights alone, as a fresh optimizer."""

import json
import shutil
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

import lib.train
from lib import checkpoint
from lib.clock import Costs
from lib.config import Preparation
from lib.prepare import prepare
from lib.runs import Run, updates, weights_sha256
from lib.stats import bins
from lib.step import Learner
from lib.stream import PackedStream
from lib.train import resolve, train


def quiet(line):
    pass


def rows(run):
    """The rows of a run, without what differs between two runs of the same thing."""
    return run.metrics().drop(columns=["elapsed", "tokens_per_second"])


@pytest.fixture
def unbranched(same_run):
    """Asserts that two runs are the same, but for what a branch says of its parent and of what it read itself."""
    return partial(same_run, aside=("parent", "stream"))


@pytest.fixture
def three(tiny):
    """Makes a configuration of 20 updates of 32 tokens, 7 of 96 and 3 of 192, with validation on the way."""
    values = {"schedule": "dividers", "batch_dividers": [12, 4, 2], "stage_length": [1 / 3, 1 / 3],
              "eval_every": 500, "validation_tokens": 160, "warmup_fraction": 0.1}
    return lambda **changes: tiny(**values | ({} if "time_budget" in changes else {"token_budget": 1920}) | changes)


@pytest.fixture
def plain(tiny):
    """Makes a configuration of ten updates without validation."""
    return lambda **changes: tiny(**{"device_token_capacity": 96, "skip_validation": True} | changes)


@pytest.fixture
def seen(monkeypatch):
    """The rows of tokens that the runs of this process learn from, in order."""
    read, accumulate = [], Learner.accumulate

    def watch(learner, tokens, *size):
        read.extend(tokens.tolist())
        return accumulate(learner, tokens, *size)

    monkeypatch.setattr(Learner, "accumulate", watch)
    return read


@pytest.fixture
def other_stream(stream, tmp_path):
    """A folder with the same tokens from the last to the first."""
    folder = Path(shutil.copytree(stream, tmp_path / "other_stream"))
    meta = json.loads((folder / "stream.json").read_text())
    np.fromfile(folder / "tokens.bin", meta["dtype"])[::-1].tofile(folder / "tokens.bin")
    meta["sha256"] = sha256((folder / "tokens.bin").read_bytes()).hexdigest()
    (folder / "stream.json").write_text(json.dumps(meta))
    return str(folder)


# Full state


@pytest.mark.parametrize("at", [1, 500, 640, 641, 1312, 1888])
def test_a_branch_of_a_kept_checkpoint_is_the_unbranched_run(three, applied, at, unbranched):
    """In the first and the last update, inside stages, at and right behind their ends (at 640 and 1,312 tokens)."""
    parent = train(three(), progress=quiet, keep=[at])
    reached = int(parent.metrics().tokens[lambda tokens: tokens >= at].iloc[0])
    applied.clear()
    lines = []
    child = train(three(branch_from=str(parent.path), branch_at=at), progress=lines.append)
    assert sum(applied) == 1888 - reached
    assert f"branched from {parent.name} at {reached:,} tokens" in lines[0]
    unbranched(child, parent)
    assert child.path != parent.path
    assert child.meta["stream"]["range"] == [reached, 1888]
    told = child.meta["parent"]
    assert (told["run"], told["tokens"], told["weights_only"]) == (parent.name, reached, False)
    assert told["reads"] == [parent.meta["stream"] | {"range": [0, reached]}]
    assert told["reread"] == []
    assert len(updates([child])) == len(updates([parent]))


def test_a_branch_of_a_rolling_checkpoint(three, applied, unbranched):
    parent = train(three(checkpoint_every=500), progress=quiet)
    assert [checkpoint.tokens_of(path) for path in checkpoint.written(parent)] == [1504, 1024]
    applied.clear()
    for at, left in ((1000, 1888 - 1024), (1504, 1888 - 1504)):
        unbranched(train(three(branch_from=parent.name, branch_at=at), progress=quiet), parent)
        assert sum(applied) == left
        applied.clear()
    assert not (Path(three().runs) / "pasts").exists()


@pytest.mark.parametrize("at", [641, 1888, 0])
def test_a_past_that_was_not_kept_is_trained_again_beside_the_parent(three, applied, at, unbranched):
    parent = train(three(), progress=quiet)
    before = {path: path.stat().st_mtime_ns for path in parent.path.rglob("*")}
    applied.clear()
    lines = []
    child = train(three(token_budget=2112 if at == 0 else 1920, branch_from=str(parent.path), branch_at=at),
                  progress=lines.append)
    assert lines[0] == (f"{parent}: keeps no checkpoint at {at or 1888:,} tokens; that past is trained again, "
                        "beside it")
    assert not any("differs" in line for line in lines)
    assert {path: path.stat().st_mtime_ns for path in parent.path.rglob("*")} == before
    if at:
        assert sum(applied) == 1888
        unbranched(child, parent)
    else:
        assert rows(child)[:len(rows(parent))].equals(rows(parent))
        assert child.meta["tokens"] == 1888 + 192
    assert [path.name for path in Path(three().runs).glob("pasts/*/*")] == [parent.name]


def test_pasts_that_were_trained_again_serve_later_branches(three, applied, unbranched):
    """At a later place, and at the same one with another rate."""
    parent = train(three(), progress=quiet)
    train(three(branch_from=parent.name, branch_at=640), progress=quiet)
    applied.clear()
    unbranched(train(three(branch_from=parent.name, branch_at=1312), progress=quiet), parent)
    assert sum(applied) == 1888 - 640
    applied.clear()
    train(three(branch_from=parent.name, branch_at=640, lr=0.02), progress=quiet)
    assert sum(applied) == 1888 - 640


def test_a_past_can_be_trained_again_up_to_an_earlier_place_later(three, unbranched):
    parent = train(three(), progress=quiet)
    train(three(branch_from=parent.name, branch_at=1312), progress=quiet)
    unbranched(train(three(branch_from=parent.name, branch_at=640), progress=quiet), parent)


def test_the_checkpoint_of_the_next_update_is_too_late(three, unbranched):
    parent = train(three(), progress=quiet, keep=[641])
    child = train(three(branch_from=parent.name, branch_at=640), progress=quiet)
    assert child.meta["parent"]["tokens"] == 640
    unbranched(child, parent)


def test_a_damaged_checkpoint_of_the_parent_is_not_branched_from(three, unbranched):
    parent = train(three(), progress=quiet, keep=[641])
    kept, = checkpoint.written(parent)
    kept.write_bytes(kept.read_bytes()[:-1] + b"x")
    lines = []
    unbranched(train(three(branch_from=parent.name, branch_at=641), progress=lines.append), parent)
    assert "keeps no checkpoint at 641 tokens" in lines[0]


@pytest.mark.parametrize("at", [500, 641, 1000])
def test_a_parent_that_was_interrupted(three, ctrl_c, tmp_path, at, unbranched):
    """Before, at and after its last checkpoint, which is at 736 tokens."""
    straight = train(three(runs=str(tmp_path / "straight")), progress=quiet)
    with ctrl_c(21):
        train(three(), progress=quiet)
    lines = []
    child = train(three(branch_from=straight.name, branch_at=at), progress=lines.append)
    unbranched(child, straight)
    assert any("trained again" in line for line in lines) == (at != 641)
    assert not any("differs" in line for line in lines)
    unbranched(train(three(), progress=quiet), straight)


def test_a_parent_that_was_killed_before_its_first_update(three, tmp_path, unbranched):
    parent = train(three(runs=str(tmp_path / "straight")), progress=quiet)
    killed = Run(Path(three().runs) / parent.name)
    killed.path.mkdir(parents=True)
    shutil.copy(parent.path / "config.json", killed.path)
    (killed.path / "metrics.jsonl").touch()
    unbranched(train(three(branch_from=parent.name, branch_at=500), progress=quiet), parent)


def test_an_interrupted_branch_goes_on(three, ctrl_c, unbranched):
    parent = train(three(), progress=quiet, keep=[641])
    config = three(branch_from=parent.name, branch_at=641)
    with ctrl_c(5):
        train(config, progress=quiet)
    child = train(config, progress=quiet)
    unbranched(child, parent)
    assert [attempt["after"] for attempt in child.meta["attempts"]] == [21, 26]
    assert child.meta["stream"]["range"] == [736, 1888]
    assert child.meta["parent"]["run"] == parent.name


def test_a_branch_with_another_rate_differs_from_there_on_alone(plain):
    parent = train(plain(), progress=quiet, keep=[1920])
    config = plain(lr=0.005, branch_from=parent.name, branch_at=1920)
    child = train(config, progress=quiet)
    before, after = rows(parent), rows(child)
    assert after[:5].equals(before[:5])
    assert after.loss[5] == before.loss[5]  # the same weights and tokens
    assert after.lr[5:].tolist() == [config.learning_rate(tokens / 3840, config.resolved()[0])
                                     for tokens in after.tokens[5:]]
    assert (after.lr[5:9] < before.lr[5:9]).all()
    assert (after.loss[6:] != before.loss[6:]).all()
    stage, = child.meta["stages"]
    assert (stage["start_tokens"], stage["end_tokens"], stage["updates"]) == (1920, 3840, 5)


def test_a_branch_into_a_switch_is_the_run_that_was_to_switch(plain, unbranched):
    same = {"lr_schedule": "constant", "scaling_rule": "none"}
    switch = plain(**same, schedule="late_switch", small_tokens_per_step=96, switch_at=0.5)
    straight = train(switch, progress=quiet)
    parent = train(plain(**same, tokens_per_step=96), progress=quiet, keep=[1920])
    child = train(replace(switch, branch_from=parent.name, branch_at=1920), progress=quiet)
    unbranched(child, straight)
    assert child.meta["parent"]["run"] == parent.name


def test_a_full_state_may_go_on_in_another_order(plain, stream, seen):
    parent = train(plain(), progress=quiet, keep=[1920])
    seen.clear()
    child = train(plain(data_seed=7, branch_from=parent.name, branch_at=1920), progress=quiet)
    read = seen[6:]  # after the warm-up
    assert read == PackedStream(stream, 16, 7).read(0, 1920).tolist()
    assert child.meta["stream"] == {"sha256": parent.meta["stream"]["sha256"], "range": [0, 1920],
                                    "shuffle": {"data_seed": 7, "epochs": 1}}
    assert child.meta["parent"]["reread"] == []
    assert child.meta["parent"]["seen"] == 1920
    assert rows(child)[:5].equals(rows(parent)[:5])


@pytest.mark.parametrize(("at", "kept"), [(200, False), (1000, True), (1000, False)])
def test_time_budgets_on_the_modelled_clock(three, costs, at, kept, unbranched):
    config = three(time_budget=0.6, clock="modelled")
    parent = train(config, progress=quiet, keep=[at] if kept else [])
    lines = []
    child = train(replace(config, branch_from=parent.name, branch_at=at), progress=lines.append)
    unbranched(child, parent, but=["tokens_per_second"])  # elapsed too is that of the parent
    assert ("trained again" in lines[0]) != kept
    assert child.meta["overshoot_seconds"] == parent.meta["overshoot_seconds"]


def test_the_past_of_a_modelled_clock_is_trained_again_at_its_costs(three, costs, monkeypatch, unbranched):
    """Though this machine would be calibrated anew, and otherwise, in another folder."""
    slow = Costs(micro_batch_seconds=0.03, update_seconds=0.01)
    monkeypatch.setattr(lib.train, "calibrate",
                        lambda config, vocab_size: costs if Path(config.runs) == Path(three().runs) else slow)
    config = three(time_budget=0.6, clock="modelled")
    parent = train(config, progress=quiet)
    child = train(replace(config, branch_from=parent.name, branch_at=1000), progress=quiet)
    unbranched(child, parent, but=["tokens_per_second"])


# Weights only


def by_hand(config, learner, packed, start, tokens):
    """The updates of a constant T over so many tokens of the stream's order."""
    size = config.tokens_per_step
    for end in range(size, tokens + 1, size):
        learner.accumulate(packed.read(start + end - size, size))
        learner.clip()
        stage = config.resolved()[0]
        learner.apply(config.learning_rate(end / config.token_budget, stage), config.hyperparameters(stage))


@pytest.mark.parametrize(("at", "reached", "kept"), [(0, 3840, False), (1000, 1152, True), (1000, 1152, False),
                                                     (3840, 3840, False)])
def test_weights_alone_start_a_fresh_optimizer_and_read_on(plain, stream, at, reached, kept):
    packed = PackedStream(stream, 16)
    first = Learner(plain(), packed.vocab_size)
    by_hand(plain(), first, packed, 0, reached)
    parent = train(plain(), progress=quiet, keep=[at] if kept else [])

    config = plain(tokens_per_step=192, lr=0.004, token_budget=1920, seed=5)
    second = Learner(config, packed.vocab_size)
    second.model.load_state_dict(first.model.state_dict())
    by_hand(config, second, packed, reached, 1920)
    child = train(replace(config, branch_from=parent.name, branch_at=at, branch_weights_only=True), progress=quiet)
    assert child.meta["sha256"] == weights_sha256(second.model.state_dict())
    assert child.metrics().tokens.tolist() == list(range(192, 1921, 192))
    assert child.meta["stream"] == parent.meta["stream"] | {"range": [reached, reached + 1920]}
    assert child.meta["parent"]["reads"] == [parent.meta["stream"] | {"range": [0, reached]}]
    assert child.meta["parent"]["reread"] == []
    assert child.meta["parent"]["seen"] == reached


def test_parent_and_child_read_no_row_twice(plain, stream, seen):
    parent = train(plain(), progress=quiet)
    train(plain(branch_from=parent.name, branch_weights_only=True, seed=5), progress=quiet)
    assert seen == PackedStream(stream, 16).read(0, 2 * 3840).tolist()  # one permutation of the rows


def test_another_order_is_read_from_its_beginning(plain, stream, seen):
    parent = train(plain(), progress=quiet)
    seen.clear()
    child = train(plain(data_seed=7, branch_from=parent.name, branch_weights_only=True), progress=quiet)
    assert seen == PackedStream(stream, 16, 7).read(0, 3840).tolist()
    assert child.meta["parent"]["reread"] == []
    assert child.meta["parent"]["seen"] == 3840
    assert len(updates([child])) == 10


@pytest.mark.parametrize(("size", "left"), [(384, 3840), (1152, 4608)])
def test_the_parents_order_from_its_beginning_is_read_again_and_left_out(plain, stream, seen, size, left):
    """Also an update that holds the end of what the parent had read."""
    parent = train(plain(), progress=quiet)
    seen.clear()
    child = train(plain(data_seed=0, branch_from=parent.name, branch_weights_only=True, token_budget=7680,
                        tokens_per_step=size), progress=quiet)
    assert seen == PackedStream(stream, 16).read(0, child.meta["tokens"]).tolist()
    assert child.meta["parent"]["reread"] == [[0, 3840]]
    assert child.meta["parent"]["seen"] == 3840
    table = updates([parent, child])
    assert table[table.run == parent.name].tokens.tolist() == list(range(384, 3841, 384))
    unseen = child.metrics()[lambda log: log.tokens - size >= 3840]
    assert len(unseen)
    assert table[table.run == child.name].tokens.tolist() == unseen.tokens.tolist()
    binned = bins(table, width_tokens=384)
    assert binned[binned.run == child.name].start_tokens.tolist() == list(range(left, child.meta["tokens"], 384))


def test_a_shorter_child_may_read_nothing_else_than_its_parent(plain):
    parent = train(plain(), progress=quiet)
    child = train(plain(data_seed=0, branch_from=parent.name, branch_weights_only=True, token_budget=1920),
                  progress=quiet)
    assert updates([child]).empty
    assert set(updates([parent, child]).run) == {parent.name}


def test_weights_alone_may_read_another_stream_from_its_beginning(plain, other_stream, seen):
    parent = train(plain(), progress=quiet)
    seen.clear()
    child = train(plain(stream=other_stream, branch_from=parent.name, branch_weights_only=True), progress=quiet)
    assert seen == PackedStream(other_stream, 16).read(0, 3840).tolist()
    assert child.meta["parent"]["seen"] == 0
    assert len(updates([child])) == 10


# Branches of branches


def test_all_ancestors_reads_are_recorded_and_counted(plain, stream, seen):
    first = train(plain(), progress=quiet)
    second = train(plain(branch_from=first.name, branch_weights_only=True), progress=quiet)
    third = train(plain(data_seed=7, branch_from=second.name, branch_weights_only=True), progress=quiet)
    seen.clear()
    last = train(plain(data_seed=0, branch_from=third.name, branch_weights_only=True, token_budget=9600),
                 progress=quiet)
    assert seen == PackedStream(stream, 16).read(0, 9600).tolist()
    ranges = [(read["shuffle"]["data_seed"], read["range"]) for read in last.meta["parent"]["reads"]]
    assert ranges == [(0, [0, 3840]), (0, [3840, 7680]), (7, [0, 3840])]
    assert last.meta["parent"]["reread"] == [[0, 7680]]
    assert last.meta["parent"]["seen"] == 3 * 3840
    assert updates([last]).tokens.tolist() == list(range(7680 + 384, 9601, 384))


def test_a_branch_of_a_branch_with_full_states_is_the_unbranched_run(three, unbranched):
    parent = train(three(), progress=quiet, keep=[500])
    child = train(three(branch_from=parent.name, branch_at=500), progress=quiet, keep=[1313])
    last = train(three(branch_from=child.name, branch_at=1313), progress=quiet)
    unbranched(last, parent)
    assert [read["range"] for read in last.meta["parent"]["reads"]] == [[0, 512], [512, 1504]]
    assert last.meta["parent"]["seen"] == 1504
    assert len(updates([last])) == len(updates([parent]))


def test_the_past_of_a_branch_is_trained_again(three, unbranched):
    """Though it names its own parent as it lies in its runs."""
    parent = train(three(), progress=quiet, keep=[500])
    child = train(three(branch_from=parent.name, branch_at=500), progress=quiet)
    unbranched(train(three(branch_from=child.name, branch_at=1313), progress=quiet), parent)


def test_a_branch_of_a_run_that_took_over_a_past_names_its_parent_alone(plain):
    alike = {"lr_schedule": "constant", "warmup_fraction": 0.0}
    donor = train(plain(**alike, token_budget=1920), progress=quiet, keep=[1152])
    run = train(plain(**alike), progress=quiet, keep=[1920], past=(donor, 1152))
    child = train(plain(**alike, branch_from=run.name, branch_at=1920), progress=quiet)
    assert run.meta["past"] == {"run": donor.name, "tokens": 1152}
    assert child.meta["parent"]["run"] == run.name
    assert child.meta["past"] is None


def test_what_a_parent_read_again_is_left_out_of_its_branch_too(plain, unbranched):
    first = train(plain(), progress=quiet)
    again = train(plain(data_seed=0, branch_from=first.name, branch_weights_only=True, token_budget=5760),
                  progress=quiet, keep=[1920])
    last = train(plain(branch_from=again.name, branch_at=1920, token_budget=5760), progress=quiet)
    unbranched(last, again)
    assert updates([again]).tokens.tolist() == list(range(3840 + 384, 5761, 384))
    assert updates([last]).tokens.tolist() == updates([again]).tokens.tolist()


def test_what_is_read_again_in_the_middle_of_a_run_leaves_a_gap(plain):
    first = train(plain(), progress=quiet, keep=[1920])
    second = train(plain(branch_from=first.name, branch_at=1920, data_seed=7), progress=quiet, keep=[2688])
    last = train(plain(branch_from=second.name, branch_at=2688, data_seed=0, token_budget=5760), progress=quiet)
    assert last.meta["parent"]["reread"] == [[2688, 2688 + 1920]]
    table = updates([last])
    assert table.tokens.tolist() == [*range(384, 2689, 384), *range(2688 + 1920 + 384, 5761, 384)]
    binned = bins(table, width_tokens=384)
    assert binned.start_tokens.tolist() == [*range(0, 2688, 384), *range(2688 + 1920, 5760, 384)]
    assert binned.loss.tolist() == pytest.approx(table.loss.tolist())


# Names and bad input


def test_names_tell_branches_apart_but_not_spellings(plain, tmp_path):
    parents = [train(plain(token_budget=1152, lr=lr), progress=quiet) for lr in (0.01, 0.02)]

    def name(parent=parents[0].name, at=384, **changes):
        return resolve(plain(branch_from=str(parent), branch_at=at, **changes)).run.name

    spellings = [parents[0].name, parents[0].path, f"{parents[0].path}/", tmp_path / "runs" / "." / parents[0].name,
                 tmp_path / "runs" / parents[1].name / ".." / parents[0].name]
    assert {name(spelling) for spelling in spellings} == {name()}
    assert name(runs=str(tmp_path / "elsewhere"), parent=parents[0].path) == name()
    assert name(data_seed=0) == name()  # the parent's order, in which a full state reads on anyway
    different = [resolve(plain()).run.name, name(), name(parents[1].name), name(at=768), name(branch_weights_only=True),
                 name(data_seed=7), name(data_seed=0, branch_weights_only=True),
                 name(data_seed=7, branch_weights_only=True)]
    assert len(set(different)) == len(different)


def test_runs_from_before_branches_existed_can_be_branched_from(plain):
    """Their metadata names no parent."""
    parent = train(plain(), progress=quiet)
    meta = parent.meta
    del meta["parent"], meta["past"], meta["attempts"]
    (parent.path / "run_meta.json").write_text(json.dumps(meta))
    for at in (0, 1152):
        child = train(plain(branch_from=parent.name, branch_at=at, branch_weights_only=True), progress=quiet)
        assert child.meta["parent"]["reads"] == [parent.meta["stream"] | {"range": [0, at or 3840]}]


BAD = {
    "past the parent's end": ({"branch_at": 3841, "token_budget": 9600},
                              "branch_at = 3841: must not be past the 3,840 tokens"),
    "past the child's budget": ({"branch_at": 2000, "token_budget": 1920},
                                "branch_at = 2000: must leave something of token_budget 1920"),
    "where the child's budget ends": ({"branch_at": 3840}, "branch_at = 3840: must leave something of"),
    "no run": ({"branch_from": "nowhere"}, "branch_from = 'nowhere': must be the folder of a run"),
    "a folder that is no run": ({"branch_from": "."}, "branch_from = '.': must be the folder of a run"),
    "a name too long": ({"branch_from": "x" * 300}, "branch_from = 'xxx"),
    "a NUL in a name": ({"branch_from": "a\0b"}, "branch_from = 'a\\x00b': must be"),
    "another width": ({"hidden_size": 32}, "hidden_size = 32: must be the parent's, 16"),
    "another depth": ({"layers": 1, "branch_weights_only": True}, "layers = 1: must be the parent's, 2"),
    "another row": ({"seq_len": 32}, "seq_len = 32: must be the parent's, 16"),
    "a place of nothing": ({"branch_from": ""}, "branch_at = 1152: needs branch_from"),
    "weights of nothing": ({"branch_from": "", "branch_at": 0, "branch_weights_only": True},
                           "branch_weights_only = True: needs branch_from"),
    "a negative place": ({"branch_at": -1}, "branch_at = -1: must not be negative"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_nothing_written(name, plain, refused):
    change, said = BAD[name]
    parent = train(plain(), progress=quiet)
    values = asdict(plain(branch_from=parent.name, branch_at=1152))
    assert refused(values | change).startswith(f"error: {said}")


@pytest.mark.parametrize("kept", [True, False])
def test_a_full_state_needs_the_stream_of_its_parent(plain, other_stream, refused, kept):
    parent = train(plain(), progress=quiet, keep=[1152] if kept else [])
    values = asdict(plain(branch_from=parent.name, branch_at=1152, stream=other_stream))
    assert refused(values).startswith(f"error: stream = {other_stream!r}: must be the parent's")


def test_weights_need_the_vocabulary_of_their_parent(plain, corpus, tmp_path, refused):
    small = str(tmp_path / "small")
    prepare(Preparation(corpus=corpus, vocab_size=300, validation_fraction=0.1, stream=small), progress=quiet)
    parent = train(plain(), progress=quiet)
    values = asdict(plain(branch_from=parent.name, stream=small, branch_weights_only=True))
    assert refused(values).startswith(f"error: stream = {small!r}: must ")


def test_a_measured_past_cannot_be_trained_again(plain, refused):
    parent = train(plain(time_budget=0.3), progress=quiet, keep=[384])
    values = asdict(plain(branch_from=parent.name, branch_at=768, token_budget=3840))
    assert refused(values).startswith("error: branch_at = 768: must be a checkpoint of ")
    train(plain(branch_from=parent.name, branch_at=384, token_budget=1152), progress=quiet)  # what it kept, it can


def test_a_parent_that_has_not_ended_has_no_end_to_branch_from(plain, ctrl_c, refused):
    with ctrl_c(2):
        train(plain(), progress=quiet)
    name = resolve(plain()).run.name
    for change in ({}, {"branch_weights_only": True}):
        values = asdict(plain(branch_from=name, token_budget=7680, **change))
        assert refused(values).startswith(f"error: branch_from = '{name}': has not ended")
