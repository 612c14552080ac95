"""The private folder of a server's sockets, and those that servers left behind whose processes were all killed at once.

Made by the process that starts ranks: the supervisor, `node.py` on other machines, `other_ranks.py`. It is removed by
the last process to leave (`child.py`), if one is left to do it; else by the next start of a server of the same user.
Who lives holds a lock on its folder, which the system takes back from the dead only: an age would prove nothing, nor
would the number of a process, which is another one's in another container. systemd-tmpfiles spares locked folders too.
"""

import contextlib
import fcntl
import itertools
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from server.options import OptionError

logger = logging.getLogger(__name__)

PREFIX = "firstlight-"
MARK = "locked"
"""An empty file that is there once the folder is locked. A folder without it proves nothing and is left alone."""
MAX_ENTRIES = 10_000
"""Of the place where such folders are, that are looked at."""


class RunDir:
    """A new folder, which this process holds until it removes it or ends."""

    def __init__(self) -> None:
        """Raises OptionError where there is no place for it."""
        try:
            place = Path(tempfile.gettempdir())
            remove_abandoned(place)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise OptionError(f"cannot make a folder for sockets (TMPDIR says where): {error.strerror}") from None
        with contextlib.suppress(OSError):  # a file system without locks: then it is not marked
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.path / MARK).touch()

    def close(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned(place: Path) -> None:
    """Folders of this user's servers whose process has ended."""
    for name in _names(place):
        try:
            folder = os.open(place / name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # a file, a link, another user's, or gone by now
            continue
        try:
            if _is_abandoned(folder):
                _remove(place / name, folder)
        except FileNotFoundError:  # another server removes it
            continue
        except OSError as error:
            logger.warning("cannot remove %s, which a killed server left behind: %s", place / name, error.strerror)
        finally:
            os.close(folder)


def _names(place: Path) -> list[str]:
    try:
        with os.scandir(place) as entries:
            return [entry.name for entry in itertools.islice(entries, MAX_ENTRIES) if entry.name.startswith(PREFIX)]
    except OSError as error:
        logger.warning("cannot look into %s for what killed servers left behind: %s", place, error.strerror)
        return []


def _is_abandoned(folder: int) -> bool:
    """Whether it is private, this user's, marked, and can be locked, which it then is until it is closed."""
    facts = os.fstat(folder)
    if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) != stat.S_IRWXU or MARK not in os.listdir(folder):
        return False
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(path: Path, folder: int) -> None:
    """By its descriptor, so that nothing else can be meant: files of the folder itself, the mark last."""
    for name in sorted(os.listdir(folder), key=lambda name: name == MARK):
        os.unlink(name, dir_fd=folder)
    path.rmdir()
    logger.info("removed %s, which a killed server left behind", path)
