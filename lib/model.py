"""MiniGPT: a decoder-only transformer with rotary positions and a tied head.

Weights and layout are those of GPT-NeoX with a sequential residual and no biases, so that the trained model loads
there. B: rows, S: tokens in a row, D: hidden size, H: heads, V: vocabulary.
"""

from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

LOGITS = 2**25  # that exist at a time: 128 MiB in float32


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a MiniGPT. The defaults have 31,433,920 parameters."""

    vocab_size: int = 16_384
    seq_len: int = 1024
    hidden_size: int = 448
    layers: int = 10
    heads: int = 7
    mlp_size: int = 1792
    rope_theta: float = 10_000.0


def rotary(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times frequency: [S, D/H] each (Su et al. 2021, arXiv 2104.09864)."""
    head = config.hidden_size // config.heads
    frequency = config.rope_theta ** (-torch.arange(0, head, 2, dtype=torch.float32) / head)
    angle = torch.outer(torch.arange(config.seq_len, dtype=torch.float32), frequency).repeat(1, 2)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + half) of a head's components by its angle: [B, H, S, D/H]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, hidden = x.shape
        qkv = self.query_key_value(x).view(rows, length, self.heads, -1).transpose(1, 2)  # [B, H, S, 3D/H]
        q, k, v = qkv.chunk(3, -1)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(y.transpose(1, 2).reshape(rows, length, hidden))


class Block(nn.Module):
    """Attention, then an MLP; each reads a normalised copy of the stream and adds to it."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, bias=False)
        self.attention = Attention(config)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, bias=False)
        self.dense_h_to_4h = nn.Linear(config.hidden_size, config.mlp_size, bias=False)
        self.dense_4h_to_h = nn.Linear(config.mlp_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.input_layernorm(x), cos, sin)
        return x + self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(x))))


class CrossEntropy(torch.autograd.Function):
    """Sum over N targets of −log softmax(hidden · weightᵀ)[target], in nats: hidden [N, D], weight [V, D], targets [N].

    All N · V logits at once would be by far the largest tensors of a step. Here a part of the rows has its logits, and
    its part of the gradient, before the next is begun; the products are in `dtype`, all else is in float32.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        rows, head = max(LOGITS // len(weight), 1), weight.to(dtype)
        total, of_hidden, of_weight = hidden.new_zeros((), dtype=torch.float32), [], torch.zeros_like(weight)
        for x, target in zip(hidden.to(dtype).split(rows), targets[:, None].split(rows), strict=True):
            scores = F.log_softmax((x @ head.T).float(), -1)
            total -= scores.gather(1, target).sum()
            if ctx.needs_input_grad[0]:
                # The gradient of the logits: softmax, less one at the target.
                slope = scores.exp_().scatter_add_(1, target, scores.new_full(target.shape, -1.0)).to(dtype)
                of_hidden.append(slope @ head)
                of_weight += slope.T @ x
        if of_hidden:
            ctx.save_for_backward(torch.cat(of_hidden), of_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, scale: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * scale, of_weight * scale, None, None


class MiniGPT(nn.Module):
    """The model: `forward` gives logits, `loss` the mean cross-entropy of the next token."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.activation_checkpointing = False  # compute a block again in the backward pass, to keep less of it
        self.embed_in = nn.Embedding(config.vocab_size, config.hidden_size)  # also the head
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, bias=False)
        cos, sin = rotary(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(self._initialise)

    def _initialise(self, module: nn.Module) -> None:
        """Normal with sd 0.02; what writes into the residual stream is scaled down by sqrt(2 · layers) (GPT-2)."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Block):  # apply() visits children first
            for linear in (module.attention.dense, module.dense_4h_to_h):
                with torch.no_grad():
                    linear.weight /= sqrt(2 * self.config.layers)

    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens [B, S] -> the normalised residual stream [B, S, D]."""
        length = tokens.shape[1]
        assert length <= self.config.seq_len, f"{length} tokens in a row, but the model has {self.config.seq_len}"
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embed_in(tokens)
        for layer in self.layers:
            if self.activation_checkpointing:
                x = checkpoint(layer, x, cos, sin, use_reentrant=False)
            else:
                x = layer(x, cos, sin)
        return self.final_layer_norm(x)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [B, S] -> logits [B, S, V]."""
        return F.linear(self.hidden(tokens), self.embed_in.weight)

    def loss(self, tokens: Tensor) -> Tensor:
        """tokens [B, S] -> mean cross-entropy over the B · (S − 1) targets, in nats, in float32."""
        hidden, weight, kind = self.hidden(tokens)[:, :-1].flatten(0, 1), self.embed_in.weight, tokens.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        return CrossEntropy.apply(hidden, weight, tokens[:, 1:].flatten(), dtype) / len(hidden)

    @property
    def parameter_count(self) -> int:
        """Trained numbers; the tied embedding counts once."""
        return sum(p.numel() for p in self.parameters())

    @property
    def flops_per_token(self) -> int:
        """Forward and backward: 6 a parameter, 12 · layers · D · S for attention (PaLM, arXiv 2204.02311, app. B)."""
        c = self.config
        return 6 * self.parameter_count + 12 * c.layers * c.hidden_size * c.seq_len
