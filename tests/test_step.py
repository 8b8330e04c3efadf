"""The optimizer step: accumulation changes nothing, AdamW is AdamW, evaluation does not depend on how it is cut."""

from math import log

import numpy as np
import pytest
import torch

from lib.config import RunConfig
from lib.rules import Hyperparameters
from lib.step import Learner, measure_step
from lib.stream import PackedStream


def gradients(config: RunConfig, rows: np.ndarray) -> tuple[float, list[torch.Tensor]]:
    learner = Learner(config, vocab_size=97)
    loss = learner.accumulate(rows).item()
    return loss, [parameter.grad for parameter in learner.model.parameters()]


def test_raw_gradients_do_not_depend_on_accumulation(tiny):
    rows = np.random.default_rng(0).integers(0, 97, (24, 16))
    results = {n: gradients(tiny(device_token_capacity=384 // n), rows) for n in (1, 2, 3, 8)}
    whole_loss, whole = results[1]
    for loss, parts in results.values():
        assert loss == pytest.approx(whole_loss, rel=1e-6)
        for part, reference in zip(parts, whole, strict=True):
            assert ((part - reference).norm() / reference.norm()).item() < 1e-5


def test_the_gradient_is_that_of_the_mean_over_all_targets(tiny):
    rows = np.random.default_rng(1).integers(0, 97, (4, 16))
    learner = Learner(tiny(), vocab_size=97)
    learner.accumulate(rows)
    found = [p.grad.clone() for p in learner.model.parameters()]
    learner.model.zero_grad()
    tokens = torch.from_numpy(rows)
    logits = learner.model(tokens)[:, :-1].flatten(0, 1)
    (torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum") / (4 * 15)).backward()
    for part, parameter in zip(found, learner.model.parameters(), strict=True):
        torch.testing.assert_close(part, parameter.grad, rtol=1e-4, atol=1e-7)


def test_a_step_is_adamw_with_decoupled_decay(tiny):
    """The first two steps by hand: Loshchilov and Hutter 2019 (arXiv 1711.05101), algorithm 2."""
    learner = Learner(tiny(grad_clip=0.0), vocab_size=97)
    weight, gain = learner.model.embed_in.weight, learner.model.final_layer_norm.weight
    lr, b1, b2, eps, decay = 0.01, 0.8, 0.9, 1e-6, 0.3
    expected = {weight: weight.detach().double().clone(), gain: gain.detach().double().clone()}
    m, v = dict.fromkeys(expected, 0), dict.fromkeys(expected, 0)
    for step in (1, 2):
        learner.accumulate(np.random.default_rng(step).integers(0, 97, (4, 16)))
        for p, value in expected.items():
            g = p.grad.double()
            m[p], v[p] = b1 * m[p] + (1 - b1) * g, b2 * v[p] + (1 - b2) * g**2
            value *= 1 - lr * (decay if p is weight else 0)
            value -= lr * (m[p] / (1 - b1**step)) / ((v[p] / (1 - b2**step)).sqrt() + eps)
        learner.apply(lr, Hyperparameters(1.0, b1, b2, eps, decay))
    for p, value in expected.items():
        torch.testing.assert_close(p.detach().double(), value, rtol=0, atol=1e-6)


def test_clipping_returns_the_norm_before_and_bounds_it_after(tiny):
    learner = Learner(tiny(grad_clip=0.01), vocab_size=97)
    learner.accumulate(np.random.default_rng(0).integers(0, 97, (4, 16)))
    norm = torch.cat([p.grad.flatten() for p in learner.model.parameters()]).norm().item()
    assert norm > 0.01
    assert learner.clip().item() == pytest.approx(norm, rel=1e-5)
    after = torch.cat([p.grad.flatten() for p in learner.model.parameters()]).norm().item()
    assert after == pytest.approx(0.01, rel=1e-3)


def test_initialisation_depends_on_the_seed_alone(tiny):
    first = Learner(tiny(seed=3), 97).model.embed_in.weight
    torch.manual_seed(99)
    assert torch.equal(Learner(tiny(seed=3, tokens_per_step=64), 97).model.embed_in.weight, first)
    assert not torch.equal(Learner(tiny(seed=4), 97).model.embed_in.weight, first)


def test_building_a_model_leaves_the_callers_random_numbers_alone(tiny):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Learner(tiny(), 97)
    assert torch.equal(torch.rand(3), expected)


def test_evaluation_does_not_depend_on_the_micro_batch(tiny, stream):
    packed = PackedStream(stream, 16)
    configs = [tiny(device_token_capacity=c, tokens_per_step=c, token_budget=c) for c in (16, 48, 112, 4096)]
    results = [Learner(config, packed.vocab_size).evaluate(packed, None) for config in configs]
    for result in results[1:]:
        assert result == pytest.approx(results[0], rel=1e-6)


def test_evaluation_by_hand(tiny, stream):
    """A model that knows nothing: ln(vocabulary) a target, spread over the targets' bytes as decoded."""
    packed = PackedStream(stream, 16)
    learner = Learner(tiny(), packed.vocab_size)
    with torch.no_grad():
        learner.model.embed_in.weight.zero_()
    loss, bits = learner.evaluate(packed, 160)
    rows = packed.validation(0, 10)
    size = sum(len(packed.tokenizer.id_to_token(int(t))) for row in rows for t in row[1:] if t != packed.meta["eos_id"])
    assert loss == pytest.approx(log(packed.vocab_size), rel=1e-6)
    assert bits == pytest.approx(10 * 15 * log(packed.vocab_size) / log(2) / size, rel=1e-6)


def test_costs_of_a_step_are_positive(tiny):
    micro_batch, update = measure_step(tiny(), vocab_size=97, seconds=0.1)
    assert 0 < micro_batch < 1
    assert 0 < update < 1


def test_activation_checkpointing_keeps_less_and_changes_nothing(tiny):
    rows = np.random.default_rng(2).integers(0, 97, (24, 16))
    kept, results = {}, {}
    for on in (False, True):
        sizes = []

        def pack(tensor, sizes=sizes):
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results[on] = gradients(tiny(device_token_capacity=384, layers=4, activation_checkpointing=on), rows)
        kept[on] = sum(sizes)
    assert results[True][0] == results[False][0]
    for a, b in zip(results[True][1], results[False][1], strict=True):
        torch.testing.assert_close(a, b)
    assert kept[True] < kept[False] / 2


def test_a_graph_in_one_piece_or_none(tiny, monkeypatch):
    """The break is found while tracing, before anything is compiled."""
    def broken(model, tokens):
        torch._dynamo.graph_break()
        return model(tokens).mean()

    monkeypatch.setattr("lib.model.MiniGPT.loss", broken)
    learner = Learner(tiny(compile="default", fullgraph=True), vocab_size=97)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        learner.accumulate(np.zeros((2, 16), int))
