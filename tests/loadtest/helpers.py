"""Settings as the command line makes them, and records with hand-made times."""

import argparse
from collections.abc import Sequence

from loadtest.arguments import add_arguments
from loadtest.record import Record
from loadtest.settings import Settings, settings_of


def settings(*words: str) -> Settings:
    """The checked run of a command line. Raises LoadTestError."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return settings_of(parser.parse_args(words))


def record(start: float, chunks: Sequence[float], end: float, *, tokens: int | None = None, error: str = "") -> Record:
    """An answer whose chunks came at these times; its server counted `tokens`, or nothing."""
    made = Record(scheduled=start, start=start, content_times=list(chunks), end=end, error=error, detail=error)
    if tokens is not None:
        made.has_usage, made.output_tokens, made.input_tokens, made.cached_tokens = True, tokens, 10, 5
    return made
