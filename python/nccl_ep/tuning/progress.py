"""How far tuning is: by tqdm where it is installed, else by lines."""

from __future__ import annotations

import sys
import time
from typing import Any

# Shorter work shows nothing.
_SECONDS_WITHOUT_PROGRESS = 2.0
_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """The progress of one algorithm, on stderr; a notebook gets tqdm's own widget."""

    def __init__(self, wanted: bool, algorithm: str, total: int) -> None:
        self._title, self._total, self._done = f"tuning {algorithm}", total, 0
        self._start = self._printed = time.monotonic()
        self._prints = wanted and sys.stderr is not None
        self._bar: Any = None
        if not wanted:
            return
        try:
            # It chooses between a notebook's widget and text.
            from tqdm.auto import tqdm  # type: ignore[import-untyped, import-not-found, unused-ignore]
        except ImportError:
            return
        # In a log file, where nothing can be overwritten, lines are rarer.
        interval = 0.1 if self._prints and sys.stderr.isatty() else _SECONDS_BETWEEN_LINES
        self._bar = tqdm(total=total, desc=self._title, unit="candidate", delay=_SECONDS_WITHOUT_PROGRESS,
                         mininterval=interval, maxinterval=interval)

    def step(self) -> None:
        """One candidate more is measured."""
        self._done += 1
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update()
        elif self._prints and (now - self._printed >= _SECONDS_BETWEEN_LINES
                               or self._done == self._total and self._printed != self._start):
            self._printed = now
            print(f"{self._title}: {self._done}/{self._total}, {now - self._start:.0f} s", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the bar, also before everything is measured."""
        if self._bar is not None:
            self._bar.close()
