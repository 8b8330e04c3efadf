"""One run to measure, in a process of its own: nothing else fills its memory, and what kills it kills nothing else."""

import resource
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import TypeVar

from lib.check import BadInput, Unwritten
from lib.config import RunConfig
from lib.runs import Run, frame
from lib.sweep import workers
from lib.train import resolve, train

Result = TypeVar("Result")


def apart(memory: float, work: Callable[..., Result], *arguments: object) -> Result:
    """What `work` returns or raises in a fresh process that may fill `memory` GiB; 0 is no limit.

    The limit stands in for a GPU's memory, and holds for the process's data. Raises MemoryError where the process died.
    """
    try:
        with workers("processes:1") as (pool, _):
            return pool.submit(limited, memory, work, *arguments).result()
    except BrokenExecutor:
        raise MemoryError("its process was killed, as the system does where memory runs out") from None


def limited(memory: float, work: Callable[..., Result], *arguments: object) -> Result:
    """Set the limit, and work."""
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (int(memory * 2**30),) * 2)
    return work(*arguments)


def trained(config: RunConfig) -> str:
    """Train, and return the run's folder."""
    return str(train(config, lambda line: None).path)


def trial(config: RunConfig, own_process: bool = True, memory: float = 0.0) -> dict:
    """Train a run, or take it where it has ended before, and return its row; a run that fails has a `reason`.

    In a process of its own its peak memory is its own, and what kills it harms nothing else; `memory` is its limit.

    Of memory, compilation and speed: `peak_memory`, bytes; `compile_seconds`, what the first update took longer than
    the median one; `graphs`, `graph_breaks` and `recompilations` since the clock started; `update_seconds`.
    """
    run = resolve(config).run
    if not run.ended:
        try:
            run = Run(Path(apart(memory, trained, config) if own_process else trained(config)))
        except (BadInput, Unwritten):
            raise
        except Exception as error:  # of any kind: a backend's, out of memory, a graph break
            return {"status": "failed", "reason": first_line(error), "seed": config.seed}
    (row,), meta = frame([run]).to_dict("records"), run.meta
    if row["status"] != "finished":
        return row | {"reason": row["status"].replace("_", " ")}
    seconds = (run.metrics().tokens_per_step / run.metrics().tokens_per_second).astype(float)
    compiled = meta["compilation"] or {"graphs": 0, "graph_breaks": 0, "recompilations": 0}
    return row | compiled | {
        "reason": "", "peak_memory": meta["peak_memory_bytes"], "update_seconds": seconds[1:].median(),
        "compile_seconds": seconds[0] - seconds[1:].median() if meta["compilation"] else 0.0,
        "flops_per_second": meta["model_flops_per_second"],
    }


def first_line(error: BaseException) -> str:
    """The error in one line."""
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__
