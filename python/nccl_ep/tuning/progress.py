"""How far tuning is: by tqdm where it is installed, else by a bar or by lines of its own."""

from __future__ import annotations

import sys
import time
from typing import Any

# Shorter work shows nothing.
_SECONDS_WITHOUT_PROGRESS = 2.0
# Where nothing can be overwritten, such as in a log file, lines are rarer.
_SECONDS_BETWEEN_LINES = 10.0
_WIDTH = 30


class Progress:
    """The progress of one algorithm, on stderr; a notebook gets tqdm's own widget."""

    def __init__(self, wanted: bool, algorithm: str, total: int) -> None:
        self._title, self._total, self._done = f"tuning {algorithm}", total, 0
        self._start = self._printed = time.monotonic()
        self._wanted = wanted
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._bar = self._tqdm() if wanted else None

    def step(self) -> None:
        """One candidate more is measured."""
        self._done += 1
        if self._bar is not None:
            self._bar.update()
        elif self._wanted and sys.stderr is not None:
            self._print(time.monotonic())

    def close(self) -> None:
        """Ends the bar, also before everything is measured."""
        if self._bar is not None:
            self._bar.close()

    def _tqdm(self) -> Any:
        try:
            # It chooses between a notebook's widget and text.
            from tqdm.auto import tqdm  # type: ignore[import-untyped, import-not-found, unused-ignore]
        except ImportError:
            return None
        interval = 0.1 if self._terminal else _SECONDS_BETWEEN_LINES
        return tqdm(total=self._total, desc=self._title, unit="candidate",
                    delay=_SECONDS_WITHOUT_PROGRESS, mininterval=interval, maxinterval=interval)

    def _print(self, now: float) -> None:
        seconds = now - self._start
        text = f"{self._done}/{self._total}, {seconds:.0f} s"
        ended = self._done == self._total
        if self._terminal and seconds >= _SECONDS_WITHOUT_PROGRESS:
            filled = _WIDTH * self._done // self._total
            bar = "#" * filled + "." * (_WIDTH - filled)
            print(f"\r{self._title} [{bar}] {text}", end="\n" if ended else "", file=sys.stderr,
                  flush=True)
        elif not self._terminal and (now - self._printed >= _SECONDS_BETWEEN_LINES
                                     or ended and self._printed != self._start):
            self._printed = now
            print(f"{self._title}: {text}", file=sys.stderr, flush=True)
