"""Schedules and rules against the examples of the experiment's description, published figures and properties."""

from dataclasses import replace
from math import cos, pi, sqrt

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lib.check import BadInput
from lib.config import RunConfig
from lib.plan import updates
from lib.rules import Hyperparameters, half_life, rescale
from lib.schedule import LR_SCHEDULES, fallen, learning_rate, nearest_multiple, stage_at

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
    assert [stage.tokens_per_step for stage in config.resolved()] == resolved
    multipliers = [config.hyperparameters(stage).lr_multiplier for stage in config.resolved()]
    assert multipliers == pytest.approx([0.288675, 0.5, 1], abs=1e-6)
    assert [stage.start for stage in config.resolved()] == pytest.approx([0, 1 / 3, 2 / 3])


def late_switch(small, large, at, **more):
    return RunConfig(schedule="late_switch", small_tokens_per_step=small, tokens_per_step=large, switch_at=at,
                     device_token_capacity=1024, token_budget=10**9, **more)


def test_a_late_switch_as_published():
    """1,024 to 2,560 sequences at 75 % of the tokens: Wang et al. (arXiv 2602.14208), here in rows of 1,024 tokens."""
    config = late_switch(1024 * 1024, 2560 * 1024, 0.75, scaling_rule="none")
    assert [(stage.start, stage.tokens_per_step) for stage in config.resolved()] == [(0, 1024**2), (0.75, 2560 * 1024)]
    assert config.arm == "switch 1,048,576 to 2,621,440 at 0.75, lr unscaled"
    scaled = late_switch(1024, 4096, 0.5, scaling_rule="sqrt-lr")
    assert [scaled.hyperparameters(stage).lr_multiplier for stage in scaled.resolved()] == [0.5, 1]


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
    assert sum(third / stage.tokens_per_step for stage in config.resolved()) == pytest.approx(14_496, abs=3)


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
    stages = dividers(98_304, 8_192, lengths=[0.25, 0.25]).resolved()
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


@given(st.floats(0, 2), st.floats(0, 0.9), st.sampled_from(LR_SCHEDULES))
def test_curves_stay_between_their_ends(progress, warmup, curve):
    lr = learning_rate(progress, 1.0, 0.2, warmup, curve)
    assert 0 <= lr <= 1
    if progress >= warmup:
        assert lr >= 0.2 - 1e-12
    if progress >= 1:
        assert lr == pytest.approx(1.0 if curve == "constant" else 0.2)


def test_quarter_cosine_by_hand():
    assert learning_rate(0.6, 1.0, 0.1, 0.2, "quarter-cosine") == pytest.approx(0.1 + 0.9 * cos(pi / 4))
    assert learning_rate(1.0, 1.0, 0.1, 0.2, "quarter-cosine") == pytest.approx(0.1)


@given(st.floats(0.01, 1), st.floats(0, 0.9), st.floats(0, 0.9), st.sampled_from(LR_SCHEDULES))
def test_where_a_curve_has_fallen_to_a_level(level, floor, warmup, curve):
    found = fallen(level, 2.0, 2.0 * floor, warmup, curve)
    if curve == "constant" or level < floor * (1 - 1e-9):
        assert found is None
    elif found is not None:  # on the floor itself, rounding decides
        assert warmup <= found <= 1
        assert learning_rate(found, 2.0, 2.0 * floor, warmup, curve) == pytest.approx(2 * level)


def seesaw(alpha=2.0, base=1000, cap=10**9, capacity=2, **more):
    return RunConfig(schedule="seesaw", alpha=alpha, tokens_per_step=base, max_tokens_per_step=cap, seq_len=2,
                     device_token_capacity=capacity, token_budget=4000 * 1000, lr=1.0, warmup_fraction=0.0, **more)


@pytest.mark.parametrize(("curve", "limit"), [("quarter-cosine", 2 / pi), ("linear", 1 / 2), ("cosine", 1 / 2)])
def test_updates_of_seesaw_tend_to_the_mean_of_the_curve(curve, limit):
    """Meterez et al. have 2/π from a quarter of a cosine; half a wave, like a line to 0, has the mean 1/2."""
    shares = [sum(1 for _ in updates(seesaw(alpha, lr_schedule=curve), None)) / 4000 for alpha in (2, 1.3, 1.05, 1.01)]
    assert shares == sorted(shares, reverse=True)  # from above: between two cuts T waits
    assert shares[-1] == pytest.approx(limit, rel=0.02)


@example(1.7, "cosine", 0.0)  # 1,000 · 1.7³ = 4,913 lies between two rows
@given(st.floats(1.1, 4), st.sampled_from(["cosine", "quarter-cosine", "linear"]), st.floats(0, 0.3))
def test_seesaw_keeps_lr_times_root_t_and_then_cuts_by_alpha(alpha, curve, floor):
    config = seesaw(alpha, cap=16_000, lr_schedule=curve, min_lr=floor)
    stages = config.resolved()
    rates = [config.learning_rate(stage.start, stage) for stage in stages]
    sizes = [stage.tokens_per_step for stage in stages]
    for i, (rate, size, stage) in enumerate(zip(rates, sizes, stages, strict=True)):
        assert size % 2 == 0  # and the nearest: of the two at a tie, whichever a rounding of alpha^i makes it
        assert abs(size - min(1000 * alpha**i, 16_000)) <= 1 + 1e-6
        assert config.lr * stage.level == pytest.approx(learning_rate(stage.start, 1.0, floor, 0.0, curve), abs=1e-7)
        if size < 16_000:
            assert rate * sqrt(size) == pytest.approx(sqrt(1000), rel=2e-3)  # T in whole rows, and lr with it
        elif sizes[i - 1] == 16_000:
            assert rate == pytest.approx(rates[i - 1] / alpha)
    assert stages[-1].level / alpha < max(floor, 1e-3)  # no cut is left out


