from math import isnan, nan, sqrt

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from lib.check import BadInput
from lib.stats import best, bins, by_choice, compare, completed, front, losses, mean_interval, noise_floor, summary

# Hours of extra sleep under two drugs, by patient: Student (1908), Biometrika 6; R's `sleep`.
DRUG_1 = pd.Series([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0])
DRUG_2 = pd.Series([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4])


def some_runs(**changes) -> pd.DataFrame:
    rows = [dict(run=f"{arm} {lr} {seed}", arm=arm, lr=lr, seed=seed, budget_kind="tokens", status="finished",
                 validation_loss=loss + 0.01 * seed, validation_bits_per_byte=loss / 3, steps=10, tokens=1000,
                 elapsed_seconds=2.0, tokens_per_second=500.0, final_lr=lr / 10)
            for arm, base in (("constant 1,024", 3.0), ("dividers 4,1", 2.9))
            for lr, loss in ((1e-4, base + 0.3), (3e-4, base), (1e-3, base + 0.2)) for seed in (0, 1, 2)]
    runs = pd.DataFrame(rows)
    for run, (column, value) in changes.items():
        runs.loc[int(run[1:]), column] = value
    return runs


def series(*values):
    return pd.Series(values, dtype=float)


def test_paired_t_of_students_sleep_data():
    result = compare(DRUG_1, DRUG_2, margin=0.1)
    assert result.difference == pytest.approx(-1.58)
    assert result.p_value == pytest.approx(0.002833, abs=5e-7)  # as R's t.test(paired = TRUE) prints
    assert result.interval == pytest.approx((-2.4598858, -0.7001142), abs=5e-8)
    assert (result.n, result.verdict) == (10, "better")
    assert compare(DRUG_2, DRUG_1, margin=0.1).verdict == "worse"


values = st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=12)


@settings(max_examples=50, deadline=None)
@given(values, st.sampled_from([0.8, 0.9, 0.95, 0.99]), st.floats(0.01, 3))
def test_numbers_and_verdict_agree_with_scipy(pairs, confidence, margin):
    treatment, baseline = (np.array(side) for side in zip(*pairs, strict=True))
    difference = treatment - baseline
    if np.std(difference) < 1e-6:
        return
    result = compare(pd.Series(treatment), pd.Series(baseline), margin, confidence)
    reference = scipy_stats.ttest_rel(treatment, baseline)
    assert result.p_value == pytest.approx(reference.pvalue, rel=1e-6, abs=1e-12)
    assert result.interval == pytest.approx(tuple(reference.confidence_interval(confidence)), rel=1e-9, abs=1e-9)
    above = scipy_stats.ttest_1samp(difference, -margin, alternative="greater").pvalue
    below = scipy_stats.ttest_1samp(difference, margin, alternative="less").pvalue
    alpha = 1 - confidence
    if abs(max(above, below) - alpha) > 1e-9 and abs(reference.pvalue - alpha) > 1e-9:
        equivalent = max(above, below) < alpha
        significant = reference.pvalue < alpha
        direction = "better" if result.difference < 0 else "worse"
        assert result.verdict == ("equivalent" if equivalent else direction if significant else "inconclusive")


@settings(max_examples=50, deadline=None)
@given(values, st.randoms())
def test_order_of_seeds_does_not_matter(pairs, random):
    treatment, baseline = (pd.Series(side, dtype=float) for side in zip(*pairs, strict=True))
    order = list(treatment.index)
    random.shuffle(order)
    straight, shuffled = compare(treatment, baseline, 0.1), compare(treatment[order], baseline[order[::-1]], 0.1)
    assert straight == shuffled


@settings(max_examples=50, deadline=None)
@given(values)
def test_swapping_the_sides_mirrors_the_verdict(pairs):
    treatment, baseline = (pd.Series(side, dtype=float) for side in zip(*pairs, strict=True))
    there, back = compare(treatment, baseline, 0.1), compare(baseline, treatment, 0.1)
    mirror = {"better": "worse", "worse": "better"}
    assert back.verdict == mirror.get(there.verdict, there.verdict)
    assert back.interval == pytest.approx((-there.interval[1], -there.interval[0]), abs=1e-12)


def test_rates_over_many_draws():
    random, draws, n, margin = np.random.default_rng(1), 2000, 5, 0.02
    shared = random.normal(3, 0.1, (draws, n))  # the seed's own luck, which pairing removes
    noise = random.normal(0, 0.01, (draws, n))
    covered = better = equivalent = 0
    for base, off in zip(shared, noise, strict=True):
        null = compare(pd.Series(base + off), pd.Series(base), 1e-9)
        covered += null.interval[0] <= 0 <= null.interval[1]
        better += null.verdict == "better"
        equivalent += compare(pd.Series(base + margin + off), pd.Series(base), margin).verdict == "equivalent"
    standard_error = sqrt(0.05 * 0.95 / draws)
    assert covered / draws == pytest.approx(0.95, abs=4 * standard_error)
    assert better / draws == pytest.approx(0.025, abs=4 * standard_error)
    assert 0.03 < equivalent / draws < 0.05 + 4 * standard_error  # at the margin the tests have their full size


