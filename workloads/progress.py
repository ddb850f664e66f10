"""How far a replay is: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import time

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ropewalk.workloads.metrics import TurnRecord

LINE_INTERVAL_S = 5.0
RECENT_TURNS = 50


class ConsoleProgress:
    """Shows turns done, recent TTFT and errors on `console`."""

    def __init__(self, console: Console, title: str = "replay") -> None:
        self._console = console
        self._title = title
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._total = 0
        self._done = 0
        self._errors = 0
        self._recent: list[float] = []
        self._last_line = 0.0

    def begin(self, total: int) -> None:
        """Start showing `total` turns."""
        self._total = total
        self._last_line = time.monotonic()
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("turns {task.fields[state]}"),
                TimeElapsedColumn(),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=total, state="")
        else:
            self._console.print(f"{self._title}: {total} turns", highlight=False)

    def turn_done(self, arm: str, record: TurnRecord) -> None:
        """Count one turn."""
        self._done += 1
        self._errors += record.error is not None
        if record.ttft_ms is not None:
            self._recent = [*self._recent[1 - RECENT_TURNS :], record.ttft_ms]
        if self._bar is not None:
            self._bar.update(self._task, advance=1, state=f"{arm} {self._state()}")
        elif self._done == self._total or time.monotonic() - self._last_line >= LINE_INTERVAL_S:
            self._last_line = time.monotonic()
            self._console.print(f"{self._title}: {self._done}/{self._total} turns, {self._state()}", highlight=False)

    def end(self) -> None:
        """Stop showing."""
        if self._bar is not None:
            self._bar.stop()

    def _state(self) -> str:
        ttft = f"TTFT p50 {np.median(self._recent):.0f} ms" if self._recent else "no reply yet"
        return f"{ttft}, {self._errors} errors"
