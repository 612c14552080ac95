"""`firstlight loadtest`: measures any server with OpenAI's API over HTTP. Called by `server/cli.py`."""

import argparse
import sys

from rich.console import Console

from loadtest import report, results_file
from loadtest.conditions import conditions
from loadtest.display import ShownProgress, print_results
from loadtest.runner import LevelResult, Runner, Subject
from loadtest.settings import LoadTestError, Settings, settings_of

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def run(arguments: argparse.Namespace) -> int:
    """Measure and report. 1 when some level had no answer at all or a file could not be written, 2 when nothing was
    measured."""
    try:
        settings = settings_of(arguments)
        if settings.report is not None:
            report.check_available()
        found = conditions(settings)
        runner = Runner(settings)
        progress = ShownProgress(Console(stderr=True, emoji=False))
        subjects = [_prepare(runner, settings, index, progress) for index in range(len(settings.servers))]
    except LoadTestError as error:
        print(f"firstlight: {error}", file=sys.stderr)
        return EXIT_USAGE
    results: list[LevelResult] = []
    is_whole = _measure(runner, settings, subjects, progress, results)
    if results:
        print_results(Console(emoji=False), results)
        try:
            if settings.output is not None:
                results_file.write(settings.output, results_file.document(found, subjects, results))
            if settings.report is not None:
                report.write(settings.report, results, found)
        except OSError as error:
            print(f"firstlight: {error}", file=sys.stderr)
            return EXIT_FAILED
    if not is_whole:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if any(result.metrics.succeeded == 0 for result in results) else 0


def _prepare(runner: Runner, settings: Settings, index: int, progress: ShownProgress) -> Subject:
    subject = runner.prepare(settings.servers[index])
    per_word, overhead = subject.calibration.tokens_per_word, subject.calibration.overhead
    exact = "token-exact" if per_word == 1 else f"{per_word:.3f} tokens a word, so lengths are near those asked for"
    where = f"{subject.server.name}: {subject.model} at {subject.server.url}"
    progress.note(f"{where} ({exact}; the template takes {max(0.0, overhead):.0f} tokens)")
    return subject


def _measure(
    runner: Runner, settings: Settings, subjects: list[Subject], progress: ShownProgress, results: list[LevelResult]
) -> bool:
    """Fill `results`; servers take turns at each level, so that no one profits from a machine that warms up. False
    when the user stopped it; finished levels still count."""
    try:
        for subject in subjects:
            runner.warm_up(subject)
        for level in settings.levels:
            for subject in subjects:
                title = f"{subject.server.name}, {level.label}"
                with progress.level(title, runner.num_requests(level)) as on_record:
                    result = runner.level(subject, level, on_record)
                results.append(result)
                metrics = result.metrics
                progress.note(
                    f"{title}: {metrics.succeeded} of {metrics.requests} in {metrics.seconds:.1f} s, "
                    f"{metrics.output_tokens_per_second:.1f} output tokens/s"
                )
    except KeyboardInterrupt:
        progress.note("stopped; what follows are the levels that were finished")
        return False
    return True
