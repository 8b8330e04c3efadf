"""A folder that is written whole or not at all."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lib.check import BadInput


@contextmanager
def all_or_nothing(folder: Path, name: str) -> Iterator[Path]:
    """A sibling folder, locked against other processes, that takes the place of `folder` when the block ends well.

    A block that fails, or writes nothing, leaves everything as it was. Raises BadInput, naming the parameter, where the
    folder cannot be made, is being written, or has been filled by then.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        lock = os.open(partial, os.O_RDONLY)
    except OSError as error:
        raise BadInput(f"{name} = {str(folder)!r}: must be a folder that can be made ({error})") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise BadInput(f"{name} = {str(folder)!r}: is being written by another process; wait for it") from None
    try:
        for stale in partial.glob("*"):  # of a process that was killed
            stale.unlink()
        yield partial
        if any(partial.iterdir()):
            for file in (*partial.iterdir(), partial):
                _sync(file)
            try:
                partial.rename(folder)  # onto an empty folder, too
            except OSError as error:
                raise BadInput(f"{name} = {str(folder)!r}: must be a folder that can be made ({error})") from None
            _sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
