"""A progress bar for the base checkpoint, on a terminal only; elsewhere the log and systemd tell."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class ProgressBar:
    """Shows how much of ``total`` bytes has been loaded. Does nothing unless stderr is a terminal."""

    def __init__(self, total: int) -> None:
        self._progress: Progress | None = None
        if total and sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("loading checkpoint"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._progress.add_task("load", total=total)
            self._progress.start()

    def update(self, done: int) -> None:
        """Show that ``done`` bytes of the total are in place."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done)

    def close(self) -> None:
        """Show the bar as full and leave it on the screen."""
        if self._progress is not None:
            self._progress.update(self._task, completed=self._progress.tasks[0].total)
            self._progress.stop()
            self._progress = None
