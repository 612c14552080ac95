"""Packed weights on disk: written when a checkpoint is first loaded, read or mapped ever after, so that a start packs
nothing and several servers of a model can share its memory. Used by `checkpoint.py`, engine and worker processes.

The name of a file is a digest of all that its content depends on: the checkpoint, how matrices are kept, the weight
table, the code that packs. A file is written beside its place and moved there, so that it is there wholly or not at
all, and a digest of its content (of evenly spaced parts of it, if it is large) is compared before it is used. One that
fails is made again.
"""

import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from model_runtime.huge_pages import huge_empty
from model_runtime.ops.registry import PackedWeight
from model_runtime.share import Share
from model_runtime.weights.load import Precision
from model_runtime.weights.table import Parameter, Parameters

logger = logging.getLogger(__name__)

SMALLEST = 32 * 2**20
"""Bytes of packed weights that are worth a file."""
MAX_MODELS = 4
"""Models whose files are kept, the last used ones; each rank has a file."""
CHECKED_BYTES = 256 * 2**20
"""Read of a file's data to compare its digest, or a little more."""
SAMPLED_BYTES = 4 * 2**20
"""Read of each file of a checkpoint to recognise it, beside its size and the time of its last change."""
PIECE = 2**16
ALIGNMENT = 4096
CODE_FOLDER = Path(__file__).parent.parent
DTYPES = {torch.uint8: "U8", torch.int8: "I8", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class _Damaged(Exception):
    """A file of the cache is not what its name promises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCache:
    """Where prepared weights are kept, and whether they stay there while they are used."""

    folder: Path
    shared: bool
    """Map the file, so that processes share its pages; else read it into huge pages."""


class PreparedWeights:
    """The place in the cache of one checkpoint's weights."""

    def __init__(
        self,
        cache: WeightCache,
        sources: Sequence[Path],
        table: list[Parameter],
        precision: Precision,
        share: Share,
    ) -> None:
        """`sources` are the files of the checkpoint."""
        self._folder, self._shared = cache.folder, cache.shared
        self._num_kept = MAX_MODELS * share.size * share.stages
        self.path = cache.folder / f"weights-{_key(sources, table, precision, share)}.bin"

    def get(self, make: Callable[[], Parameters]) -> Parameters:
        """The weights in the cache, or what `make` makes, which is then written there. A disk that fails or is full
        costs a warning."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = (self._folder / "lock").open("w")
        except OSError as error:
            logger.warning("prepared weights cannot be kept in %s: %s", self._folder, error)
            return make()
        with lock:  # of several servers that start at once, one makes the file and the others wait
            fcntl.flock(lock, fcntl.LOCK_EX)
            return self._read() or self._make(make)

    def _make(self, make: Callable[[], Parameters]) -> Parameters:
        made = make()
        if made.num_bytes < SMALLEST:
            return made
        try:
            self._write(made)
        except OSError as error:
            logger.warning("prepared weights are not kept in %s: %s", self._folder, error)
            return made
        del made  # there is no memory for the weights twice
        return self._read() or make()

    def _read(self) -> Parameters | None:
        if not self.path.exists():
            return None
        try:
            found = _open(self.path, shared=self._shared)
            os.utime(self.path)
        except (_Damaged, OSError) as error:
            logger.warning("%s cannot be used (%s) and is made again", self.path, error)
            return None
        return found

    def _write(self, parameters: Parameters) -> None:
        """Raises OSError. A server that was killed here leaves a file that the next one writes over."""
        if (free := shutil.disk_usage(self._folder).free) < 2 * parameters.num_bytes:
            raise OSError(f"only {free >> 20} MiB are free")
        unfinished = self._folder / "unfinished"
        try:
            with unfinished.open("wb") as file:
                _write_file(file, parameters)
            unfinished.replace(self.path)
        finally:
            unfinished.unlink(missing_ok=True)
        by_use = sorted(self._folder.glob("weights-*.bin"), key=lambda path: path.stat().st_mtime)
        for path in by_use[: -self._num_kept]:
            path.unlink()


def _key(sources: Sequence[Path], table: list[Parameter], precision: Precision, share: Share) -> str:
    """Of a checkpoint's files, what a rank makes of them, and the code that makes it."""
    digest = hashlib.sha256()
    for path in sorted(sources):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        with path.open("rb") as file:
            _digest_parts(file, 0, status.st_size, SAMPLED_BYTES, digest)
    digest.update(json.dumps([asdict(parameter) for parameter in table]).encode())
    digest.update(json.dumps([asdict(precision), asdict(share)]).encode())
    digest.update(torch.__version__.encode())
    for path in sorted(p for p in CODE_FOLDER.rglob("*") if p.suffix in (".py", ".cpp", ".h")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _digest_parts(file: IO[bytes], start: int, end: int, limit: int, digest: "hashlib._Hash") -> None:
    """Add the bytes from start to end, or about `limit` of them in evenly spaced pieces."""
    step = PIECE * max(1, -(-(end - start) // limit))
    for offset in range(start, end, step):
        file.seek(offset)
        digest.update(file.read(min(PIECE, end - offset)))


def _tensors(parameters: Parameters) -> dict[str, Tensor]:
    return {name: matrix.data for name, matrix in parameters.matrices.items()} | parameters.vectors


def _header(parameters: Parameters) -> dict[str, list[object]]:
    """By name: dtype, shape and offset of a tensor; of a matrix also rows, columns, integer format, row_bits."""
    header: dict[str, list[object]] = {}
    offset = 0
    for name, tensor in _tensors(parameters).items():
        header[name] = [DTYPES[tensor.dtype], list(tensor.shape), offset]
        if (matrix := parameters.matrices.get(name)) is not None:
            header[name] += [matrix.num_rows, matrix.num_columns, matrix.quantized, matrix.row_bits]
        offset += _padded(tensor.nbytes)
    return header


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _write_file(file: IO[bytes], parameters: Parameters) -> None:
    """Length of the header, header, tensors each from a page of its own on, digest."""
    header = json.dumps(_header(parameters)).encode()
    file.write(struct.pack("<Q", len(header)) + header)
    for tensor in _tensors(parameters).values():
        file.seek(_padded(file.tell()))
        file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    end = _padded(file.tell())
    file.truncate(end)
    file.flush()
    with Path(file.name).open("rb") as written:
        digest = _digest(written, 8 + len(header), end)
    file.seek(end)
    file.write(digest)
    file.flush()
    os.fsync(file.fileno())


def _digest(file: IO[bytes], header_end: int, end: int) -> bytes:
    """Of the header, and of the rest or parts of it."""
    digest = hashlib.sha256()
    _digest_parts(file, 0, header_end, header_end, digest)
    _digest_parts(file, header_end, end, CHECKED_BYTES, digest)
    return digest.digest()


def _checked_header(path: Path) -> tuple[dict[str, list[Any]], int]:
    """The header and where it ends. Raises _Damaged."""
    size = path.stat().st_size
    end = size - hashlib.sha256().digest_size
    with path.open("rb") as file:
        if end < ALIGNMENT or end % ALIGNMENT:
            raise _Damaged(f"{size} bytes are not whole pages and a digest")
        header_end = 8 + struct.unpack("<Q", file.read(8))[0]
        file.seek(end)
        if header_end > end or file.read() != _digest(file, header_end, end):
            raise _Damaged("its digest differs")
        file.seek(8)
        return json.loads(file.read(header_end - 8)), header_end


def _open(path: Path, *, shared: bool) -> Parameters:
    """Tensors in the mapped file, or in huge pages with its content. Raises _Damaged."""
    header, header_end = _checked_header(path)
    start, size = _padded(header_end), path.stat().st_size
    if shared:
        data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)[start:]
    else:
        data = huge_empty((size - start,), torch.uint8)
        with path.open("rb") as file:  # buffered: reads on to the end, where the system gives 2 GiB at a time
            file.seek(start)
            file.readinto(data.numpy().data)
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    parameters = Parameters({}, {})
    for name, (dtype, shape, offset, *packed) in header.items():
        count = math.prod(shape) * dtypes[dtype].itemsize
        tensor = data[offset : offset + count].view(dtypes[dtype]).view(shape)
        if packed:
            rows, columns, quantized, row_bits = packed
            parameters.matrices[name] = PackedWeight(
                data=tensor, num_rows=rows, num_columns=columns, quantized=quantized, row_bits=row_bits
            )
        else:
            parameters.vectors[name] = tensor
    return parameters
