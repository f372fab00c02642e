"""Ctrl-C, SIGTERM, a closed terminal: the first asks the study to stop cleanly, the second ends
the process.

Handlers only set a flag, so no write is ever cut in half. Outside the main thread Python has no
signal handlers, and a study that runs there is stopped by its caller's means alone. A signal that
is ignored already, as `nohup` ignores the closed terminal, stays so.
"""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from archsearch.errors import EXIT_INTERRUPTED

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """A context in which `wanted` says whether somebody asked to stop."""

    def __init__(self) -> None:
        self.wanted = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            found = {each: signal.getsignal(each) for each in _SIGNALS}
            self._before = {k: v for k, v in found.items() if v is not signal.SIG_IGN}
        self.install()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def install(self) -> None:
        """Put the handlers in place, again if somebody else has put theirs there."""
        for each in self._before:
            signal.signal(each, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.wanted:
            os._exit(EXIT_INTERRUPTED)
        self.wanted = True
