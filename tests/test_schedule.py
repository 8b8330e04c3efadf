"""Schedules and rules against the examples of the experiment's description, published figures and properties."""

from math import cos, pi, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.check import BadInput
from lib.config import RunConfig
from lib.rules import Hyperparameters, half_life, rescale
from lib.schedule import learning_rate, nearest_multiple, stage_at

THIRDS = [1 / 3, 1 / 3]


def dividers(base, capacity, wanted=(12, 4, 1), lengths=THIRDS, **more):
    return RunConfig(schedule="dividers", tokens_per_step=base, device_token_capacity=capacity, batch_dividers=wanted,
                     stage_length=lengths, token_budget=628_678_400, **more)


@pytest.mark.parametrize(("base", "capacity", "resolved"), [
    (98_304, 8_192, [8_192, 24_576, 98_304]),
    (245_760, 20_480, [20_480, 61_440, 245_760]),
])
def test_the_experiments_own_examples(base, capacity, resolved):
    config = dividers(base, capacity)
    assert [stage.tokens_per_step for stage in config.stages()] == resolved
    multipliers = [config.hyperparameters(stage).lr_multiplier for stage in config.stages()]
    assert multipliers == pytest.approx([0.288675, 0.5, 1], abs=1e-6)
    assert [stage.start for stage in config.stages()] == pytest.approx([0, 1 / 3, 2 / 3])


def late_switch(small, large, at, **more):
    return RunConfig(schedule="late_switch", small_tokens_per_step=small, tokens_per_step=large, switch_at=at,
                     device_token_capacity=1024, token_budget=10**9, **more)


def test_a_late_switch_as_published():
    """1,024 to 2,560 sequences at 75 % of the tokens: Wang et al. (arXiv 2602.14208), here in rows of 1,024 tokens."""
    config = late_switch(1024 * 1024, 2560 * 1024, 0.75, scaling_rule="none")
    assert [(stage.start, stage.tokens_per_step) for stage in config.stages()] == [(0, 1024**2), (0.75, 2560 * 1024)]
    assert config.arm == "switch 1,048,576 to 2,621,440 at 0.75"
    scaled = late_switch(1024, 4096, 0.5, scaling_rule="sqrt-lr")
    assert [scaled.hyperparameters(stage).lr_multiplier for stage in scaled.stages()] == [0.5, 1]


@pytest.mark.parametrize(("small", "at", "said"), [
    (0, 0.5, "small_tokens_per_step = 0"), (1000, 0.5, "small_tokens_per_step = 1000"), (1024, 0.0, "switch_at = 0.0"),
    (1024, 1.0, "switch_at = 1.0")])
def test_a_late_switch_that_cannot_be_is_refused(small, at, said):
    with pytest.raises(BadInput, match=said):
        late_switch(small, 4096, at)


def test_updates_at_twenty_tokens_a_parameter():
    config = dividers(245_760, 20_480)
    assert config.token_budget // config.tokens_per_step == 2_558
    third = config.token_budget / 3
    assert sum(third / stage.tokens_per_step for stage in config.stages()) == pytest.approx(14_496, abs=3)


def test_ties_round_upward_and_nothing_rounds_to_zero():
    assert nearest_multiple(1.5 * 1024, 1024) == 2048
    assert nearest_multiple(2.5 * 1024, 1024) == 3072
    assert nearest_multiple(1.49 * 1024, 1024) == 1024
    assert nearest_multiple(1, 1024) == 1024


@given(st.floats(1, 1e9), st.integers(1, 10**6))
def test_nearest_multiple_is_nearest(value, unit):
    found = nearest_multiple(value, unit)
    assert found % unit == 0
    assert found >= unit
    assert abs(found - value) <= unit / 2 * (1 + 1e-9) or found == unit


@pytest.mark.parametrize("start", [0.25, 0.5])
def test_both_sides_of_a_boundary(start):
    stages = dividers(98_304, 8_192, lengths=[0.25, 0.25]).stages()
    index = [stage.start for stage in stages].index(start)
    assert stage_at(stages, start) == index
    assert stage_at(stages, start - 1e-12) == index - 1
    assert stage_at(stages, 0.0) == 0
    assert stage_at(stages, 7.0) == 2


