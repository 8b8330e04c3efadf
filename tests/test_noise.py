"""The gradient noise scale against a model whose gradients are known in closed form."""

import numpy as np
import pytest
import torch

from lib.check import BadInput
from lib.noise import estimate, noise_scale
from lib.step import Learner
from lib.stream import PackedStream
from lib.train import train


def test_linear_regression_has_the_noise_scale_of_its_closed_form():
    """y = w·x + ε with x ~ N(0, I): at θ, G = d = θ − w and tr Σ = n (|d|² + σ²) + |d|²."""
    torch.manual_seed(0)
    n, sigma, micro_batch, parts = 5, 0.7, 8, 4
    target, model = torch.randn(n), torch.nn.Linear(n, 1, bias=False)
    d2 = (model.weight.detach()[0] - target).square().sum().item()
    found = []
    for _ in range(4000):
        gradients = []
        for _ in range(parts):
            x = torch.randn(micro_batch, n)
            y = x @ target + sigma * torch.randn(micro_batch)
            loss = 0.5 * (model(x)[:, 0] - y).square().mean()
            gradients.append(torch.autograd.grad(loss, model.weight)[0])
        mean_square = np.mean([g.square().sum().item() for g in gradients])
        square = torch.stack(gradients).mean(0).square().sum().item()
        found.append(estimate(micro_batch, parts * micro_batch, mean_square, square))
    g2, s = zip(*found, strict=True)
    trace = n * (d2 + sigma**2) + d2
    assert np.mean(g2) == pytest.approx(d2, rel=0.05)
    assert np.mean(s) == pytest.approx(trace, rel=0.05)
    assert noise_scale(g2, s) == pytest.approx(trace / d2, rel=0.05)


def test_what_is_not_defined_is_none():
    assert noise_scale([], []) is None
    assert noise_scale([None, None], [None, None]) is None
    assert noise_scale([-1.0, 0.5], [1.0, 1.0]) is None
    assert noise_scale([1.0, None, 3.0], [8.0, None, 8.0]) == 4.0


def quiet(line):
    pass


def test_a_runs_estimates_are_those_of_its_micro_batches_gradients(tiny, stream):
    """The first update again, a micro-batch at a time, by autograd alone."""
    config = tiny(token_budget=768, skip_validation=True)
    row = train(config, progress=quiet).metrics().iloc[0]
    learner, gradients = Learner(config, 400), []
    for part in np.split(PackedStream(stream, 16).read(0, 384), 12):
        loss = learner.model.loss(torch.from_numpy(part))
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*learner.model.parameters()])]))
    mean_square = torch.stack([g.square().sum() for g in gradients]).mean().item()
    g2, s = estimate(32, 384, mean_square, torch.stack(gradients).mean(0).square().sum().item())
    assert (row.noise_g2, row.noise_s) == (pytest.approx(g2, rel=1e-3), pytest.approx(s, rel=1e-4))


def test_a_run_has_a_noise_scale_where_its_updates_have_parts(tiny):
    run = train(tiny(), progress=quiet)
    last = run.metrics()[-2:]  # of ten: they hold the last fifth of the tokens
    assert run.meta["noise_scale"] == noise_scale(last.noise_g2, last.noise_s) > 0
    run = train(tiny(tokens_per_step=32), progress=quiet)
    assert run.meta["noise_scale"] is None
    assert run.metrics()[["noise_g2", "noise_s"]].isna().all(axis=None)


def test_a_single_micro_batch_is_split_every_so_many_updates(tiny):
    run = train(tiny(tokens_per_step=32, noise_every=4), progress=quiet)
    rows = run.metrics()
    assert rows.step[rows.noise_g2.notna()].tolist() == list(range(4, 121, 4))
    plain = train(tiny(tokens_per_step=32), progress=quiet)
    assert rows.loss.to_numpy() == pytest.approx(plain.metrics().loss.to_numpy(), rel=1e-3)
    with pytest.raises(BadInput, match="noise_every = 4: needs a device_token_capacity of more than one row"):
        tiny(tokens_per_step=16, device_token_capacity=16, noise_every=4)


def test_the_noise_scale_of_fp16_is_not_scaled(tiny):
    """The scaler multiplies every gradient by thousands, which the norms are not to show."""
    rows = [train(tiny(precision=precision, token_budget=3840, skip_validation=True), progress=quiet).metrics()
            for precision in ("fp32", "fp16")]
    taken = rows[1].grad_norm.notna()
    assert taken.any()
    assert rows[1].noise_s[taken].iloc[-1] == pytest.approx(rows[0].noise_s.iloc[-1], rel=0.2)
