"""What an engine leaves behind."""

from pathlib import Path

from model_runtime.config import RuntimeConfig
from server.children import EngineProcess


def test_the_files_of_ranks_end_with_them(tmp_path: Path) -> None:
    """Those of the next engine stay."""
    engine = EngineProcess(tmp_path, 3, RuntimeConfig(tensor_parallel_size=2))
    for name in ("g3-0", "g3-1", "g3.meet", "g30-1", "api.sock"):
        (tmp_path / name).touch()
    engine.end()
    assert engine.exit_code == -9
    assert {path.name for path in tmp_path.iterdir()} == {"g30-1", "api.sock"}
