"""What the README says about images works when it is pasted, and the model says of its pictures what is there."""

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Server, run_server

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "README.md").read_text().splitlines()
ROW = re.compile(r"\| (?:!\[.*\]\((?P<picture>docs/pictures/.*)\))? ?\| (?P<question>.*[?.]) \| (?P<answer>.*) \|")
"""Of the table of answers; a row without a picture is about the one before."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """As `firstlight serve` without options."""
    with run_server() as running:
        yield running


def answers() -> Iterator[tuple[str, str, str]]:
    """Pictures, questions and answers of the table."""
    picture = ""
    for found in filter(None, map(ROW.fullmatch, LINES)):
        picture = found["picture"] or picture
        if picture:
            yield picture, found["question"], found["answer"]


def ask(server: Server, picture: str, question: str) -> str:
    data = base64.b64encode((ROOT / picture).read_bytes()).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": question},
    ]
    body = server.post("/v1/chat/completions", temperature=0, messages=[{"role": "user", "content": parts}])
    return str(body["choices"][0]["message"]["content"])


@pytest.mark.timeout(90)
def test_the_model_says_what_the_table_says(server: Server) -> None:
    """Sentences by how they begin: where the model errs, another processor's rounding may choose another error."""
    rows = list(answers())
    assert len(rows) == 8 and len({picture for picture, _, _ in rows}) == 4
    for picture, question, answer in rows:
        said = ask(server, picture, question)
        assert said == answer if " " not in answer else said.startswith(answer[:3]), (question, said)


@pytest.mark.timeout(90)
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_picture_from_a_file(server: Server) -> None:
    (line,) = [line for line in LINES if line.startswith("(printf")]
    command = line.replace("http://127.0.0.1:8000", server.url)
    result = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=50)
    answer = json.loads(result.stdout)
    (shown,) = [said for picture, asked, said in answers() if (Path(picture).stem, asked) == ("icons", "What is this?")]
    assert answer["choices"][0]["message"]["content"] == shown
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 64
