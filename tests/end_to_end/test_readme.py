"""What the README says about images works when it is pasted."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from server.tiny_vlm import write_tiny_vlm
from tests.end_to_end.conftest import run_server

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.timeout(90)
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_picture_from_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "tiny-vlm"
    write_tiny_vlm(folder)
    Image.new("RGB", (1200, 900), (40, 90, 200)).save(tmp_path / "photo.jpg")
    (line,) = [line for line in README.read_text().splitlines() if line.startswith("(printf")]
    with run_server(model=str(folder)) as server:
        command = line.replace("http://127.0.0.1:8000", server.url)
        result = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    answer = json.loads(result.stdout)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": 16}
    # sampled with a random seed: an end of the text is as likely as any other token
    length, (choice,) = answer["usage"]["completion_tokens"], answer["choices"]
    assert length == 16 if choice["finish_reason"] == "length" else 1 <= length <= 16
