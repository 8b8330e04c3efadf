"""The plan of a run is what its loop then does, and the past of two runs is what both of them did."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lib.clock import Costs
from lib.plan import common_past, totals, updates
from lib.runs import weights_sha256
from lib.step import Learner
from lib.train import train

COSTS = Costs(micro_batch_seconds=0.01, update_seconds=0.002)
SWITCH = {"lr_schedule": "constant", "scaling_rule": "none", "warmup_fraction": 0.1}
ALIKE = {"lr_schedule": "constant", "warmup_fraction": 0.0}  # at every progress
LATE = SWITCH | {"schedule": "late_switch", "small_tokens_per_step": 96}


def quiet(line):
    pass


@pytest.fixture
def plain(tiny):
    """Makes a configuration without validation; seeds are resolved."""
    return lambda **changes: tiny(**{"device_token_capacity": 96, "skip_validation": True, "data_seed": 0,
                                     "device": "cpu"} | changes)


@st.composite
def settings_of_runs(draw):
    """Any schedule, with any rates that go with it; `budget` is in tokens."""
    schedule = draw(st.sampled_from(["constant", "dividers", "late_switch"]))
    values = {"schedule": schedule, "tokens_per_step": 96 * draw(st.integers(1, 5)),
              "lr_schedule": draw(st.sampled_from(["cosine", "linear", "constant"])),
              "warmup_fraction": draw(st.sampled_from([0.0, 0.3])), "min_lr": draw(st.sampled_from([0.0, 0.001])),
              "scaling_rule": draw(st.sampled_from(["none", "sqrt-lr", "half-life"]))}
    if schedule == "dividers":
        count = draw(st.integers(1, 4))
        parts = draw(st.lists(st.integers(1, 9), min_size=count, max_size=count))
        values |= {"batch_dividers": draw(st.lists(st.integers(1, 5), min_size=count, max_size=count)),
                   "stage_length": [part / sum(parts) for part in parts[:-1]]}
    if schedule == "late_switch":
        values |= {"small_tokens_per_step": 96 * draw(st.integers(1, 5)),
                   "switch_at": draw(st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 0.9]))}
    return values


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=settings_of_runs(), budget=st.integers(480, 4000), by_tokens=st.booleans())
def test_the_plan_is_what_the_loop_logs(plain, costs, tmp_path_factory, values, budget, by_tokens):
    limit = {"token_budget": budget} if by_tokens else {"time_budget": budget / 96 * 0.012, "clock": "modelled"}
    config = plain(**values, **limit, runs=str(tmp_path_factory.mktemp("runs")))
    rows = train(config, progress=quiet).metrics()
    planned = list(updates(config, costs))
    assert rows.tokens_per_step.tolist() == [update.tokens for update in planned]
    assert rows.lr.tolist() == [update.lr for update in planned]
    assert rows.stage.tolist() == [update.stage for update in planned]


def test_nothing_is_planned_on_the_measured_clock(plain):
    config = plain(time_budget=1.0)
    assert list(updates(config, None)) == []
    assert common_past(config, config, None) == 0


PAIRS = {
    "two switches": (LATE | {"switch_at": 0.25}, LATE | {"switch_at": 0.5}, 960),
    "a switch and none": (LATE | {"switch_at": 0.75}, SWITCH | {"tokens_per_step": 96}, 2880),
    "a switch inside an update": (LATE | {"switch_at": 0.26}, SWITCH | {"tokens_per_step": 96}, 1056),
    "switches to other T": (LATE | {"switch_at": 0.5}, LATE | {"switch_at": 0.5, "tokens_per_step": 192}, 1920),
    "another budget": (ALIKE, ALIKE | {"token_budget": 1920}, 1920),
    "another rate": ({"lr": 0.01}, {"lr": 0.02}, 0),
    "another curve after the warm-up": ({"lr_schedule": "linear", "warmup_fraction": 0.5}, {"warmup_fraction": 0.5},
                                        1920),
    "another floor after the warm-up": ({"min_lr": 0.005, "warmup_fraction": 0.5}, {"warmup_fraction": 0.5}, 1920),
    "another weight decay": ({}, {"weight_decay": 0.2}, 0),
    "more checkpoints": ({}, {"checkpoint_every": 1000}, 3840),
    "another seed": ({}, {"seed": 1}, 0),
    "another order": ({}, {"data_seed": 1}, 0),
    "another model": ({}, {"mlp_size": 48}, 0),
    "another norm to clip to": ({}, {"grad_clip": 0.1}, 0),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_common_past_is_as_long_as_the_weights_of_two_runs_agree(name, plain, tmp_path, monkeypatch):
    """Weights after each update; with the same tokens read."""
    apply, weights = Learner.apply, []

    def watch(learner, *arguments):
        apply(learner, *arguments)
        weights[-1].append(weights_sha256(learner.model.state_dict()))

    monkeypatch.setattr(Learner, "apply", watch)
    one, other, tokens = PAIRS[name]
    configs, runs = [plain(**change) for change in (one, other)], []
    for number, config in enumerate(configs):
        weights.append([])
        runs.append(train(replace(config, runs=str(tmp_path / str(number))), progress=quiet))
    assert common_past(*configs, None) == common_past(*reversed(configs), None) == tokens
    agreed = 0
    for reached, other_reached, *hashes in zip(*(run.metrics().tokens for run in runs), *weights, strict=False):
        if reached != other_reached or hashes[0] != hashes[1]:
            break
        agreed = reached
    assert agreed == tokens
    losses = [run.metrics().loss[lambda loss, run=run: run.metrics().tokens <= tokens].tolist() for run in runs]
    assert losses[0] == losses[1]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(one=settings_of_runs(), other=settings_of_runs(), times=st.tuples(st.booleans(), st.booleans()))
def test_the_common_past_is_symmetric_and_no_longer_than_either_run(plain, one, other, times):
    limits = [{"time_budget": 0.5, "clock": "modelled"} if timed else {"token_budget": 3840, "clock": "modelled"}
              for timed in times]
    configs = [plain(**values | limit) for values, limit in zip((one, other), limits, strict=True)]
    tokens = common_past(*configs, COSTS)
    assert tokens == common_past(*reversed(configs), COSTS)
    sizes = [[update.tokens for update in updates(config, COSTS)] for config in configs]
    assert tokens <= min(map(sum, sizes))
    assert common_past(configs[0], configs[0], COSTS) == sum(sizes[0])
    assert common_past(configs[0], replace(configs[0], seed=1), COSTS) == 0
    assert common_past(configs[0], replace(configs[0], layers=1), COSTS) == 0


def test_a_past_in_common_on_the_modelled_clock(plain, costs, tmp_path):
    """Both have read as much by then, so that they stand at the same time."""
    config = plain(**LATE, switch_at=0.5, time_budget=0.48, clock="modelled")
    small = plain(**SWITCH, tokens_per_step=96, time_budget=0.48, clock="modelled")
    rows = train(config, progress=quiet).metrics()
    tokens = common_past(config, small, costs)
    assert tokens == rows[rows.stage == 0].tokens.max()
    other = train(small, progress=quiet).metrics()
    assert other[other.tokens <= tokens].loss.tolist() == rows[rows.stage == 0].loss.tolist()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=settings_of_runs(), budget=st.integers(480, 40_000))
def test_the_totals_are_the_sum_of_the_plan(plain, values, budget):
    config = plain(**values, token_budget=budget)
    sizes = [update.tokens for update in updates(config, None)]
    found = totals(config, COSTS)
    assert (found.updates, found.tokens) == (len(sizes), sum(sizes))
    assert totals(config, None) == replace(found, seconds=None)
    costs = [size // 96 * COSTS.micro_batch_seconds + COSTS.update_seconds for size in sizes[1:]]
    assert found.seconds == pytest.approx(sum(costs))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=settings_of_runs(), tenths=st.integers(5, 400))
def test_the_totals_of_a_time_budget_are_those_of_the_plan_but_for_rounding(plain, values, tenths):
    """Costs that binary fractions hold exactly: an update that ends with a stage, or the budget, does so in both."""
    costs, config = Costs(0.125, 0.0625), plain(**values, time_budget=tenths / 8, clock="modelled")
    sizes = [update.tokens for update in updates(config, costs)]
    found = totals(config, costs)
    assert (found.updates, found.tokens) == (len(sizes), sum(sizes))
    assert found.seconds == sum(size // 96 * 0.125 + 0.0625 for size in sizes[1:])


def test_what_a_time_budget_comes_to_is_not_known_without_costs(plain):
    assert totals(plain(time_budget=1.0), None) is None