def test_a_difference_below_the_margin_does_not_matter():
    base = series(3.0, 3.1, 3.2)
    assert compare(base - series(0.001, 0.0011, 0.0009), base, margin=0.01).verdict == "equivalent"
    assert compare(base - series(0.001, 0.0011, 0.0009), base, margin=0.0001).verdict == "better"
    same = compare(base, base, margin=0.01)
    assert (same.verdict, same.p_value, same.interval) == ("equivalent", 1, (0, 0))


def test_one_seed_gives_no_verdict():
    single = compare(series(1.0), series(3.0), margin=0.1)
    assert (single.verdict, single.n, single.difference) == ("inconclusive", 1, -2)
    assert isnan(single.interval[0])
    assert isnan(single.p_value)
    assert single.sentence("A", "B") == ("A against B is inconclusive: a verdict takes two pairs or more, there is 1; "
                                         "the one pair differs by −2.0000 nat")
    none = compare(series(), series(), margin=0.1)
    assert (none.verdict, none.n) == ("inconclusive", 0)
    assert none.sentence("A", "B").endswith("there are 0")


@pytest.mark.parametrize("lost", [nan, float("inf")])
def test_a_diverged_run_is_not_dropped_in_silence(lost):
    result = compare(series(1.0, 1.1, lost), series(3.0, 3.0, 3.0), margin=0.1)
    assert (result.verdict, result.n, result.lost) == ("inconclusive", 2, 1)
    assert "1 of 3 pairs lack a finite loss; the others differ by −1.95" in result.sentence("A", "B")


def test_unpaired_seeds_are_dropped_and_counted():
    result = compare(pd.Series([1.0, 1.1, 9.0], [0, 1, 7]), pd.Series([2.0, 2.0], [1, 0]), margin=0.1)
    assert (result.n, result.unpaired, result.difference) == (2, 1, pytest.approx(-0.95))


def test_sentence():
    base = series(3.0, 3.1, 3.2, 3.0, 2.9)
    result = compare(base - series(0.41, 0.40, 0.43, 0.41, 0.41), base, margin=0.01)
    assert result.sentence("12,4,1", "constant 12,288") == (
        "12,4,1 is better than constant 12,288: −0.412 nat (95 % interval −0.426 to −0.398, n = 5)")
    near = compare(base + series(0.001, -0.001, 0.002, 0, 0), base, margin=0.01)
    assert near.sentence("A", "B", "bit") == (
        "A is equivalent to B within ±0.01 bit: +0.0004 bit (90 % interval −0.0007 to +0.0015, n = 5)")


@pytest.mark.parametrize("margin", [0, -1, nan, float("inf")])
def test_margin_must_be_positive(margin):
    with pytest.raises(BadInput, match="margin"):
        compare(DRUG_1, DRUG_2, margin)


def test_bad_sides_are_named():
    with pytest.raises(BadInput, match="each seed once"):
        compare(pd.Series([1.0, 2.0], [0, 0]), DRUG_1, 0.1)
    with pytest.raises(BadInput, match="one column"):
        compare(DRUG_1, pd.DataFrame({"a": DRUG_1, "b": DRUG_2}), 0.1)
    assert compare(DRUG_1.to_frame(), DRUG_2, 0.1).n == 10


def test_losses_hides_what_did_not_finish():
    runs = some_runs(_1=("status", "stream_exhausted"))
    assert completed(runs).tolist() == [True, False] + [True] * 16
    by_seed = losses(runs[(runs["arm"] == "constant 1,024") & (runs["lr"] == 1e-4)])
    assert by_seed.index.tolist() == [0, 1, 2]
    assert by_seed.isna().tolist() == [False, True, False]


def test_summary_counts_what_diverged():
    runs = some_runs(_0=("status", "diverged"), _3=("validation_loss", nan))
    table = summary(runs)
    assert len(table) == 6
    diverged, skipped, clean = table.iloc[0], table.iloc[1], table.iloc[2]
    assert (diverged["n"], diverged["unfinished"]) == (2, "1 diverged")
    assert diverged["validation_loss"] == pytest.approx(3.315)
    assert (skipped["n"], skipped["unfinished"]) == (2, "")
    assert (clean["n"], clean["validation_loss_sd"]) == (3, pytest.approx(0.01))
    assert (clean["steps"], clean["tokens_per_second"], clean["final_lr"]) == (10, 500, pytest.approx(1e-4))


def test_noise_floor_is_the_sd_of_differences_between_seeds():
    table = pd.DataFrame(np.random.default_rng(2).normal(3, 0.01, (400, 5)) + np.arange(400)[:, None])
    assert noise_floor(table) == pytest.approx(sqrt(2) * 0.01, rel=0.05)
    one = np.array([3.0, 3.1, 3.5])
    pairs = [(a - b) ** 2 for i, a in enumerate(one) for b in one[:i]]
    assert noise_floor(pd.DataFrame([one])) == pytest.approx(sqrt(np.mean(pairs)))
    assert noise_floor(pd.DataFrame([[3.0, 3.1, nan], [5.0, nan, nan]])) == pytest.approx(0.1)
    assert isnan(noise_floor(pd.DataFrame([[3.0], [4.0]])))


