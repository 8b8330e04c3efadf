"""MiniGPT against its published size, an independent implementation and what a language model must satisfy."""

from math import log

import pytest
import torch
from torch.nn.functional import cross_entropy

from lib.model import MiniGPT, ModelConfig

SMALL = ModelConfig(vocab_size=97, seq_len=24, hidden_size=32, layers=3, heads=2, mlp_size=48)


@pytest.fixture(scope="module")
def small():
    torch.manual_seed(0)
    return MiniGPT(SMALL)


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(0, SMALL.vocab_size, (4, SMALL.seq_len), generator=torch.Generator().manual_seed(1))


def test_parameter_count_of_the_defaults():
    with torch.device("meta"):
        model = MiniGPT(ModelConfig())
    assert model.parameter_count == 31_433_920
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not [name for name, _ in model.named_parameters() if "bias" in name]


def test_flops_per_token(small):
    """Counted by torch over one forward and backward; only the last position's head is left out of the loss."""
    from torch.utils.flop_counter import FlopCounterMode

    model = MiniGPT(ModelConfig(vocab_size=128, seq_len=64, hidden_size=64, layers=2, heads=2, mlp_size=256))
    tokens = torch.zeros(2, 64, dtype=torch.long)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    assert model.flops_per_token * tokens.numel() == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_shapes(small, tokens):
    assert small(tokens).shape == (4, 24, 97)
    assert small.loss(tokens).shape == ()


def test_loss_is_the_mean_cross_entropy_of_the_next_token(small, tokens):
    chosen = small(tokens).log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])
    assert small.loss(tokens).item() == pytest.approx(-chosen.mean().item(), abs=1e-6)


def plainly(model, tokens):
    """The loss from all logits at once, by torch's own cross-entropy, in the precision of the logits or float32."""
    logits = model(tokens)[:, :-1].flatten(0, 1)
    return cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), tokens[:, 1:].flatten())


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("logits", [1, 97 * 13, 2**25], ids=["a row", "a ragged last part", "at once"])
def test_loss_and_gradients_do_not_depend_on_the_parts_of_the_logits(logits, small, tokens, monkeypatch):
    monkeypatch.setattr("lib.model.LOGITS", logits)
    ours, plain = 3 * small.loss(tokens), 3 * plainly(small, tokens)
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=0)
    for a, b in zip(gradients(small, ours), gradients(small, plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())
    with torch.no_grad():
        torch.testing.assert_close(3 * small.loss(tokens), plain, rtol=1e-6, atol=0)


@pytest.mark.parametrize("logits", [97 * 13, 2**25], ids=["in parts", "at once"])
def test_bf16_errs_no_more_than_the_plain_loss(logits, small, tokens, monkeypatch):
    """Against the same model in float64: what autocast's own rounding of weights and activations makes of it."""
    monkeypatch.setattr("lib.model.LOGITS", logits)
    exact = gradients(small.double(), plainly(small, tokens))
    small.float()

    def error(loss):
        pairs = zip(gradients(small, loss), exact, strict=True)
        return sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for b in exact)

    with torch.autocast("cpu", torch.bfloat16):
        ours, plain = small.loss(tokens), plainly(small, tokens)
    assert 0 < error(ours) < 1.1 * error(plain)


def test_validation_keeps_no_gradient(small, tokens):
    kept = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        assert not small.loss(tokens).requires_grad
    assert not kept


def test_initial_loss_is_near_that_of_a_uniform_guess():
    torch.manual_seed(0)
    model = MiniGPT(ModelConfig(vocab_size=16_384, seq_len=64, hidden_size=128, layers=2, heads=2, mlp_size=256))
    loss = model.loss(torch.randint(0, 16_384, (4, 64))).item()
    assert loss == pytest.approx(log(16_384), abs=0.15)


def test_the_future_does_not_reach_the_past(small, tokens):
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % SMALL.vocab_size
    before, after = small(tokens), small(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12], rtol=0, atol=1e-6)
    assert (before[:, 12:] - after[:, 12:]).abs().max() > 1e-3


def test_rotary_positions_are_relative():
    """A query and key product depends on their distance only (the defining property of RoPE)."""
    from lib.model import rotary, rotate

    cos, sin = rotary(SMALL)
    q, k = torch.randn(2, 1, 1, 1, SMALL.hidden_size // SMALL.heads)

    def product(i, j):
        return (rotate(q, cos[i], sin[i]) * rotate(k, cos[j], sin[j])).sum().item()

    assert product(3, 1) == pytest.approx(product(20, 18), abs=1e-5)
    assert product(3, 1) != pytest.approx(product(3, 2), abs=1e-3)


def test_the_same_weights_in_transformers_give_the_same_logits(tokens):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    ours = MiniGPT(SMALL)
    with torch.no_grad():  # away from the initial ones, so that every gain is seen
        for parameter in ours.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    theirs = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(
        vocab_size=SMALL.vocab_size, hidden_size=SMALL.hidden_size, num_hidden_layers=SMALL.layers,
        num_attention_heads=SMALL.heads, intermediate_size=SMALL.mlp_size, max_position_embeddings=SMALL.seq_len,
        hidden_act="gelu", use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True,
        layer_norm_eps=1e-5, hidden_dropout=0.0, attention_dropout=0.0,
        rope_parameters={"rope_type": "default", "rope_theta": SMALL.rope_theta, "partial_rotary_factor": 1.0},
    )).eval()
    weights = {f"gpt_neox.{name.replace('dense_h_', 'mlp.dense_h_').replace('dense_4h_', 'mlp.dense_4h_')}": value
               for name, value in ours.state_dict().items()}
    outcome = theirs.load_state_dict(weights, strict=False)
    assert not outcome.unexpected_keys
    assert {name for name in outcome.missing_keys if not name.endswith(".bias")} <= {"lm_head.weight"}
    for name, parameter in theirs.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.zeros_(parameter)
    theirs.tie_weights()
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=0, atol=1e-4)


def test_bf16_autocast_stays_near_float32(small, tokens):
    with torch.autocast("cpu", torch.bfloat16):
        rounded = small.loss(tokens)
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(small.loss(tokens).item(), abs=0.02)
