"""The gates against a trainer whose true effects are known, and the shapes of what they say."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from lib.check import BadInput
from lib.config import ROOT, RunConfig, read_yaml
from lib.gates import Experiment, Floor, changed, decide, described, in_turns, measure_floor, read

BASE = RunConfig(tokens_per_step=4096, device_token_capacity=2048, seq_len=128, time_budget=10.0)
TABLE = [
    {"id": "BS-1", "change": {"tokens_per_step": 2048}, "priority": "high"},
    {"id": "BS-2", "change": {"tokens_per_step": 1024, "device_token_capacity": 1024}, "after": "BS-1"},
    {"id": "BS-3", "change": {"tokens_per_step": 8192}},
    {"id": "CMP-1", "change": {"compile": "default", "fullgraph": True}, "judge": "speed", "again": True},
    {"id": "CMP-2", "change": {"compile": "max-autotune"}, "judge": "speed", "again": True},
    {"id": "CMP-3", "change": {"compile": "max-autotune", "fullgraph": True}, "after": ["CMP-1", "CMP-2"]},
    {"id": "MP-1", "change": {"matmul_precision": "medium"}},
    {"id": "GC-1", "change": {"skip_gc": True}, "judge": "speed"},
    {"id": "CKPT-1", "change": {"activation_checkpointing": True}},
]
MARGINS = {"loss": 0.0005, "speed": 0.005}
SEED_SD, PAIR_SD, TIME_SD, PACE_SD = 0.02, 0.002, 0.001, 0.01


class Fake:
    """A trainer: bits per byte and tokens/s of settings, with seed noise that pairs share, and noise of the machine."""

    def __init__(self, study, sizes, settings=(), paces=(), fails=()):
        self.chance, self.made = np.random.default_rng(study), []
        self.luck = np.random.default_rng(10_000 + study).normal(0, SEED_SD, 1000)
        self.sizes, self.settings, self.paces, self.fails = dict(sizes), dict(settings), dict(paces), dict(fails)

    def __call__(self, config):
        self.made.append(config)
        set_to = {f"{name} {value}" for name, value in vars(config).items()}
        for setting, reason in self.fails.items():
            if setting in set_to:
                return {"status": "failed", "reason": reason, "seed": config.seed}
        pace = sum(gain for setting, gain in self.paces.items() if setting in set_to) + self.chance.normal(0, PACE_SD)
        loss = 2.0 + self.sizes[config.tokens_per_step] + self.luck[config.seed] - 0.1 * pace
        loss += sum(effect for setting, effect in self.settings.items() if setting in set_to)
        loss += self.chance.normal(0, PAIR_SD / 2**0.5) + self.chance.normal(0, TIME_SD / 2**0.5)
        return {"status": "finished", "reason": "", "validation_bits_per_byte": loss, "seed": config.seed,
                "tokens_per_second": 10_000 * np.exp(pace)}


FLAT = dict.fromkeys([1024, 2048, 4096, 8192], 0.0)
FLOOR = Floor(loss=0.001, speed=0.014)


def study(trial, seeds=(0, 1, 2, 3, 4)):
    return [*decide(read(TABLE), BASE, seeds, FLOOR, MARGINS, trial)]


def outcomes(decisions):
    return {decision.name: decision.outcome for decision in decisions}


def test_the_truly_better_are_kept_and_the_others_pruned_or_dropped():
    sizes = {4096: 0.0, 2048: -0.03, 1024: -0.05, 8192: 0.08}
    decisions = study(Fake(11, sizes, {"matmul_precision medium": 0.02}, {"compile max-autotune": 0.2}))
    assert outcomes(decisions) == {
        "BS-1": "kept", "BS-2": "kept", "BS-3": "dropped", "CMP-1": "dropped", "CMP-2": "kept", "CMP-3": "dropped",
        "MP-1": "dropped", "GC-1": "dropped", "CKPT-1": "dropped"}
    by_name = {decision.name: decision for decision in decisions}
    assert by_name["BS-2"].against.tokens_per_step == 2048
    assert by_name["BS-3"].loss.difference == pytest.approx(0.13, abs=0.01)
    assert by_name["MP-1"].reason == "loss: worse"
    assert np.exp(-by_name["CMP-2"].speed.difference) == pytest.approx(np.exp(0.2), rel=0.03)


def test_what_the_table_prunes():
    decisions = study(Fake(2, FLAT | {2048: 0.05}))
    assert [(d.name, d.reason) for d in decisions if d.outcome == "pruned"] == [
        ("BS-2", "needs BS-1 to be kept"), ("CMP-3", "needs CMP-1 or CMP-2 to be kept")]
    too_small = [{"id": "DB-2", "change": {"device_token_capacity": 8192}}]
    (decision,) = decide(read(too_small), BASE, [0, 1], FLOOR, MARGINS, Fake(3, FLAT))
    assert decision.outcome == "pruned"
    assert "tokens_per_step = 4096: must be a multiple of device_token_capacity 8,192" in decision.reason


def test_a_change_of_shape_has_the_compile_settings_tried_again():
    """CMP-1 was dropped before the batch changed; the try after it counts for itself, once."""
    table = [TABLE[3], TABLE[0], TABLE[1]]
    trial = Fake(4, {4096: 0.0, 2048: -0.03, 1024: -0.05})
    decisions = [*decide(read(table), BASE, range(4), FLOOR, MARGINS, trial)]
    assert [decision.name for decision in decisions] == ["CMP-1", "BS-1", "BS-2", "CMP-1 again"]
    assert decisions[-1].against.tokens_per_step == 1024
    same = [*decide(read(table), BASE, range(4), FLOOR, MARGINS, Fake(5, FLAT | {2048: 0.05}))]
    assert [decision.name for decision in same] == ["CMP-1", "BS-1", "BS-2"]


def test_a_failure_is_a_row_and_the_study_goes_on():
    fails = {"fullgraph True": "Unsupported: a graph break", "activation_checkpointing True": "out of memory"}
    trial = Fake(6, FLAT | {8192: -0.05}, fails=fails)
    found = outcomes(decisions := study(trial))
    assert (found["CMP-1"], found["CKPT-1"], found["BS-3"], found["GC-1"]) == ("failed", "failed", "kept", "dropped")
    assert "CMP-1 again" not in found, "the batch was settled before it"
    assert [d.reason for d in decisions if d.name == "CKPT-1"] == ["out of memory"]
    assert sum(config.activation_checkpointing for config in trial.made) == 1, "what failed is not tried on more seeds"


def test_two_hundred_studies_keep_what_is_better():
    """Nothing kept that is not better in more than 5 % of tries; single runs keep half of what does nothing."""
    false, tries, singles, true = 0, 0, 0, 0
    for number in range(200):
        trial = Fake(number, FLAT | {2048: -0.02})
        decisions = {decision.name: decision for decision in study(trial)}
        true += decisions["BS-1"].outcome == "kept"
        sizes = {name: {of.config.tokens_per_step, of.against.tokens_per_step} for name, of in decisions.items()}
        idle = [of for name, of in decisions.items() if of.loss and (len(sizes[name]) == 1 or 2048 not in sizes[name])]
        tries += len(idle)
        false += sum(decision.outcome == "kept" for decision in idle)
        for decision in idle:
            first = decision.rows[decision.rows.seed == 0].set_index("side").validation_bits_per_byte
            singles += first["change"] < first["best"]
    assert tries > 900
    assert false / tries <= 0.05
    assert true > 190
    assert singles / tries > 0.4


def test_turns_alternate_and_repeats_differ():
    trial = Fake(7, FLAT)
    rows = in_turns({"change": replace(BASE, skip_gc=True), "best": BASE}, [3, 4, 5], 9, trial)
    assert [*rows.side] == ["change", "best", "best", "change", "change", "best"]
    assert {(config.seed, config.repeat) for config in trial.made} == {(3, 9), (4, 9), (5, 9)}
    study(second := Fake(8, FLAT))
    bases = [(config.seed, config.repeat) for config in second.made if changed(config, BASE) == "nothing"]
    assert len({*bases}) == len(bases) > 20, "the best so far runs anew beside each change"


def test_the_floor_is_what_repeats_and_seeds_differ_by():
    chance = np.random.default_rng(0)
    rows = pd.DataFrame([{"seed": seed, "repeat": repeat, "tokens_per_second": np.exp(chance.normal(9, 0.05)),
                          "validation_bits_per_byte": 1 + 0.1 * seed + chance.normal(0, 0.01)}
                         for seed in range(100) for repeat in (0, 1)])
    floor, seeds = measure_floor(rows)
    assert floor.loss == pytest.approx(0.01 * 2**0.5, rel=0.2)
    assert floor.speed == pytest.approx(0.05 * 2**0.5, rel=0.2)
    assert seeds == pytest.approx(0.1 * np.arange(100).std(ddof=1) * 2**0.5, rel=0.02)
    with pytest.raises(BadInput, match="repeats = 1"):
        measure_floor(rows[rows["repeat"] == 0])


@pytest.mark.parametrize(("row", "said"), [
    ({"id": "X", "change": {"tokens_per_steps": 1}}, "X: tokens_per_steps.*did you mean tokens_per_step"),
    ({"id": "X", "change": {}}, "X: change"),
    ({"id": "X", "change": {"lr": 0.1}, "judge": "speed"}, "X: judge = 'speed'"),
    ({"id": "X", "change": {"lr": 0.1}, "judge": "both"}, "X: judge = 'both'"),
    ({"id": "X", "change": {"lr": 0.1}, "after": "Y"}, "X: after = 'Y'"),
    ({"id": "X", "change": {"lr": 0.1}, "afters": "Y"}, "did you mean after"),
    ({"change": {"lr": 0.1}}, "must have an id"),
])
def test_a_table_that_cannot_be_is_refused(row, said):
    with pytest.raises(BadInput, match=said):
        read([row])


def test_what_it_says():
    decisions = study(Fake(9, FLAT | {2048: -0.05}))
    table = described(decisions)
    assert [*table.index][:3] == ["BS-1", "BS-2", "BS-3"]
    assert table.loc["BS-1", "outcome"] == "kept"
    assert table.loc["BS-1", "bits per byte"].startswith("−0.05")
    assert changed(replace(BASE, tokens_per_step=2048, skip_gc=True), BASE) == "tokens_per_step 2,048, skip_gc True"
    assert Experiment("A", {"lr": 1.0}).judge == "loss"


@pytest.mark.parametrize("file", sorted(ROOT.glob("params/*/07_five_minutes.yaml")), ids=lambda file: file.parent.name)
def test_the_tables_of_all_scales_can_be_tried(file):
    values = read_yaml(file)
    baseline = RunConfig(time_budget=1.0, tokens_per_step=values["base_tokens_per_step"], seq_len=values["seq_len"],
                         device_token_capacity=values["base_micro_batch"], compile=values.get("base_compile", "off"))

    def better_the_more_is_changed(config):
        changes = sum(value != getattr(baseline, name) for name, value in vars(config).items())
        return {"status": "finished", "reason": "", "tokens_per_second": 2.0**changes,
                "validation_bits_per_byte": 10 - changes}

    decisions = [*decide(read(values["experiments"]), baseline, [0, 1], Floor(0, 0), {"loss": 0.01, "speed": 0.01},
                         better_the_more_is_changed)]
    assert sum(decision.outcome == "kept" for decision in decisions) >= len(decisions) / 2
    refused = [decision.reason for decision in decisions if "does not go with" in decision.reason]
    assert all("must be a multiple of device_token_capacity" in reason for reason in refused)  # after a smaller T won
