"""The functional scaling law against its formula, a noisy quadratic, random schedules, and runs of known laws."""

from dataclasses import replace
from math import log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad

from lib.check import BadInput
from lib.theory import Law, along, best_switch, final, fit, in_words, optimal, rivals, simulate, switch_losses

HARD, EASY = Law(2.5, 3.0, 0.3, 1.8, 400.0, 0.05), Law(2.5, 3.0, 0.9, 1.5, 400.0, 0.05)  # s against 1 − 1/β
laws = st.builds(Law, st.floats(0, 3), st.floats(0.1, 5), st.floats(0.1, 2), st.floats(1.1, 5), st.floats(1, 500),
                 st.floats(0.001, 1))
schedules = st.lists(st.tuples(st.sampled_from([64, 256, 512, 2048]), st.integers(1, 40)), min_size=1, max_size=4)


@settings(max_examples=30)
@given(laws, schedules)
def test_the_law_is_its_formula(law, stages):
    batch = np.repeat(*np.transpose(stages)).astype(float)
    end = len(batch) * law.rate

    def kernel(tau):
        return (end - tau + 1) ** -(2 - 1 / law.beta)

    noise = sum(quad(kernel, i * law.rate, (i + 1) * law.rate)[0] / size for i, size in enumerate(batch))
    direct = law.floor + law.amplitude * (end + 1) ** -law.s + law.noise * noise
    assert simulate(law, batch)[-1] == pytest.approx(direct, rel=1e-6)
    assert final(law, [(size, size * count) for size, count in stages]) == pytest.approx(direct, rel=1e-6)
    assert simulate(law, batch)[0] == pytest.approx(simulate(law, batch[:1])[0])  # the future has no say


@settings(max_examples=30)
@given(laws, schedules)
def test_the_loss_along_a_run_is_the_one_simulated(law, stages):
    batch = np.repeat(*np.transpose(stages)).astype(float)
    in_tokens = [(size, size * count) for size, count in stages]
    assert along(law, in_tokens, np.cumsum(batch)) == pytest.approx(simulate(law, batch), rel=1e-9)
    assert along(law, in_tokens, [0.0]) == pytest.approx(law.floor + law.amplitude)
    assert along(law, in_tokens, [batch.sum()]) == pytest.approx(final(law, in_tokens))


@pytest.mark.parametrize(("noise", "words"), [
    (1e-3, "no lower than the best constant T, 1,024; it stays at its smallest T, 1,024, for 100% of the tokens, and "
     "ends at 1,024"),
    (1e6, "no lower than the best constant T, 12,288; it stays at its smallest T, 12,288, for 100% of the tokens, and "
     "ends at 12,288")])
def test_without_noise_the_smallest_t_is_best_and_with_noise_alone_the_largest(noise, words):
    law = replace(HARD, noise=noise)
    schedules = rivals(law, 1e6, 1024, 12_288)
    assert [*schedules] == ["best schedule", "constant 1,024", "constant 12,288"]
    assert in_words(law, schedules).endswith(f" nat, {words}")


def test_the_best_schedule_is_no_worse_than_any_constant():
    schedules = rivals(HARD, 1e7, 1024, 12_288)
    best, *constants = (final(HARD, stages) for stages in schedules.values())
    assert best < min(constants) - 0.01
    assert min(constants) < final(HARD, [(1024, 1e7)])
    assert f"at {best:.4f} nat, {min(constants) - best:.4f} nat below the best constant T" in in_words(HARD, schedules)
    assert all(sum(tokens for _, tokens in stages) == pytest.approx(1e7) for stages in schedules.values())


def quadratic(batch, s, beta, rate=0.02, modes=4000):
    """Excess loss, in expectation, of SGD on a quadratic with eigenvalues j^-β whose gradient noise is the curvature's.

    Weights are such that the noiseless excess falls as t^-s.
    """
    eigenvalues = np.arange(1, modes + 1.0) ** -beta
    square, excess = np.arange(1, modes + 1.0) ** (-beta * s - 1) / eigenvalues, []
    for tokens in batch:
        square = (1 - rate * eigenvalues) ** 2 * square + rate**2 * eigenvalues * 300 / tokens
        excess.append(float(eigenvalues @ square) / 2)
    return np.array(excess)


