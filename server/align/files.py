"""Files that `firstlight align` and `firstlight ops` write: a mistake is said before anything is computed. In their
processes.
"""

from collections.abc import Iterable
from pathlib import Path

from server.options import OptionError


def check_folders(files: Iterable[Path | None]) -> None:
    """Raises OptionError for a file whose folder is not there."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise OptionError(f"cannot write {file}: there is no folder {file.parent}")


def write(path: Path, text: str) -> None:
    """Raises OptionError."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error}") from None
