"""`firstlight validate`: the stages one after the other, what they find, and the report. Called by `server/cli.py`.

A process of its own, which starts the real server as a child and speaks to it over HTTP.
"""

import argparse
import dataclasses
import fcntl
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import httpx
import msgspec
from rich.console import Console

from loadtest.conditions import surroundings, without_key
from server.leaving import leave_by_exception
from server.local_server import ServerDidNotStart
from server.models import resolve_model
from server.options import OptionError
from server.validate import alignment, answers, context, curves, document, images, memory, preemption, soak
from server.validate import state as state_file
from server.validate.asking import Refused
from server.validate.gate import LOG, Gate
from server.validate.progress import Shown
from server.validate.result import StageResult, checked
from server.validate.settings import STAGES, Settings, settings_of
from server.validate.state import State

EXIT_FAILED = 1
REPORT, DOCUMENT, STATE = "report.html", "report.json", "state.json"
DEFAULT_FOLDER = Path("firstlight-validate")

RUN: Mapping[str, Callable[[Gate], StageResult]] = MappingProxyType(
    {
        "memory": memory.run,
        "align": alignment.run,
        "answers": answers.run,
        "images": images.run,
        "curves": curves.run,
        "preemption": preemption.run,
        "context": context.run,
        "soak": soak.run,
    }
)


def run(arguments: argparse.Namespace) -> int:
    """Validate and report; EXIT_FAILED where a check failed. Raises OptionError, ModelNotFound,
    EmbeddedModelMissing."""
    leave_by_exception()
    settings, config = settings_of(arguments, os.environ)
    model = resolve_model(config.model)
    folder = settings.folder or DEFAULT_FOLDER / model.name
    shown = Shown(Console(stderr=True, emoji=False))
    try:
        log = _held_log(folder)
    except OSError as error:
        raise OptionError(f"--folder: {error}") from None
    gate = Gate(config, model, settings, folder, shown.told)
    files = (model.path, config.runtime.image_folder)
    model_state = [state_file.model_state(path) for path in files if path is not None]
    inputs = (model_state, config, state_file.program_state())
    results: dict[str, StageResult] = {}
    try:
        for name in settings.stages:
            results[name] = _stage(name, gate, inputs, shown)
    finally:
        gate.close()
        passed, sentence = _report(results, settings, folder, model.name)
        log.close()
    print(f"{'passed' if passed else 'FAILED'}: {sentence}\n{folder / REPORT}")
    return 0 if passed else EXIT_FAILED


def _held_log(folder: Path) -> TextIO:
    """The server's log, empty. While it is open no other validation has the folder. Raises OSError, OptionError."""
    folder.mkdir(parents=True, exist_ok=True)
    log = (folder / LOG).open("a", encoding="utf-8")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        log.truncate(0)
    except BlockingIOError:
        log.close()
        raise OptionError(f"--folder: {folder} is in use by another validation: wait, or name another folder") from None
    return log


def _stage(name: str, gate: Gate, inputs: tuple[object, ...], shown: Shown) -> StageResult:
    """Run it, unless it has passed before; the state is written when it is over."""
    path = gate.folder / STATE
    state: State = state_file.read(path)
    own_inputs = state_file.digest(name, gate.effort, gate.align_arguments, *inputs)
    kept = state.passed(name, own_inputs)
    if kept is not None:
        shown.ended(STAGES[name], kept, is_kept=True)
        return kept
    with shown.stage(STAGES[name]):
        result = _run(name, gate)
    state.stages[name] = state_file.Finished(inputs=own_inputs, result=result)
    state_file.write(path, state)
    shown.ended(STAGES[name], result, is_kept=False)
    return result


def _run(name: str, gate: Gate) -> StageResult:
    """Of a stage that comes to no end, why."""
    start = time.monotonic()
    try:
        found = RUN[name](gate)
    except ServerDidNotStart as error:
        found = _broken("the server starts", str(error))
    except (Refused, httpx.HTTPError) as error:
        found = _broken("the server answers", f"{type(error).__name__}: {error}")
    return dataclasses.replace(found, seconds=time.monotonic() - start)


def _broken(name: str, problem: str) -> StageResult:
    return StageResult(checks=(checked(name, problem, f"the end of {LOG}, beside this report"),))


def _report(results: Mapping[str, StageResult], settings: Settings, folder: Path, model: str) -> tuple[bool, str]:
    """Write what there is, also when it was interrupted."""
    missing = tuple(name for name in settings.stages if name not in results)
    conditions: dict[str, Any] = {
        **surroundings(),
        "model": model,
        "command": shlex.join(["firstlight", *without_key(sys.argv[1:])]),
        "effort": msgspec.to_builtins(settings.effort),
    }
    content = msgspec.json.encode(document.document(results, missing, conditions))
    (folder / DOCUMENT).write_bytes(msgspec.json.format(content, indent=1) + b"\n")
    document.page(results, missing, conditions).write(folder / REPORT)
    return document.verdict(results, missing)