@pytest.mark.parametrize(("s", "beta"), [(0.3, 1.8), (0.8, 1.5)])
def test_a_noisy_quadratic_follows_the_law(s, beta):
    budget, small, large = 2000 * 64, 64, 512
    constants = [np.full(budget // size, float(size)) for size in (small, 2 * small, large)]
    found = fit([(batch, quadratic(batch, s, beta)) for batch in constants])
    assert found.r2 > 0.995
    for at in (0.25, 0.5, 0.75, 0.9):
        batch = np.repeat([float(small), float(large)], [int(at * budget / small), int((1 - at) * budget / large)])
        measured, predicted = quadratic(batch, s, beta), simulate(found.law, batch)
        assert predicted[-1] == pytest.approx(measured[-1], rel=0.1)
        after = int(at * budget / small) + 5  # the fall after the switch, too
        assert predicted[after] == pytest.approx(measured[after], rel=0.1)
    # The exponents of the quadratic itself, from late times without noise, and of how its noise fades.
    quiet = quadratic(np.full(20_000, 1e12), s, beta)
    assert log(quiet[4_999] / quiet[19_999]) / log(4) == pytest.approx(s, abs=0.05)
    fading = np.diff(quadratic(np.full(8_000, 64.0), 50.0, beta))  # ∝ the kernel
    assert log(fading[1_999] / fading[7_998]) / log(4) == pytest.approx(2 - 1 / beta, abs=0.1)


def random_schedule(chance, budget, smallest, largest):
    """One of many shapes: two stages, growing, shrinking, or any."""
    count = int(chance.integers(1, 9))
    sizes = np.exp(chance.uniform(log(smallest), log(largest), count))
    kind = chance.integers(4)
    sizes = {0: np.sort(sizes), 1: np.sort(sizes)[::-1], 2: np.array([smallest, largest])}.get(int(kind), sizes)
    return [*zip(sizes, chance.dirichlet(np.ones(len(sizes))) * budget, strict=True)]


@pytest.mark.parametrize("law", [HARD, EASY])
def test_the_best_schedule_beats_a_thousand_random_ones(law):
    budget, smallest, largest = 1.1e6, 1024, 12_288
    stages = optimal(law, budget, smallest, largest)
    assert sum(tokens for _, tokens in stages) == pytest.approx(budget)
    assert all(smallest * (1 - 1e-9) <= size <= largest * (1 + 1e-9) for size, _ in stages)
    chance = np.random.default_rng(0)
    others = [final(law, random_schedule(chance, budget, smallest, largest)) for _ in range(1000)]
    others += [final(law, [(size, budget)]) for size in np.geomspace(smallest, largest, 30)]
    others += [*switch_losses(law, smallest, largest, budget, np.linspace(0, 1, 101))]
    assert final(law, stages) <= min(others) + 1e-9


def test_an_easy_task_grows_throughout_as_derived():
    stages = optimal(EASY, 1e7, 1, 1e9)
    sizes, tokens = np.transpose(stages)
    left = np.cumsum((EASY.rate * tokens / sizes)[::-1])[::-1]  # time to the end
    middle = left - EASY.rate * tokens / sizes / 2
    slope = np.polyfit(np.log(middle[50:150] + 1), np.log(sizes[50:150]), 1)[0]
    assert slope == pytest.approx(1 / (2 * EASY.beta) - 1, abs=0.02)
    assert (np.diff(sizes) > 0).all()


def test_a_hard_task_stays_small_for_most_tokens_and_for_more_the_longer_the_run():
    shares, hard = [], replace(HARD, s=0.1)
    for budget in (1e6, 1e7, 1e8, 1e9):
        sizes, tokens = np.transpose(optimal(hard, budget, 1024, 1e9))
        shares.append(tokens[sizes > 1024 * 1.01].sum() / budget)
    assert [law.hard for law in (hard, HARD, EASY)] == [True, True, False]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.3


def test_what_is_left_after_the_best_switch_grows_as_a_power_of_the_budget():
    """D − P* ∝ D^γ with γ = (1 + s) / (2 − 1/β), from the derivative of the two-stage loss."""
    budgets = np.array([1e9, 1e10, 1e11])
    rest = [(1 - best_switch(HARD, 1024, 4096, budget)) * budget for budget in budgets]
    gamma = np.polyfit(np.log(budgets), np.log(rest), 1)[0]
    assert gamma == pytest.approx((1 + HARD.s) / (2 - 1 / HARD.beta), abs=0.05)


def curve(law, batch, chance, noise=0.1):
    batch = np.asarray(batch, float)
    return batch, simulate(law, batch) + noise * np.sqrt(1024 / batch) * chance.standard_normal(len(batch))


@pytest.mark.parametrize("law", [HARD, EASY])
def test_a_fit_predicts_runs_that_it_has_not_seen(law):
    chance, small, large, budget = np.random.default_rng(1), 1024, 12_288, 1_105_920
    switch = np.repeat([small, large], [540, 45])
    curves = [curve(law, batch, chance) for batch in (np.full(1080, small), np.full(90, large), switch)]
    curves[0][1][:50] = np.nan  # a warm-up
    found = fit(curves)
    assert found.r2 > 0.98
    fractions = [0.25, 0.75, 0.9]
    predicted, true = (switch_losses(one, small, large, budget, fractions) for one in (found.law, law))
    assert predicted == pytest.approx(true, abs=0.05)
    assert found.law.s == pytest.approx(law.s, rel=0.5)


def test_a_fit_says_when_it_is_poor():
    batch = np.full(400, 1024.0)
    rising = fit([(batch, 4 + np.linspace(0, 1, 400)), (np.full(100, 4096.0), 5 - np.linspace(0, 1, 100))])
    assert rising.r2 < 0.7
    assert rising.residual > 0.1


@pytest.mark.parametrize(("name", "value"), [("s", 0.0), ("beta", 1.0), ("noise", -1.0), ("rate", 0.0),
                                             ("amplitude", -0.1)])
def test_a_law_that_cannot_be_is_refused(name, value):
    with pytest.raises(BadInput, match=f"^{name} = "):
        Law(**(vars(HARD) | {name: value}))
