"""The ranks beside rank 0 for commands that run the engine's executor in their own process. Used by `engine_bench`."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from model_runtime.group import Place, local_place
from model_runtime.layout import layout_of
from model_runtime.shared_memory import make_region
from server.children import Rank
from server.config import ServeConfig
from server.run_dir import RunDir


@dataclass(frozen=True, slots=True)
class OtherRanks:
    """Processes that follow this one."""

    place: Place | None
    """Of rank 0; None where there is no other."""
    ranks: tuple[Rank, ...]

    def check(self, stage: str, done: float) -> None:
        """`load_executor` calls it while it waits: to exit when a rank has, which has said why."""
        if codes := [code for rank in self.ranks if (code := rank.child.exit_code) is not None]:
            sys.exit(codes[0])


@contextlib.contextmanager
def other_ranks(config: ServeConfig) -> Iterator[OtherRanks]:
    """They end with the context. Raises OptionError."""
    layout = layout_of(config.runtime)
    if layout.size == 1:
        yield OtherRanks(None, ())
        return
    with contextlib.closing(RunDir()) as folder:
        region = make_region(*map(len, layout.areas))
        arguments = [[folder.path, 0, region, rank] for rank in range(1, layout.size)]
        ranks = tuple(Rank("server.rank_process", words, [region]) for words in arguments)
        try:
            for rank in ranks:
                rank.child.configure(config)
            place = local_place(layout, folder.path, 0, region)
            yield OtherRanks(place, ranks)
        finally:
            for rank in ranks:
                rank.child.end(0.0)
                rank.pulse.close()
            os.close(region)
