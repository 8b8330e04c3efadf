"""One optimizer step: gradients accumulated over micro-batches, clipping, AdamW; and what a step costs here."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from math import inf, log
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lib.clock import Costs
from lib.config import RunConfig, under_root
from lib.machine import device_name, environment, keep_memory, pick_device
from lib.model import MiniGPT, ModelConfig
from lib.ranks import Ranks
from lib.rules import Hyperparameters
from lib.runs import digest, make_folder, read_json, write_json
from lib.stream import PackedStream

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Objective(torch.nn.Module):
    """The loss as a module, which is what DistributedDataParallel wraps."""

    def __init__(self, model: MiniGPT, loss: Callable[[Tensor], Tensor]):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(tokens)


class Learner:
    """A model with its optimizer. With several ranks, each takes its own rows, and all take the same step."""

    def __init__(self, config: RunConfig, vocab_size: int, ranks: Ranks | None = None):
        self.device, self.ranks = pick_device(config.device), ranks or Ranks()
        keep_memory()
        self.micro_batch = config.device_token_capacity
        self.grad_clip = config.grad_clip or inf
        self.autocast = partial(torch.autocast, self.device.type, DTYPES.get(config.precision),
                                enabled=config.precision in DTYPES)
        torch.set_float32_matmul_precision(config.matmul_precision)
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            self.model = MiniGPT(model_config(config, vocab_size))
        self.model.to(self.device)
        self.model.activation_checkpointing = config.activation_checkpointing
        self.loss = self.model.loss
        self.compiled, self.warm_graphs = config.compile != "off", 0
        if self.compiled:
            torch.compiler.reset()  # dynamo counts what earlier runs of this process compiled, and gives up at some
            torch._dynamo.utils.counters.clear()
            self.loss = torch.compile(self.model.loss, mode=config.compile, dynamic=False, fullgraph=config.fullgraph)
        if self.ranks.size > 1:
            self.loss = DistributedDataParallel(Objective(self.model, self.loss))
        # Norm gains are not decayed, as usual; everything else is a matrix.
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        gains = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, fused=True)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.precision == "fp16")
        self.mean_square: Tensor | None = None  # mean |g|² of the last update's micro-batches; None where it had one

    def accumulate(self, rows: np.ndarray, micro_batch: int | None = None) -> Tensor:
        """Make the gradient of the mean loss over `rows` [B, S], `micro_batch` tokens at a time; returns that loss.

        All targets of the update weigh the same, since every micro-batch has as many, on every rank. The ranks exchange
        gradients with the last micro-batch alone, whose own gradient is then not to be had.
        """
        parts = np.split(rows, rows.size // (micro_batch or self.micro_batch))
        parameters = [*self.model.parameters()]
        total, squares, held = torch.zeros((), device=self.device), [], None
        for number, part in enumerate(parts, 1):
            tokens, inner = torch.from_numpy(part).to(self.device), number < len(parts)
            if not inner and self.ranks.size > 1:
                put(parameters, held)
            with self.loss.no_sync() if self.ranks.size > 1 and inner else nullcontext():
                with self.autocast():
                    loss = self.loss(tokens) / len(parts)
                self.scaler.scale(loss).backward()
            total += loss.detach()
            if len(parts) > 1 and (inner or self.ranks.size == 1):
                gradient = [p.grad for p in parameters]
                squares.append(torch.nn.utils.get_total_norm(gradient) ** 2)
                held = gradient if held is None else torch._foreach_add_(held, gradient) or held
                put(parameters, None if inner else held)
        if squares:
            scale = len(parts) / self.scaler.get_scale()
            self.mean_square = self.ranks.mean(torch.stack(squares).mean() * scale**2)
        else:
            self.mean_square = None
        return self.ranks.mean(total)

    def warm_up(self, rows: np.ndarray) -> None:
        """Compile, and touch memory, with a gradient that is thrown away."""
        with torch.random.fork_rng():
            self.accumulate(rows)
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def graphs(self) -> int:
        """Graphs compiled so far."""
        return torch._dynamo.utils.counters["stats"]["unique_graphs"] if self.compiled else 0

    def warmed(self) -> None:
        """From here on, whatever is compiled is compiled again."""
        self.warm_graphs = self.graphs

    def compilation(self) -> dict[str, int] | None:
        """Graphs, breaks between them, and graphs compiled since it was warm; None where nothing is compiled."""
        return {"graphs": self.graphs, "graph_breaks": torch._dynamo.utils.counters["graph_break"].total(),
                "recompilations": self.graphs - self.warm_graphs} if self.compiled else None

    def clip(self) -> Tensor:
        """Scale the gradient down to the largest allowed norm; returns its norm before."""
        self.scaler.unscale_(self.optimizer)
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)

    def apply(self, lr: float, hyperparameters: Hyperparameters) -> None:
        """Take the step with this learning rate, and drop the gradient; fp16 skips it where that is not finite."""
        for group in self.optimizer.param_groups:
            group["lr"], group["eps"] = lr, hyperparameters.eps
            group["betas"] = hyperparameters.beta1, hyperparameters.beta2
        self.optimizer.param_groups[0]["weight_decay"] = hyperparameters.weight_decay
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def sound(self) -> bool:
        """Whether every weight is finite."""
        return bool(torch.stack([p.isfinite().all() for p in self.model.parameters()]).all())

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
        sums = torch.zeros(3, dtype=torch.float64)  # nats, targets, bytes
        for start in range(self.ranks.rank * batch, rows, self.ranks.size * batch):
            part = torch.from_numpy(stream.validation(start, min(batch, rows - start)))
            with self.autocast():
                loss = self.model.loss(part.to(self.device))
            targets = part[:, 1:]
            sums += torch.stack([loss.cpu().double() * targets.numel(), torch.tensor(targets.numel()),
                                 bytes_of[targets].sum()])
        nats, targets, size = self.ranks.sum(sums).tolist()
        return nats / targets, nats / log(2) / size


def put(parameters: list[Tensor], gradient: list[Tensor] | None) -> None:
    """Give the parameters this gradient, or none."""
    for number, parameter in enumerate(parameters):
        parameter.grad = gradient and gradient[number]


def model_config(config: RunConfig, vocab_size: int) -> ModelConfig:
    """The model's shape in this run."""
    return ModelConfig(vocab_size, config.seq_len, config.hidden_size, config.layers, config.heads, config.mlp_size,
                       config.rope_theta)


