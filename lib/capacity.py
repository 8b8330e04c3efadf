"""How many tokens a micro-batch takes best on this machine: the largest that fits into memory, and the fastest."""

from dataclasses import replace

import pandas as pd

from lib.config import RunConfig
from lib.machine import peak_memory, pick_device
from lib.step import measure_step, out_of_memory
from lib.stream import PackedStream
from lib.trial import apart

CLOSE = 1.125  # the search ends where the largest that fits and the smallest that does not are as near as this


def search(config: RunConfig, memory: float, most: int, seconds: float = 3.0) -> pd.DataFrame:
    """Try capacities, each in a process of its own: doublings of a row, then between; a row a try, in order of size.

    Columns: capacity, tokens; tokens_per_second, of forward and backward passes; peak_memory, bytes; fits. `memory`,
    GiB, is the limit of a process (0: the machine's own), and `most` the largest capacity to try. `seconds` are spent
    on each.
    """
    vocab_size, row, tried = PackedStream(config.stream, config.seq_len).vocab_size, config.seq_len, {}

    def attempt(rows: int) -> bool:
        if rows not in tried:
            sized = replace(config, device_token_capacity=rows * row, tokens_per_step=rows * row,
                            token_budget=rows * row, time_budget=None)
            try:
                tried[rows] = apart(memory, measured, sized, vocab_size, seconds)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                tried[rows] = {}
        return bool(tried[rows])

    rows = 1
    while attempt(rows) and 2 * rows * row <= most:
        rows *= 2
    fits, fails = (rows, None) if tried[rows] else (rows // 2, rows)
    while fails and fails > CLOSE * fits and fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if attempt(middle) else (fits, middle)
    if fits:
        fastest = max(tried, key=lambda rows: tried[rows].get("tokens_per_second", 0.0))
        for near in (fastest * 3 // 4, fastest * 3 // 2):
            if 0 < near * row <= most and near < (fails or near + 1):
                attempt(near)
    table = [{"capacity": rows * row, "fits": bool(found), **found} for rows, found in sorted(tried.items())]
    return pd.DataFrame(table, columns=["capacity", "fits", "tokens_per_second", "peak_memory"])


def measured(config: RunConfig, vocab_size: int, seconds: float) -> dict[str, float]:
    """Speed and memory of a micro-batch of this size."""
    micro_batch, _ = measure_step(config, vocab_size, seconds)
    return {"tokens_per_second": config.device_token_capacity / micro_batch,
            "peak_memory": peak_memory(pick_device(config.device))}


def propose(tries: pd.DataFrame, tokens_per_step: int, slack: float = 0.03) -> int:
    """The smallest capacity that divides T and is as fast as any of those that do, but for the share `slack`."""
    able = tries[tries["fits"] & (tokens_per_step % tries["capacity"] == 0)]
    return int(able[able["tokens_per_second"] >= (1 - slack) * able["tokens_per_second"].max()]["capacity"].min())
