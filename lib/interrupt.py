"""What stops a run at its next update: Ctrl-C, a notebook's interrupt, SIGTERM, or a file in its directory."""

import fcntl
import os
import signal
import threading
from pathlib import Path

from lib.check import require
from lib.config import under_root
from lib.runs import Run, write_whole

FILE = "stop"  # in the run's directory


def stop(run: Run | str | Path) -> None:
    """Ask the process that trains this run to stop it at its next update, as Ctrl-C would there.

    Raises BadInput where no process trains it, as far as this machine knows: on a file system that shares no locks
    with the machine of that process, make the file by hand.
    """
    run = run if isinstance(run, Run) else Run(under_root(run))
    require(run.path.is_dir(), "run", str(run), "must be a run's directory")
    require(held(run.path), "run", str(run), "must be one that is being trained")
    write_whole(run.path / FILE, b"")


def held(folder: Path) -> bool:
    """Whether a process holds this directory of a run."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


class Interrupt:
    """While it is entered, a signal or the file is a stop asked for; another signal acts at once, as without this.

    Signals reach Python's main thread alone, the file any process of any machine. A file that is there already is of
    an earlier time, and removed; so is the one that was obeyed, at the end.
    """

    def __init__(self, file: Path | None = None):
        self.asked, self._file, self._before = False, file, {}

    def look(self) -> bool:
        """Whether a stop has been asked for by now."""
        if self._file is not None and self._file.is_file():
            self.asked = True
        return self.asked

    def __enter__(self) -> "Interrupt":
        self._remove()
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _remove(self) -> None:
        if self._file is not None and self._file.is_file():  # where nothing can be written, not even this can be asked
            self._file.unlink()

    def __exit__(self, *_: object) -> None:
        self._restore()
        self.look()
        self._remove()
