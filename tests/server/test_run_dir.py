"""What servers that were killed leave behind is removed, and nothing else is."""

import contextlib
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from server import run_dir
from server.run_dir import MARK, PREFIX, RunDir, remove_abandoned

HOLD = "import sys; from server.run_dir import RunDir; print(RunDir().path, flush=True); sys.stdin.read()"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folders are."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@contextlib.contextmanager
def held(place: Path) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """A process and the folder that it made."""
    command = [sys.executable, "-c", HOLD]
    environment = os.environ | {"TMPDIR": str(place)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def abandoned(place: Path, name: str = "one", mode: int = 0o700) -> Path:
    """A folder as a killed server leaves it."""
    folder = place / (PREFIX + name)
    folder.mkdir()
    (folder / MARK).touch()
    (folder / "g0.meet").write_text("x")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "api.sock"))
    folder.chmod(mode)
    return folder


def test_the_next_start_removes_what_a_killed_process_left(place: Path) -> None:
    with held(place) as (process, folder):
        assert list(folder.iterdir()) == [folder / MARK]
        (folder / "api.sock").touch()
        remove_abandoned(place)
        assert (folder / "api.sock").exists(), "its process lives"
        process.send_signal(signal.SIGSTOP)
        remove_abandoned(place)
        assert (folder / "api.sock").exists(), "stopped is not dead"
        process.kill()
        process.wait()
        with contextlib.closing(RunDir()) as own:
            assert list(place.iterdir()) == [own.path]
    assert list(place.iterdir()) == []


def test_a_child_that_lives_longer_does_not_hold_the_folder(place: Path) -> None:
    own = RunDir()
    folder = os.open(own.path, os.O_RDONLY)
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            own.close()
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            child.kill()
            os.close(folder)


def test_only_a_private_marked_folder_of_the_same_user_goes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of an older version, nor one that others can write to, nor what a link leads to."""
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    target = abandoned(elsewhere)
    (place / f"{PREFIX}link").symlink_to(target)
    (place / f"{PREFIX}file").touch()
    (abandoned(place, "unmarked") / MARK).unlink()
    abandoned(place, "shared", mode=0o770)
    before = sorted(place.rglob("*"))
    remove_abandoned(place)
    assert sorted(place.rglob("*")) == before
    gone = abandoned(place, "gone")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        remove_abandoned(place)
    assert gone.exists(), "another user's"
    remove_abandoned(place)
    assert sorted(place.rglob("*")) == before


def test_links_inside_go_and_what_they_lead_to_stays(place: Path) -> None:
    outside = place / "precious"
    outside.mkdir()
    (outside / "file").touch()
    folder = abandoned(place)
    (folder / "a").symlink_to(outside)
    (folder / "b").symlink_to(outside / "file")
    remove_abandoned(place)
    assert not folder.exists() and (outside / "file").exists()


def test_what_cannot_be_removed_is_said(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    (abandoned(place) / "folder").mkdir()
    with contextlib.closing(RunDir()):
        assert f"cannot remove {place / PREFIX}one" in caplog.text


def test_without_locks_a_folder_is_never_taken_for_abandoned(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        own = RunDir()
    with contextlib.closing(own):
        remove_abandoned(place)
        assert own.path.exists()


def test_a_crowded_place_is_not_searched_for_ever(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned(place, "one")
    abandoned(place, "two")
    monkeypatch.setattr(run_dir, "MAX_ENTRIES", 1)
    remove_abandoned(place)
    assert len(list(place.iterdir())) == 1
