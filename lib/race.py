"""Training loops against each other: each in a process of its own, which trains only while it is its turn."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pandas as pd
import torch

from lib.config import RunConfig
from lib.loops import LOOPS
from lib.machine import matmul_peak, peak_memory, pick_device


class Turn:
    """What a loop calls after each update: it counts them while it is its turn, reports, and waits for the next."""

    def __init__(self, pipe: Connection, device: torch.device):
        self.pipe, self.device, self.updates, self.begin, self.end = pipe, device, 0, 0.0, 0.0

    def __call__(self) -> None:
        self.updates += 1
        if time.perf_counter() < self.end:
            return
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self.pipe.send((self.updates, time.perf_counter() - self.begin, peak_memory(self.device)))
        seconds = self.pipe.recv()
        self.updates, self.begin = 0, time.perf_counter()
        self.end = self.begin + seconds


def contend(loop: str, config: RunConfig, pipe: Connection) -> None:
    """Train by this loop in a process of its own, one turn after another."""
    LOOPS[loop](config, Turn(pipe, pick_device(config.device)))


@contextmanager
def contender(loop: str, config: RunConfig) -> Iterator[Callable[[float], tuple]]:
    """A loop that has made its first update: a call gives it a turn of seconds, and returns updates, seconds, memory.

    `first` on it are the seconds from the start of its process to the end of the first update. Raises RuntimeError
    where it dies.
    """
    pipe, other = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=contend, args=(loop, config, other), daemon=True)

    def answer() -> tuple:
        try:
            return pipe.recv()
        except (EOFError, ConnectionError):
            process.join()
            raise RuntimeError(f"the {loop} loop ended with status {process.exitcode}") from None

    def turn(seconds: float) -> tuple:
        with suppress(ConnectionError):  # the answer tells
            pipe.send(seconds)
        return answer()

    begin = time.perf_counter()
    process.start()
    other.close()
    try:
        answer()
        turn.first = time.perf_counter() - begin
        yield turn
    finally:
        process.kill()
        process.join()


def race(config: RunConfig, loops: Sequence[str], rounds: int, seconds: float) -> pd.DataFrame:
    """A row a turn: round, loop, tokens_per_second, peak_memory, first, peak.

    `peak_memory` is the process's, in bytes; `first` are the seconds from its start to the end of the first update,
    which compiles; `peak` is the FLOP/s of a matrix product in that round. A turn takes so many `seconds`, and at least
    one update.
    """
    rows, device, loops = [], pick_device(config.device), [*loops]
    with ExitStack() as stack:
        turns = {loop: stack.enter_context(contender(loop, config)) for loop in loops}
        for number in range(rounds):
            peak = matmul_peak(device, config.precision, min(seconds, 1.0))
            for loop in [*loops[number % len(loops):], *loops[:number % len(loops)]]:
                updates, took, memory = turns[loop](seconds)
                speed = updates * config.tokens_per_step / took
                rows.append({"round": number, "loop": loop, "tokens_per_second": speed, "peak_memory": memory,
                             "first": turns[loop].first, "peak": peak})
    return pd.DataFrame(rows)
