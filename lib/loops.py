"""Training loops to be timed: the repository's own, a bare one of the same model, and the plain one of a textbook.

Each trains until its process ends, and calls `turn` after every update. All but the own one train on random tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lib.config import RunConfig
from lib.machine import keep_memory, pick_device
from lib.model import MiniGPT
from lib.step import DTYPES, Learner, model_config
from lib.stream import read_meta
from lib.train import train


def own(config: RunConfig, turn: Callable[[], None]) -> None:
    """What every notebook runs: the stream, the clock, clipping, the noise scale, the log."""
    apply = Learner.apply

    def applied(*arguments: object) -> None:
        apply(*arguments)
        turn()

    Learner.apply = applied  # for good: this process does nothing else
    train(config, lambda line: None)


def checkpointed(config: RunConfig, turn: Callable[[], None]) -> None:
    """The own loop, with activations computed again in the backward pass instead of kept."""
    own(replace(config, activation_checkpointing=True), turn)


def bare(config: RunConfig, turn: Callable[[], None], kept: bool = True, parts: bool = True, fused: bool | None = True,
         clip: float = 0.0) -> None:
    """Forward and backward passes of the same model and loss, and AdamW, for ever: nothing else.

    Each of its three choices can be undone: memory `kept` by the process, the loss in `parts`, `fused` AdamW.
    """
    if kept:
        keep_memory()
    model = make(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    loss = model.loss if parts else partial(logits_at_once, model)
    if config.compile != "off":
        loss = torch.compile(loss, mode=config.compile, dynamic=False)
    kind, micro_batches = pick_device(config.device).type, config.tokens_per_step // config.device_token_capacity
    shape = config.device_token_capacity // config.seq_len, config.seq_len
    while True:
        for _ in range(micro_batches):
            tokens = torch.randint(model.config.vocab_size, shape).to(kind)
            with torch.autocast(kind, DTYPES.get(config.precision), enabled=config.precision in DTYPES):
                value = loss(tokens) / micro_batches
            value.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            value.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turn()


def make(config: RunConfig) -> MiniGPT:
    """A fresh model of this shape on its device."""
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision(config.matmul_precision)
    return MiniGPT(model_config(config, read_meta(config.stream)["vocab_size"])).to(pick_device(config.device))


def logits_at_once(model: MiniGPT, tokens: Tensor) -> Tensor:
    """The plain formulation of the loss: all logits in float32, and torch's cross-entropy."""
    logits = model(tokens)[:, :-1]
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


LOOPS = {
    "own": own,
    "checkpointed": checkpointed,
    "bare": bare,
    # What one writes at first, as in nanoGPT: with clipping, and the loss read after every update.
    "plain": partial(bare, kept=False, parts=False, fused=None, clip=1.0),
    # The bare loop with one choice undone.
    "memory-returned": partial(bare, kept=False),
    "logits-at-once": partial(bare, parts=False),
    "default-adamw": partial(bare, fused=None),
}