@pytest.mark.parametrize("bad", [
    dict(wanted=[12, 4, 1], lengths=[0.3]), dict(wanted=[], lengths=[]), dict(wanted=[0, 1], lengths=[0.5]),
    dict(wanted=[-4, 1], lengths=[0.5]), dict(wanted=[4, 1], lengths=[1.0]), dict(wanted=[4, 1], lengths=[0.0]),
    dict(wanted=[4, 2, 1], lengths=[0.6, 0.6]),
])
def test_dividers_that_do_not_fit(bad):
    with pytest.raises(BadInput, match=r"^(batch_dividers|stage_length) = .*: must"):
        dividers(98_304, 8_192, **bad)


def test_cosine_by_hand():
    def lr(progress):
        return learning_rate(progress, 1.0, 0.1, 0.2, "cosine")

    assert lr(0) == 0
    assert lr(0.1) == pytest.approx(0.5)
    assert lr(0.2) == 1
    assert lr(0.6) == pytest.approx(0.55)
    assert lr(0.4) == pytest.approx(0.1 + 0.9 * (1 + cos(pi / 4)) / 2)
    assert lr(1) == pytest.approx(0.1)
    assert lr(3) == pytest.approx(0.1)


@given(st.floats(0, 2), st.floats(0, 0.9), st.sampled_from(["cosine", "linear", "constant"]))
def test_curves_stay_between_their_ends(progress, warmup, curve):
    lr = learning_rate(progress, 1.0, 0.2, warmup, curve)
    assert 0 <= lr <= 1
    if progress >= warmup:
        assert lr >= 0.2 - 1e-12
    if progress >= 1:
        assert lr == pytest.approx(1.0 if curve == "constant" else 0.2)


BASE = Hyperparameters(1.0, 0.9, 0.95, 1e-8, 0.1)


@pytest.mark.parametrize(("ratio", "beta1", "beta2"), [(1 / 16, 0.993437, 0.996799), (1 / 32, 0.996713, 0.998398)])
def test_power_form_against_published_values(ratio, beta1, beta2):
    found = rescale("sde-power", ratio, BASE)
    assert (found.beta1, found.beta2) == pytest.approx((beta1, beta2), abs=5e-7)
    assert found.lr_multiplier == sqrt(ratio)
    assert found.eps == pytest.approx(1e-8 / sqrt(ratio))


@pytest.mark.parametrize(("lr", "ratio", "published"), [
    (1e-4, 1 / 16, 2.5e-5), (1e-4, 1 / 32, 1.768e-5), (1e-4, 16, 4e-4), (1e-4, 32, 5.66e-4),
])
def test_square_root_rule_against_published_rates(lr, ratio, published):
    assert lr * rescale("sqrt-lr", ratio, BASE).lr_multiplier == pytest.approx(published, rel=1e-3)


def test_half_lives_against_published_values():
    assert half_life(2**19, 0.95) == pytest.approx(7.08e6, rel=1e-3)
    assert rescale("half-life", 1 / 2, BASE).beta2 == pytest.approx(0.9747, abs=5e-5)
    assert rescale("half-life", 1 / 4, BASE).beta2 == pytest.approx(0.9873, abs=5e-5)
    assert rescale("half-life", 1 / 4, BASE).lr_multiplier == 1


@given(st.floats(0.01, 5), st.sampled_from(["half-life", "half-life-both", "sde-power"]))
def test_half_life_in_tokens_is_kept(ratio, rule):
    assert half_life(1000 * ratio, rescale(rule, ratio, BASE).beta2) == pytest.approx(half_life(1000, 0.95))


def test_linear_form_agrees_to_first_order_and_refuses_the_impossible():
    small = 1 + 1e-4
    linear, power = rescale("sde", small, BASE), rescale("sde-power", small, BASE)
    assert (linear.beta1, linear.beta2) == pytest.approx((power.beta1, power.beta2), abs=1e-6)
    with pytest.raises(BadInput, match="scaling_rule = 'sde'"):
        rescale("sde", 10.5, BASE)


@given(st.floats(0.05, 20), st.sampled_from(["none", "linear", "sqrt-lr", "sde-power", "half-life"]))
def test_decay_per_token_is_kept(ratio, rule):
    found = rescale(rule, ratio, BASE, wd_rule="per-token")
    assert found.lr_multiplier * found.weight_decay / ratio == pytest.approx(BASE.weight_decay)
    assert rescale(rule, ratio, BASE).weight_decay == BASE.weight_decay


def test_a_ratio_of_one_changes_nothing():
    for rule in ("none", "linear", "sqrt-lr", "sde", "sde-power", "half-life", "half-life-both"):
        found = rescale(rule, 1.0, BASE, wd_rule="per-token")
        assert list(vars(found).values()) == pytest.approx(list(vars(BASE).values()))
