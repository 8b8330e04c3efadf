"""The two clocks of a run: measured, and modelled from what a micro-batch and an update cost on this machine."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Seconds of one micro-batch, and of one update on top of its micro-batches."""

    micro_batch_seconds: float
    update_seconds: float


class Clock:
    """Seconds from `start` to `stop` or now, without the pauses; 0 before the start.

    `elapsed` is the budget's time: measured, or with `costs` the modelled sum over the updates made since the start.
    A clock set to the `readings` of another goes on from them when it is started.
    """

    def __init__(self, costs: Costs | None = None):
        self.costs = costs
        self.started = self.stopped = None
        self.carried = 0.0  # measured by earlier attempts, up to their last checkpoint
        self.modelled = 0.0
        self.paused = 0.0
        self.pace = 0.0  # measured seconds a micro-batch, in the last update

    @property
    def readings(self) -> dict[str, float]:
        """What a clock that goes on from here has to know."""
        return {"measured": self.measured, "modelled": self.modelled, "paused": self.paused, "pace": self.pace}

    def set(self, readings: Mapping[str, float]) -> None:
        """Show the readings of another clock, until started."""
        self.carried, self.modelled = readings["measured"], readings["modelled"]
        self.paused, self.pace = readings["paused"], readings["pace"]

    def start(self) -> None:
        self.carried += self.paused  # of earlier attempts, which `measured` takes off again
        self.started = time.perf_counter()

    def stop(self) -> None:
        self.stopped = time.perf_counter()

    @property
    def measured(self) -> float:
        if self.started is None:
            return self.carried
        return self.carried + (self.stopped or time.perf_counter()) - self.started - self.paused

    @property
    def elapsed(self) -> float:
        return self.modelled if self.costs else self.measured

    def expected(self, micro_batches: int) -> float:
        """Seconds of an update of so many micro-batches: modelled, or at the last one's pace (0 before the first)."""
        if self.costs:
            return micro_batches * self.costs.micro_batch_seconds + self.costs.update_seconds
        return micro_batches * self.pace

    def update(self, micro_batches: int, seconds: float) -> None:
        """Count an update that took these seconds; the warm-up update, before the start, counts nothing."""
        if self.started is not None:
            self.modelled += self.expected(micro_batches) if self.costs else 0.0
            self.pace = seconds / micro_batches

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out what happens inside, such as validation."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if self.started is not None:
                self.paused += time.perf_counter() - max(begin, self.started)
