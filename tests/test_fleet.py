"""The model of many devices against closed forms."""

from math import ceil, log2

import numpy as np
import pytest

from lib.check import BadInput
from lib.fleet import POWER, SHAPES, Fleet, compare_times, critical_batch, flat, seesaw, time_to_loss

PLAIN = Fleet(launch=0, hop=0, memory=1e30, between=1e30, inside=1e30)  # compute alone


@pytest.mark.parametrize(("parameters", "sequences"), [(85e6, 745), (151e6, 955), (302e6, 1394), (604e6, 1889),
                                                      (1.2e9, 2533)])
def test_the_published_critical_batches(parameters, sequences):
    """Zhang et al.: sequences of 512 at five sizes, which their power law meets within a few per cent."""
    assert critical_batch(parameters) / 512 == pytest.approx(sequences, rel=0.06)


def test_one_device_takes_what_its_flops_take():
    assert PLAIN.update_seconds(1e8, 2**20, 1) == pytest.approx(6 * 1e8 * 2**20 / (989e12 * 0.4))
    seconds, updates, tokens = time_to_loss(PLAIN, 1e8, 1, flat(0.01), trade=False)
    assert tokens == pytest.approx(20 * 1e8)
    assert seconds == pytest.approx(6 * 1e8 * 2e9 / (989e12 * 0.4))
    assert updates == pytest.approx(2e9 / (round(0.01 * critical_batch(1e8) / 1024) * 1024))


def test_an_update_is_shared_by_rows_and_no_further():
    one = PLAIN.update_seconds(1e8, 64 * 1024, 1)
    for devices in (1, 3, 8, 64, 500):
        assert PLAIN.update_seconds(1e8, 64 * 1024, devices) == pytest.approx(one / 64 * ceil(64 / min(devices, 64)))
    with pytest.raises(BadInput, match="devices = 0"):
        PLAIN.update_seconds(1e8, 1024, 0)


def test_gradients_are_averaged_at_the_cost_of_a_ring_and_a_tree():
    fleet = Fleet(launch=0, memory=1e30, flops=1e30)
    assert fleet.update_seconds(1e9, 1024, 1) == pytest.approx(0, abs=1e-12)
    for devices, bandwidth in ((2, 450e9), (8, 450e9), (16, 50e9), (4096, 50e9)):
        ring = 2 * (devices - 1) / devices * 2e9 / bandwidth
        assert fleet.update_seconds(1e9, 1024, devices) == pytest.approx(ring + 2 * log2(devices) * 5e-6)


def test_a_larger_t_trades_tokens_for_updates_as_mccandlish_has_it():
    """At a constant critical batch B, (S/S_min − 1)(E/E_min − 1) = 1; here B grows, so its means enter."""
    share, e = 0.5, (np.arange(60) + 0.5) / 60
    _, updates, tokens = time_to_loss(PLAIN, 350e6, 1, flat(share))
    mean = np.mean(1 / e**POWER)
    assert tokens / (20 * 350e6) == pytest.approx(1 + share * mean, rel=1e-3)
    least_updates = 20 * 350e6 / critical_batch(350e6) * mean
    assert (updates / least_updates - 1) * (tokens / (20 * 350e6) - 1) == pytest.approx(1, rel=1e-2)


def test_seesaw_saves_its_serial_updates_where_updates_are_all_that_counts():
    """With endless devices an update takes the same whatever T, so the time saved is the share of updates saved."""
    times = compare_times(Fleet(flops=1e30, micro_batch=10**12), [350e6], [1]).set_index("arm")
    sizes = [seesaw(1 / 8)((i + 0.5) / 60) * 8 for i in range(60)]
    assert times.from_start["seesaw by 2"] == pytest.approx(1 - np.mean(1 / np.array(sizes)), abs=0.01)


def test_nothing_is_saved_where_tokens_are_all_that_counts():
    times = compare_times(PLAIN, [350e6], [1])
    assert times.from_start.tolist() == pytest.approx([0] * len(SHAPES), abs=1e-3)
    assert max(times.at_best) <= 5e-3  # the smallest scale tried still costs that much


def test_the_root_of_the_critical_batch_is_the_best_shape_of_all():
    """Its closed form: where an update costs a and a token c, (1 + T/B)(a/T + c) is least at T = √(a·B/c)."""
    fleet = Fleet(launch=0.0, hop=0.0, row=1, memory=28 * 350e6 / 2.0)  # two seconds an update, on one device
    root = min(time_to_loss(fleet, 350e6, 1, SHAPES["adaptive, as its square root"], 2.0 ** (p / 8))[0]
               for p in range(-40, 24))
    random = np.random.default_rng(0)
    for _ in range(100):
        steps = np.exp(random.normal(0, 1, 6))
        assert time_to_loss(fleet, 350e6, 1, lambda e, steps=steps: steps[int(6 * e)])[0] > root * (1 - 1e-3)
    found = compare_times(fleet, [350e6], [1]).set_index("arm").at_best
    assert found.idxmax() == "adaptive, as its square root"
    assert 0 < found.max() < 0.1
