"""Builds the C++ kernels of this folder into a shared library, once per machine, and caches it. Called by `library` at
engine start and by `firstlight doctor`.

The cached file is named by what went into it (sources, flags, compiler, CPU) and by a checksum of its own bytes, so a
stale or damaged file is never loaded. Several processes may start at once: one builds, the others wait for it.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from model_runtime.config import CACHE_VARIABLE, cache_dir

SOURCE_DIR = Path(__file__).parent
SOURCES = (
    "linear.cpp",
    "linear_fp8.cpp",
    "linear_amx.cpp",
    "integer.cpp",
    "quantize.cpp",
    "super_blocks.cpp",
    "elementwise.cpp",
    "attention.cpp",
    "shared_attention.cpp",
    "delta.cpp",
    "latent.cpp",
    "latent_attention.cpp",
    "layers.cpp",
    "sample.cpp",
    "pool.cpp",
    "collective.cpp",
)
HEADERS = (
    "vec.h",
    "kv.h",
    "attention_keys.h",
    "attention_tile.h",
    "shared_attention.h",
    "latent_rows.h",
    "pool.h",
    "collective.h",
    "linear.h",
    "linear_fp8.h",
    "amx.h",
    "linear_pieces.h",
    "linear_row.h",
    "layer_ops.h",
    "integer.h",
    "integer_dot.h",
    "integer_tile.h",
    "integer_amx.h",
    "sample_blocks.h",
    "sample_candidates.h",
)
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
TARGET_FLAGS = ("-march=native", "-mcpu=native")
"""Tried in order: not every compiler knows -march=native on every CPU."""
COMPILERS = ("c++", "g++", "clang++")
BUILD_TIMEOUT_S = 300

logger = logging.getLogger(__name__)


class BuildError(Exception):
    """The kernels cannot be built here; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildInfo:
    """What a build on this machine uses."""

    compiler: str
    compiler_version: str
    cpu: str
    flags: str
    library: Path | None
    """The cached library; None if it is not built yet."""


def describe() -> BuildInfo:
    """Compiler, flags and cached library. Raises BuildError if there is no compiler."""
    compiler = _find_compiler()
    version, cpu = _compiler_version(compiler), _cpu_identity()
    flags = " ".join((*FLAGS, TARGET_FLAGS[0]))
    library = _cached(_key(version, cpu))
    return BuildInfo(compiler=compiler, compiler_version=version, cpu=cpu.splitlines()[0], flags=flags, library=library)


def build() -> Path:
    """Path of the library for this machine, built if the cache lacks it. Raises BuildError."""
    compiler = _find_compiler()
    key = _key(_compiler_version(compiler), _cpu_identity())
    if (found := _cached(key)) is not None:
        return found
    try:
        cache_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
        with (cache_dir() / f"kernels-{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _cached(key) or _compile(compiler, key)
    except OSError as error:
        raise BuildError(f"cannot write to {cache_dir()} ({error}); set {CACHE_VARIABLE}") from error


def _find_compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        if path := shutil.which(name):
            return path
    names = wanted or ", ".join(COMPILERS)
    raise BuildError(f"no C++ compiler found ({names}); install g++ or clang++, or point CXX at one")


def _compiler_version(compiler: str) -> str:
    try:
        answer = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} does not run: {error}") from error
    return answer.stdout.splitlines()[0] if answer.stdout else compiler


def _cpu_identity() -> str:
    """Model and instruction sets of the first processor: -march=native means another thing on another CPU."""
    identity = [f"{platform.machine()} {platform.processor()}"]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        wanted = ("model name", "flags", "features", "cpu part")
        first = cpuinfo.read_text().split("\n\n")[0].splitlines()
        identity = [line.split(":", 1)[1].strip() for line in first if line.lower().startswith(wanted)] or identity
    return "\n".join(identity)


def _key(compiler_version: str, cpu: str) -> str:
    digest = hashlib.sha256()
    for part in (*TARGET_FLAGS, *FLAGS, compiler_version, cpu):
        digest.update(part.encode() + b"\0")
    for name in (*SOURCES, *HEADERS):
        digest.update((SOURCE_DIR / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()[:16]


def _cached(key: str) -> Path | None:
    """The cached library if its bytes are what its name promises."""
    for path in cache_dir().glob(f"kernels-{key}-*.so"):
        if path.stem.rpartition("-")[2] == _checksum(path):
            return path
    return None


def _compile(compiler: str, key: str) -> Path:
    """Compile into a temporary folder, then move the finished file to its name. The caller holds the lock, so folders
    of this key are what killed processes left."""
    logger.warning("building CPU kernels with %s (once per machine, a few seconds)", compiler)
    errors = []
    for left in cache_dir().glob(f"kernels-{key}-*.build"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=f"kernels-{key}-", suffix=".build") as folder:
        for target in TARGET_FLAGS:
            try:
                built = _compile_sources((compiler, *FLAGS, target), Path(folder))
            except subprocess.CalledProcessError as error:
                errors.append(error.stderr.strip())
                continue
            except subprocess.TimeoutExpired as error:
                raise BuildError(f"{compiler} took longer than {BUILD_TIMEOUT_S} s") from error
            final = cache_dir() / f"kernels-{key}-{_checksum(built)}.so"
            built.replace(final)
            return final
    raise BuildError(f"{compiler} failed: {errors[0][-2000:]}")


def _compile_sources(command: tuple[str, ...], folder: Path) -> Path:
    """The sources side by side, then the library. Raises subprocess errors."""

    def compile_one(name: str) -> str:
        result = str(folder / f"{name}.o")
        _run((*command, "-c", str(SOURCE_DIR / name), "-o", result))
        return result

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compile_one, SOURCES))
    library = folder / "kernels.so"
    _run((*command, "-shared", *objects, "-o", str(library)))
    return library


def _run(command: tuple[str, ...]) -> None:
    subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=True)
