"""Many runs: those that have ended are reused, the others trained one after another."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from IPython import get_ipython
from IPython.display import display

from lib.check import require
from lib.config import RunConfig, under_root
from lib.runs import Run, make_folder, read_json, write_json
from lib.train import train

UPDATE_SECONDS = 10  # between two updates of the line


def sweep(configs: Iterable[RunConfig], title: str) -> list[Run]:
    """Train each configuration once, in order; returns their runs. A run that diverges does not stop the sweep.

    The names of the runs are written to sweeps/TITLE.json beside them, so that an analysis knows which belong together.
    """
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
    record = sweep_record(configs[0].runs, title)
    make_folder(record.parent)
    write_json(record, [run.name for run in runs])
    minutes = (time.monotonic() - begin) / 60
    show(f"{title}: {len(runs)} done, {len(trained)} trained now in {minutes:.1f} min, the others reused")
    return runs


def sweep_record(runs: str, title: str) -> Path:
    """The file that names the runs of a sweep."""
    return under_root(runs) / "sweeps" / f"{title}.json"


def swept(runs: str, *titles: str) -> list[str]:
    """The names of the runs of these sweeps. Raises BadInput for a sweep that has not been made."""
    names = []
    for title in titles:
        found = read_json(sweep_record(runs, title))
        require(found is not None, "runs", runs, f"holds no sweep {title!r}; execute the notebook that makes it first")
        names += found
    return names


def updating_line() -> Callable[[str], object]:
    """A function that shows a line: in a notebook in place of the one before, elsewhere below it."""
    if get_ipython() is None:
        return print
    handle = display({"text/plain": ""}, raw=True, display_id=True)
    return lambda text: handle.update({"text/plain": text}, raw=True)
