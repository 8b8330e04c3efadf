"""Training loops to be timed: the repository's own, a bare one of the same model, and the plain one of a textbook.

Each trains until its process ends, and calls `turn` after every update. The micro-batches of the other two are random.
"""

from collections.abc import Callable

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


def bare(config: RunConfig, turn: Callable[[], None]) -> None:
    """Forward and backward passes of the same model and loss, and fused AdamW, with memory kept: nothing else."""
    keep_memory()
    model = make(config)
    update(config, model, model.loss, torch.optim.AdamW(model.parameters(), fused=True), turn)


def plain(config: RunConfig, turn: Callable[[], None]) -> None:
    """What one writes at first, as in nanoGPT: all logits at once, AdamW by default, clipping, the loss read."""
    model = make(config)

    def loss(tokens: Tensor) -> Tensor:
        logits = model(tokens)[:, :-1]
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    update(config, model, loss, torch.optim.AdamW(model.parameters()), turn, clip=1.0)


LOOPS = {"own": own, "bare": bare, "plain": plain}


def make(config: RunConfig) -> MiniGPT:
    """A fresh model of this shape on its device."""
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision(config.matmul_precision)
    return MiniGPT(model_config(config, read_meta(config.stream)["vocab_size"])).to(pick_device(config.device))


def update(config: RunConfig, model: nn.Module, loss: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer,
           turn: Callable[[], None], clip: float = 0.0) -> None:
    """Update for ever, with as many micro-batches an update as the configuration has."""
    kind, micro_batches = pick_device(config.device).type, config.tokens_per_step // config.device_token_capacity
    shape = config.device_token_capacity // config.seq_len, config.seq_len
    if config.compile != "off":
        loss = torch.compile(loss, mode=config.compile, dynamic=False)
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
