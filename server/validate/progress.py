"""What the terminal shows during a validation: a bar for the stage that runs, and a line for each that is over."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from server.validate.result import StageResult


class Shown:
    """On standard error; where that is no terminal, lines only."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (
            TextColumn("{task.description:<24}"),
            BarColumn(),
            TextColumn("{task.fields[now]}"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=1.0, now="")

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """While it runs."""
        self._progress.reset(self._task, description=escape(title), now="")
        with self._progress:
            yield

    def told(self, fraction: float, now: str) -> None:
        """How far the stage is."""
        self._progress.update(self._task, completed=fraction, now=escape(now))

    def ended(self, title: str, result: StageResult, is_kept: bool) -> None:
        """A line that stays, and one for each check that failed."""
        count = {
            word: sum(check.outcome == word for check in result.checks) for word in ("passed", "failed", "skipped")
        }
        found = ", ".join(f"{number} {word}" for word, number in count.items() if number)
        self.note(f"{title}: {found} ({'as before' if is_kept else f'{result.seconds:.0f} s'})")
        for check in result.failed:
            self._console.print(f"  {check.name}: {check.reason}", style="red", highlight=False, markup=False)

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)
