"""Ctrl-C, a notebook's interrupt and SIGTERM: a run stops at its next update boundary."""

import signal
import threading


class Interrupt:
    """While it is entered, the first such signal sets `asked`; another acts at once, as it would without this.

    Signals reach Python's main thread alone: in any other, `asked` stays False.
    """

    def __init__(self):
        self.asked, self._before = False, {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _ask(self, number: int, frame: object) -> None:
        self.asked = True
        self.__exit__()

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
