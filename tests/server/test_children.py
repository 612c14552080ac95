"""What an engine leaves behind, and which rank it was that ended it."""

from pathlib import Path

from model_runtime.config import RuntimeConfig
from server.child import EXIT_BAD_CONFIGURATION, EXIT_ORPHANED
from server.children import EngineProcess, cause


def test_the_files_of_ranks_end_with_them(tmp_path: Path) -> None:
    """Those of the next engine stay."""
    engine = EngineProcess(tmp_path, 3, RuntimeConfig(tensor_parallel_size=2))
    for name in ("g3-0", "g3-1", "g3.meet", "g30-1", "api.sock"):
        (tmp_path / name).touch()
    engine.end()
    assert engine.exit_code == -9
    assert {path.name for path in tmp_path.iterdir()} == {"g30-1", "api.sock"}


def test_the_cause_is_not_the_rank_that_lost_another() -> None:
    assert cause([(1, 0), (-9, 1)]) == (-9, 1)
    assert cause([(EXIT_BAD_CONFIGURATION, 0), (EXIT_ORPHANED, 1)]) == (EXIT_BAD_CONFIGURATION, 0)
    assert cause([(70, 0), (EXIT_ORPHANED, 1)]) == (70, 0)
    assert cause([(EXIT_ORPHANED, 2), (EXIT_ORPHANED, 1)]) == (EXIT_ORPHANED, 1)
