"""The processes that share one run under torchrun; a single one without."""

import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as distributed

from lib.check import BadInput, require


class Ranks:
    """How many processes share the run, which of them this is, and what they agree on.

    `rank` counts from 0; `first` is the one that writes. With one process every method returns its argument.
    """

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size, self.first = rank, size, rank == 0

    @classmethod
    def join(cls) -> "Ranks":
        """The ranks that torchrun started, or the one process there is."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if not distributed.is_initialized():
            backend = "nccl" if torch.cuda.is_available() else "gloo"
            # Validation and a slow checkpoint of the first rank keep the others waiting.
            distributed.init_process_group(backend, timeout=timedelta(hours=2))
        return cls(distributed.get_rank(), size)

    def leave(self) -> None:
        """Close what connects the processes, when all have done."""
        if self.size > 1:
            distributed.destroy_process_group()

    def check(self, tokens_per_step: int, capacity: int) -> None:
        """Raise BadInput unless this T splits into whole micro-batches on every rank."""
        require(tokens_per_step % (capacity * self.size) == 0, "device_token_capacity", capacity,
                f"must split every T into whole micro-batches on {self.size} processes; {tokens_per_step:,} is not a "
                f"multiple of {capacity * self.size:,}")

    def share(self, make: Callable[[], object]) -> object:
        """What `make` returns, or the BadInput it raises, in the first process: the same in all."""
        if self.size == 1:
            return make()
        box = [None]
        if self.first:
            try:
                box = [make()]
            except BadInput as error:
                box = [error]
        distributed.broadcast_object_list(box)
        if isinstance(box[0], BadInput):
            raise box[0]
        return box[0]

    def agree(self, asked: bool, *readings: float) -> tuple:
        """Whether any process was asked to stop, and the readings of the first: one decision for all."""
        if self.size == 1:
            return asked, *readings
        mine = readings if self.first else [float("-inf")] * len(readings)
        values = self._reduced(torch.tensor([asked, *mine], dtype=torch.float64), distributed.ReduceOp.MAX).tolist()
        return bool(values[0]), *values[1:]

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean over all processes."""
        return value if self.size == 1 else self.sum(value) / self.size

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum over all processes."""
        return value if self.size == 1 else self._reduced(value, distributed.ReduceOp.SUM)

    def _reduced(self, value: torch.Tensor, operation: distributed.ReduceOp) -> torch.Tensor:
        shared = value.detach().to("cuda" if torch.cuda.is_available() else "cpu", copy=True)
        distributed.all_reduce(shared, operation)
        return shared.to(value.device)
