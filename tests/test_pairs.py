"""The square-root experiment against the published configurations, and against what is known to differ."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from lib.check import BadInput
from lib.config import RunConfig
from lib.pairs import EFFECTS, LETTERS, arms, deviation, named, opening, spread
from lib.runs import updates
from lib.train import train

LARGE = RunConfig(tokens_per_step=524_288, seq_len=1024, device_token_capacity=16_384, token_budget=2**30, lr=1e-4,
                  lr_schedule="constant", beta1=0.9, beta2=0.95)


def quiet(line):
    pass


@pytest.mark.parametrize(("ratio", "beta1", "beta2", "down", "up"), [
    (16, 0.993437, 0.996799, 2.5e-5, 4e-4),
    (32, 0.996713, 0.998398, 1.768e-5, 5.66e-4),
])
def test_the_published_hyperparameters(ratio, beta1, beta2, down, up):
    made = arms(LARGE, ratio, faster=2.0)
    assert [*made] == [*LETTERS]
    small = LARGE.tokens_per_step // ratio
    assert {letter: config.tokens_per_step for letter, config in made.items()} == {
        letter: LARGE.tokens_per_step if letter in "AJKL" else small for letter in LETTERS}
    found = {letter: (config.lr, config.beta1, config.beta2) for letter, config in made.items()}
    expected = {"A": (1e-4, 0.9, 0.95), "H": (down, beta1, beta2), "I": (down, 0.9, beta2), "G": (down, 0.9, 0.95),
                "B": (1e-4, 0.9, beta2), "M": (1e-4, beta1, beta2), "D": (1e-4, 0.9, 0.95), "J": (up, 0.9, 0.95),
                "K": (2e-4, 0.9, 0.95), "L": (1e-4, 0.9, 0.95)}
    for letter, values in expected.items():
        assert found[letter][0] == pytest.approx(values[0], rel=1e-3), letter
        assert found[letter][1:] == pytest.approx(values[1:], abs=1e-6), letter
    assert made["L"] == replace(made["A"], precision="fp16")
    assert {config.eps for config in made.values()} == {1e-8}
    assert {config.device_token_capacity for config in made.values()} == {16_384}
    assert {letter for letter, config in arms(replace(LARGE, device_token_capacity=32_768), 32, 2.0).items()
            if config.device_token_capacity == 16_384} == {*"HIGBMD"}


def test_an_effect_is_one_part_of_the_rule():
    """Arms of one effect differ in that part alone, and together they lead from nothing scaled to the whole rule."""
    made = arms(LARGE, 16, 2.0)
    parts = {"β1": {"beta1"}, "β2": {"beta2"}, "the rate alone": {"lr"}, "fp16": {"precision"}}
    for what, (a, b) in EFFECTS.items():
        differ = {name for name, value in vars(made[a]).items() if value != vars(made[b])[name]}
        if what.startswith("the rule,"):
            assert "tokens_per_step" in differ
        else:
            assert differ == next(names for part, names in parts.items() if what.startswith(part)), what


def test_eps_is_scaled_on_request():
    """ε grows by √r where T shrinks by r: Adam's update then stays the same function of the scaled gradient."""
    assert arms(LARGE, 16, 2.0, scale_eps=True)["H"].eps == pytest.approx(4e-8)
    assert arms(LARGE, 16, 2.0, scale_eps=True)["I"].eps == 1e-8


@pytest.mark.parametrize(("ratio", "faster", "said"), [
    (3, 2.0, "ratio = 3: must be above 1 and divide"),
    (1, 2.0, "ratio = 1"),
    (16, 4.0, "faster = 4.0: must not be √r"),
])
def test_arms_that_cannot_be_are_refused(ratio, faster, said):
    with pytest.raises(BadInput, match=said):
        arms(LARGE, ratio, faster)


def test_a_replay_is_found_and_left_out_up_to_the_parents_horizon(tiny):
    parent = train(tiny(lr_schedule="constant"), quiet)
    child = tiny(lr_schedule="constant", branch_from=parent.name, branch_weights_only=True, token_budget=5760)
    fresh, again = train(child, quiet), train(replace(child, data_seed=0), quiet)
    assert opening([fresh], 384, 5760) == 384
    assert opening([fresh, again], 384, 5760) == 3840 == parent.meta["tokens"]
    assert updates([fresh]).tokens.min() == 384
    rows = updates([again])
    assert (rows.tokens - rows.tokens_per_step).min() == 3840
    with pytest.raises(BadInput, match="must go on after 3,840 tokens"):
        opening([again], 384, 3840)


def test_spread_is_between_the_points_and_blind_to_their_pairs():
    seeds = pd.Series([0.0, 0.1, 0.2])
    of = {"A": 3 + seeds, "H": 3.002 + seeds, "B": 3.1 + seeds, "J": 3.098 + seeds}
    assert spread(of).tolist() == pytest.approx([0.098] * 3)


def test_deviation_sees_the_jumps_and_not_the_course():
    losses = np.random.default_rng(0).normal(0, 0.03, 20_000) + np.linspace(5, 3, 20_000)
    assert deviation(losses) == pytest.approx(0.03, rel=0.03)


def test_names():
    assert named("H", arms(LARGE, 16, 2.0)["H"]) == "H 32,768"


def descend(config, tokens=64 * 500, noise=64.0, size=2048):
    """Loss of a quadratic under Adam, at every 64 tokens: each of `size` gradients is x plus noise / √T."""
    chance = torch.Generator().manual_seed(config.tokens_per_step)
    x = torch.ones(size, requires_grad=True)
    optimizer = torch.optim.AdamW([x], config.lr, (config.beta1, config.beta2), config.eps, weight_decay=0.0)
    losses = []
    for step in range(1, tokens // config.tokens_per_step + 1):
        x.grad = x.detach() + noise * torch.randn(size, generator=chance) / config.tokens_per_step**0.5
        optimizer.step()
        if step * config.tokens_per_step % 64 == 0:
            losses.append(float((x.detach() ** 2).mean()))
    return np.array(losses[100:])  # by then the moments are warm


def test_the_rule_repeats_a_noisy_quadratic_and_half_of_it_does_not():
    """Where noise is all of the second moment, the pairs are one trajectory in tokens (Malladi et al. 2022)."""
    base = RunConfig(tokens_per_step=64, seq_len=4, device_token_capacity=4, token_budget=64, lr=0.01)
    loss = {letter: descend(config) for letter, config in arms(base, 16, 2.0).items() if letter in "AHBJD"}
    apart = {pair: np.abs(np.log(loss[pair[0]] / loss[pair[1]])).max() for pair in ("AH", "BJ", "AD", "AB")}
    assert apart["AH"] < 0.1
    assert apart["BJ"] < 0.2
    assert min(apart["AD"], apart["AB"]) > 0.7