def test_best_learning_rate():
    table = best(some_runs()).set_index("arm")
    assert table["lr"].tolist() == [3e-4, 3e-4]
    assert not table["at_edge"].any()
    assert table.loc["dividers 4,1", "validation_loss"] == pytest.approx(2.91)


def test_a_diverged_value_never_wins_but_was_tried():
    table = best(some_runs(_6=("status", "diverged"))[lambda r: r["lr"] > 2e-4])  # lr 1e-3 failed for one seed
    assert table["lr"].tolist() == [3e-4, 3e-4]
    assert table["at_edge"].all()
    failed = some_runs(_3=("validation_loss", float("-inf")))  # the best value
    table = best(failed).set_index("arm").loc["constant 1,024"]
    assert (table["lr"], table["at_edge"], table["tried"]) == (1e-3, True, 3)
    failed = some_runs(_3=("status", "out_of_memory"), _4=("status", "diverged"), _5=("status", "diverged"))
    assert best(failed).set_index("arm").loc["constant 1,024", "unfinished"] == "1 out of memory, 2 diverged"
    assert best(some_runs().assign(status="diverged"))["lr"].isna().all()


def test_best_compares_values_on_the_same_seeds():
    runs = some_runs()[lambda r: (r["lr"] == 3e-4) | (r["seed"] == 0)]
    assert best(runs)["validation_loss"].tolist() == pytest.approx([3.0, 2.9])  # seed 0 only
    with pytest.raises(BadInput, match="share no seed"):
        best(some_runs()[lambda r: (r["lr"] == 3e-4) != (r["seed"] == 0)])


logs = st.lists(st.tuples(st.integers(1, 50), st.floats(0.1, 10)), min_size=1, max_size=40)


def a_log(rows, run="a", start=0):
    sizes, values = zip(*rows, strict=True)
    return pd.DataFrame({"run": run, "step": range(1, len(rows) + 1), "tokens_per_step": sizes, "loss": values,
                         "tokens": start + np.cumsum(sizes)})


@given(logs, st.floats(1, 60), st.integers(0, 100))
@settings(max_examples=50, deadline=None)
def test_bins_conserve_the_token_weighted_loss(rows, width, start):
    log = a_log(rows, start=start)
    table = bins(log, width)
    assert table["tokens"].sum() == pytest.approx(log["tokens_per_step"].sum())
    whole = (log["loss"] * log["tokens_per_step"]).sum()
    assert (table["loss"] * table["tokens"]).sum() == pytest.approx(whole)
    assert (table["tokens"] <= width * (1 + 1e-9)).all()


def test_an_update_across_an_edge_is_split():
    log = pd.concat([a_log([(4, 1.0), (4, 3.0)]), a_log([(2, 5.0)], run="b")])
    table = bins(log, width_tokens=6)
    assert table["run"].tolist() == ["a", "a", "b"]
    assert table["loss"].tolist() == pytest.approx([(4 * 1 + 2 * 3) / 6, 3, 5])
    assert table["tokens"].tolist() == [6, 2, 2]
    assert bins(log, edges=[0, 4, 8])["loss"].tolist() == pytest.approx([1, 3, 5])
    with pytest.raises(BadInput, match="one of two"):
        bins(log)


def test_a_loss_that_is_not_finite_spoils_no_earlier_bin():
    table = bins(a_log([(4, 1.0), (4, 2.0), (4, float("inf")), (4, 1.0)]), 4)
    assert table["loss"].tolist() == pytest.approx([1, 2, nan, nan], nan_ok=True)


def test_the_interval_of_a_mean_is_students():
    low, high = scipy_stats.t.interval(0.95, len(DRUG_1) - 1, DRUG_1.mean(), scipy_stats.sem(DRUG_1))
    assert mean_interval(DRUG_1) == pytest.approx((DRUG_1.mean(), low, high))
    assert mean_interval(pd.concat([DRUG_1, series(nan)], ignore_index=True)) == mean_interval(DRUG_1)
    alone = mean_interval(series(2.5))
    assert alone[0] == 2.5
    assert isnan(alone[1])
    assert isnan(alone[2])


def test_a_choice_has_a_mean_and_an_interval_at_each_of_its_values():
    values = pd.DataFrame({"at": [0.5] * 10 + [0.25] * 10, "loss": [*DRUG_1, *DRUG_2]})
    found = by_choice(values, "at", "loss")
    assert found.x.tolist() == [0.25, 0.5]
    assert [*found.iloc[1][1:]] == pytest.approx(mean_interval(DRUG_1))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_the_front_is_what_no_other_point_beats(points):
    cost, loss = zip(*points, strict=True)
    beaten = {p for p in points for q in points if q != p and q[0] <= p[0] and q[1] <= p[1]}
    assert [points[place] for place in front(cost, loss)] == sorted(set(points) - beaten)
