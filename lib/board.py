"""TensorBoard: what a run logs, as curves against tokens in event files."""

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from lib.check import BadInput

FLUSH_SECONDS = 15  # that a curve may lag behind the run
ASIDE = ("step", "tokens", "elapsed", "stage", "clipped")  # what is no curve of its own


def check(asked: bool) -> None:
    """Raise BadInput where TensorBoard is asked for and not installed."""
    try:
        if asked:
            import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        raise BadInput("tensorboard = True: needs the package; install it with pip install -e '.[tensorboard]'"
                       ) from None


class Board:
    """The curves of one run. Relative time in TensorBoard is the run's clock. Takes nothing until it is opened."""

    def __init__(self):
        self._writer = None

    def open(self, folder: Path, rows: bytes, validation: Iterable[Mapping[str, float]]) -> None:
        """Begin with what was logged so far, in a new file that takes the place of those of earlier attempts.

        Those may have come further than the checkpoint that the run goes on from, or, killed, not as far.
        """
        from torch.utils.tensorboard import SummaryWriter  # an extra

        earlier, logged = [*folder.glob("events.out.tfevents.*")], [*map(json.loads, rows.splitlines())]
        # The purge has a TensorBoard that is looking on drop what it has read of the earlier ones.
        self._writer = SummaryWriter(str(folder), purge_step=0, flush_secs=FLUSH_SECONDS)
        self._began = time.time() - (logged[-1]["elapsed"] if logged else 0.0)
        self._shown = {"train": 0, "validation": 0}
        for group, entries in (("train", logged), ("validation", validation)):
            for entry in entries:
                self.add(group, entry)
        self._writer.flush()
        for path in earlier:
            path.unlink()

    def add(self, group: str, entry: Mapping[str, float | None]) -> None:
        """Add what was measured at the entry's `tokens`, each as GROUP/NAME; what is there already is left out."""
        if self._writer is None or entry["tokens"] <= self._shown[group]:
            return
        self._shown[group] = entry["tokens"]
        for name, value in entry.items():
            if value is not None and name not in ASIDE:
                self._writer.add_scalar(f"{group}/{name}", value, entry["tokens"], self._began + entry["elapsed"])

    def close(self, meta: Mapping[str, object]) -> None:
        """Add the final validation of run_meta.json, and write what is left to write."""
        if self._writer is not None:
            self.add("validation", {"tokens": meta["tokens"], "elapsed": meta["elapsed_seconds"],
                                    "loss": meta["validation_loss"],
                                    "bits_per_byte": meta["validation_bits_per_byte"]})
            self._writer.close()
            self._writer = None
