"""Many runs: those that have ended are reused, the others trained one after another."""

import time
from collections.abc import Callable, Iterable

from IPython import get_ipython
from IPython.display import display

from lib.config import RunConfig
from lib.runs import Run
from lib.train import train

UPDATE_SECONDS = 10  # between two updates of the line


def sweep(configs: Iterable[RunConfig], title: str = "runs") -> list[Run]:
    """Train each configuration once, in order; returns their runs. A run that diverges does not stop the sweep."""
    configs = list(dict.fromkeys(configs))
    show, runs, trained, begin = updating_line(), [], [], time.monotonic()
    said = begin

    def report(message: str) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said > UPDATE_SECONDS:
            said = now
            left = (now - begin) / len(trained) * (len(configs) - len(runs)) / 60 if trained else None
            about = f", about {left:.0f} min left" if left is not None else ""
            show(f"{title}: {len(runs)} of {len(configs)} done{about} · {message.strip()}")

    for config in configs:
        before = time.time()
        runs.append(train(config, report))
        if (runs[-1].path / "run_meta.json").stat().st_mtime >= before:
            trained.append(runs[-1])
    minutes = (time.monotonic() - begin) / 60
    show(f"{title}: {len(runs)} done, {len(trained)} trained now in {minutes:.1f} min, the others reused")
    return runs


def updating_line() -> Callable[[str], object]:
    """A function that shows a line: in a notebook in place of the one before, elsewhere below it."""
    if get_ipython() is None:
        return print
    handle = display({"text/plain": ""}, raw=True, display_id=True)
    return lambda text: handle.update({"text/plain": text}, raw=True)