@pytest.mark.parametrize("alpha", [1.1, 2.0])
def test_a_seesaw_whose_cap_is_its_t_is_the_step_decay_of_a_constant_t(alpha):
    """The curve where it has been cut, from above: what a Seesaw is to be held against."""
    config, curve = seesaw(alpha, cap=1000), RunConfig(lr_schedule="cosine", lr=1.0, min_lr=0, warmup_fraction=0.0,
                                                       token_budget=4_000_000, tokens_per_step=1000, seq_len=2,
                                                       device_token_capacity=2)
    config = replace(config, lr=1.0, min_lr=0.0, warmup_fraction=0.0)
    assert {stage.tokens_per_step for stage in config.resolved()} == {1000}
    for stage in config.resolved():
        assert config.learning_rate(stage.start, stage) == pytest.approx(
            curve.learning_rate(stage.start, curve.resolved()[0]), abs=1e-6)
    assert config.arm == f"constant 1,000, lr in steps of {alpha:g}"


def test_seesaw_cuts_nothing_in_the_warm_up():
    config = replace(seesaw(), warmup_fraction=0.2)
    first, second = config.resolved()[:2]
    assert [config.learning_rate(at, first) for at in (0.0, 0.1, 0.2, 0.21)] == [0, 0.5, 1, 1]
    assert second.start == pytest.approx(0.2 + 0.8 / 2)
    assert config.learning_rate(second.start, second) == pytest.approx(1 / sqrt(2))
    assert config.arm == "seesaw 1,000 to 1,000,000,000 by 2"


@pytest.mark.parametrize(("bad", "said"), [
    (dict(alpha=1.0), "alpha = 1.0"), (dict(alpha=0.0), "alpha = 0.0"), (dict(cap=998), "max_tokens_per_step = 998"),
    (dict(cap=0), "max_tokens_per_step = 0"), (dict(cap=1001), "max_tokens_per_step = 1001"),
    (dict(lr_schedule="constant"), "lr_schedule = 'constant'"),
    (dict(scaling_rule="linear"), "scaling_rule = 'linear': cuts the learning rate by 1 where T grows by 2; it is st"),
])
def test_a_seesaw_that_cannot_be_or_is_past_the_bound_of_stability_is_refused(bad, said):
    with pytest.raises(BadInput, match=said):
        seesaw(**bad)


@pytest.mark.parametrize("rule", ["none", "half-life", "sqrt-lr", "sde", "sde-power"])
def test_a_seesaw_within_the_bound_is_taken(rule):
    assert len(seesaw(scaling_rule=rule, cap=4000).resolved()) == 10  # 2^-9 is the last level above a thousandth


def by_hand(stages, budget=10**7, **more):
    return RunConfig(schedule="stages", stages=stages, device_token_capacity=8192, tokens_per_step=24_576,
                     **{"token_budget": budget} | more)


def test_stages_by_hand_are_what_they_say():
    config = by_hand([[0, 8192], [1_000_000, 24_576]])
    assert [(stage.start, stage.tokens_per_step) for stage in config.resolved()] == [(0, 8192), (0.1, 24_576)]
    assert [config.hyperparameters(stage).lr_multiplier for stage in config.resolved()] == [sqrt(1 / 3), 1]
    assert config.arm == "stages 8,192 · 24,576 at 0.1"
    timed = by_hand([[0, 8192], [2.5, 24_576]], None, time_budget=10.0)
    assert [stage.start for stage in timed.resolved()] == [0, 0.25]
    thirds = by_hand([[0, 8192], [1000, 8192], [2000, 24_576]], 3000 * 8192)
    assert [stage.start * thirds.budget for stage in thirds.resolved()] == pytest.approx([0, 1000, 2000])


def test_long_lists_by_hand_have_names_that_tell_them_apart():
    long = [[[i * 100_000, 8192 * (1 + i // 2 + (i == odd))] for i in range(40)] for odd in (3, 4, 5)]
    names = {by_hand(stages).arm for stages in long}
    assert len(names) == 3
    assert all(len(name) < 60 for name in names)


@pytest.mark.parametrize("bad", [
    [], [[0]], [[0, 8192, 1]], [[1, 8192]], [[0, 8192], [0, 24_576]], [[0, 8192], [10**7, 24_576]], [[0, 0]],
    [[0, 8191]], [[0, -8192]], [[0, 8192.5]], [[0, 8192], [5, 8192], [4, 8192]], "0,8192", [["0", 8192]], [8192],
])
def test_stages_by_hand_that_do_not_fit(bad):
    with pytest.raises(BadInput, match=r"^stages = .*: must"):
        by_hand(bad)


@pytest.mark.parametrize(("name", "value", "owners"), [
    ("alpha", 2.0, "seesaw"), ("max_tokens_per_step", 8192, "seesaw or adaptive"), ("stages", [[0, 8192]], "stages")])
def test_a_parameter_of_another_schedule_is_refused(name, value, owners):
    with pytest.raises(BadInput, match=f"^{name} = .*: belongs to schedule {owners}, but schedule is constant"):
        RunConfig(token_budget=10**6, tokens_per_step=8192, device_token_capacity=8192, **{name: value})


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
