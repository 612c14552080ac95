"""What commands write in the terminal is what was meant, letter by letter: names are no markup and hold no pictures."""

import io

import pytest
from rich.console import Console

from server import doctor, wire
from server.cli import main
from server.doctor import Finding
from server.serve_command import StartDisplay
from tests.server.test_client import INFO, STATS

NAME = "broken:FAMILY: [red]no[/red] :smile:"


def test_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (lambda: Finding(subject="x", state="failed", detail=NAME, advice=NAME),))
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    assert capsys.readouterr().out.count(NAME) == 2


def test_start_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    output = io.StringIO()
    display = StartDisplay(Console(file=output, width=200, emoji=False), NAME, needs_key=False, replicas=1)
    display.on_message(wire.Listening("http://[::1]:8000"))
    display.on_message(wire.Hello(version=wire.WIRE_VERSION, generation=0, info=INFO, stats=STATS))
    assert output.getvalue().startswith(f"{NAME} is ready on http://[::1]:8000 after ")