def out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory did not suffice, of a GPU or of the machine."""
    words = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words))


def calibrate(config: RunConfig, vocab_size: int) -> Costs:
    """What a micro-batch and an update cost on this machine, in seconds: measured once, then read from its record.

    Medians over three seconds of steps on random tokens, rounded to three digits. The record lies beside the runs, so
    that runs on the modelled clock stay comparable however busy the machine is later.
    """
    key, record = calibration(config, vocab_size)
    if (known := read_json(record)) is None:
        make_folder(record.parent)
        with torch.random.fork_rng():  # of a model that draws while it trains
            micro_batch, update = measure_step(replace(config, seed=0), vocab_size)
        known = {"costs": {"micro_batch_seconds": micro_batch, "update_seconds": update}, "of": key,
                 "environment": environment(pick_device(config.device))}
        write_json(record, known)
    return Costs(**known["costs"])


def calibrated(config: RunConfig, vocab_size: int) -> Costs | None:
    """What `calibrate` returns, where it has been measured before."""
    known = read_json(calibration(config, vocab_size)[1])
    return known and Costs(**known["costs"])


def calibration(config: RunConfig, vocab_size: int) -> tuple[dict, Path]:
    """What the costs of a step depend on, and the file that records them."""
    names = ["device_token_capacity", "precision", "compile", "matmul_precision"]
    names += [name for name in ("fullgraph", "activation_checkpointing") if getattr(config, name)]
    key = asdict(model_config(config, vocab_size)) | {name: getattr(config, name) for name in names} | {
        "device": device_name(pick_device(config.device)), "threads": torch.get_num_threads(),
        "torch": torch.__version__}
    return key, under_root(config.runs) / "calibration" / f"{digest(key)}.json"


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
        learner.apply(0.0, config.hyperparameters(config.resolved()[0]))
        learner.synchronize()
        times.append((middle - start, time.perf_counter() - middle))
    micro_batch, update = zip(*times[3:], strict=True)  # the first ones compile and touch fresh memory
    return float(f"{median(micro_batch):.3g}"), float(f"{median(update):.3g}")
