"""One optimizer step: gradients accumulated over micro-batches, clipping, AdamW; and what a step costs here."""

import time
from dataclasses import asdict, replace
from math import inf, log
from statistics import median

import numpy as np
import torch
from torch import Tensor

from lib.clock import Costs
from lib.config import RunConfig, under_root
from lib.machine import device_name, environment, pick_device
from lib.model import MiniGPT, ModelConfig
from lib.rules import Hyperparameters
from lib.runs import digest, make_folder, read_json, write_json
from lib.stream import PackedStream


class Learner:
    """A model with its optimizer."""

    def __init__(self, config: RunConfig, vocab_size: int):
        self.device = pick_device(config.device)
        self.micro_batch = config.device_token_capacity
        self.grad_clip = config.grad_clip or inf
        self.bf16 = config.precision == "bf16"
        torch.set_float32_matmul_precision(config.matmul_precision)
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self.model = MiniGPT(model_config(config, vocab_size))
        self.model.to(self.device)
        self.loss = self.model.loss
        if config.compile != "off":
            self.loss = torch.compile(self.model.loss, mode=config.compile, dynamic=False)
        # Norm gains are not decayed, as usual; everything else is a matrix.
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        gains = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, fused=True)

    def accumulate(self, rows: np.ndarray) -> Tensor:
        """Add the gradient of the mean loss over `rows` [B, S], a micro-batch at a time; returns that mean loss.

        All targets of the update weigh the same, since every micro-batch has as many.
        """
        parts = np.split(rows, rows.size // self.micro_batch)
        total = torch.zeros((), device=self.device)
        for part in parts:
            tokens = torch.from_numpy(part).to(self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                loss = self.loss(tokens) / len(parts)
            loss.backward()
            total += loss.detach()
        return total

    def clip(self) -> Tensor:
        """Scale the gradient down to the largest allowed norm; returns its norm before."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)

    def apply(self, lr: float, hyperparameters: Hyperparameters) -> None:
        """Take the step with this learning rate, and drop the gradient."""
        for group in self.optimizer.param_groups:
            group["lr"], group["eps"] = lr, hyperparameters.eps
            group["betas"] = hyperparameters.beta1, hyperparameters.beta2
        self.optimizer.param_groups[0]["weight_decay"] = hyperparameters.weight_decay
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def synchronize(self) -> None:
        """Wait until the device has done what it was given, so that time is measured right."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    @torch.no_grad()
    def evaluate(self, stream: PackedStream, tokens: int | None) -> tuple[float, float]:
        """Loss over the first `tokens` of the validation split: nats a target, and bits a UTF-8 byte of the targets.

        The sum over all targets is divided by their number, so the size of the micro-batch does not matter.
        """
        bytes_of = torch.from_numpy(stream.token_bytes())
        rows, batch = stream.validation_rows(tokens), self.micro_batch // self.model.config.seq_len
        nats, targets, size = 0.0, 0, 0
        for start in range(0, rows, batch):
            part = torch.from_numpy(stream.validation(start, min(batch, rows - start)))
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                losses = self.model.token_losses(part.to(self.device))
            nats += losses.cpu().double().sum().item()
            targets += losses.numel()
            size += bytes_of[part[:, 1:]].sum().item()
        return nats / targets, nats / log(2) / size


def model_config(config: RunConfig, vocab_size: int) -> ModelConfig:
    """The model's shape in this run."""
    return ModelConfig(vocab_size, config.seq_len, config.hidden_size, config.layers, config.heads, config.mlp_size,
                       config.rope_theta)


def calibrate(config: RunConfig, vocab_size: int) -> Costs:
    """What a micro-batch and an update cost on this machine, in seconds: measured once, then read from its record.

    Medians over three seconds of steps on random tokens, rounded to three digits. The record lies beside the runs, so
    that runs on the modelled clock stay comparable however busy the machine is later.
    """
    device = pick_device(config.device)
    key = asdict(model_config(config, vocab_size)) | {
        name: getattr(config, name) for name in ("device_token_capacity", "precision", "compile", "matmul_precision")
    } | {"device": device_name(device), "threads": torch.get_num_threads(), "torch": torch.__version__}
    record = under_root(config.runs) / "calibration" / f"{digest(key)}.json"
    if (known := read_json(record)) is None:
        make_folder(record.parent)
        micro_batch, update = measure_step(replace(config, seed=0), vocab_size)
        known = {"costs": {"micro_batch_seconds": micro_batch, "update_seconds": update}, "of": key,
                 "environment": environment(device)}
        write_json(record, known)
    return Costs(**known["costs"])


def measure_step(config: RunConfig, vocab_size: int, seconds: float = 3.0) -> tuple[float, float]:
    """Median seconds of a micro-batch (forward and backward) and of an update (clipping and AdamW)."""
    learner = Learner(config, vocab_size)
    shape = config.device_token_capacity // config.seq_len, config.seq_len
    rows = np.random.default_rng(0).integers(0, vocab_size, shape)
    times = []

    deadline = time.perf_counter() + seconds
    while len(times) < 6 or time.perf_counter() < deadline:
        start = time.perf_counter()
        learner.accumulate(rows)
        learner.synchronize()
        middle = time.perf_counter()
        learner.clip()
        learner.apply(0.0, config.hyperparameters(config.stages()[0]))
        learner.synchronize()
        times.append((middle - start, time.perf_counter() - middle))
    micro_batch, update = zip(*times[3:], strict=True)  # the first ones compile and touch fresh memory
    return float(f"{median(micro_batch):.3g}"), float(f"{median(update):.3g}")
