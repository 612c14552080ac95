"""Breaks firstlight in the processes of a test, as BROKEN says: python runs this first where PYTHONPATH has its folder.

Nothing in the product knows of it: a function is replaced as soon as its module has been imported.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

KEPT_BYTES = 64 * 1024
"""Of each request, by the engine that leaks."""
THETA_FACTOR = 4.0


def _wrong_rope(module: ModuleType) -> None:
    """Channels turn too slowly."""
    right = module.inverse_frequencies
    module.inverse_frequencies = lambda rope, max_position: right(rope, max_position) / THETA_FACTOR  # type: ignore[attr-defined]


def _broken_projector(module: ModuleType) -> None:
    """Every picture becomes the same embeddings."""
    right = module.MergeProjector.forward
    module.MergeProjector.forward = lambda self, cells_NmC: right(self, cells_NmC) * 0.0


def _leak(module: ModuleType) -> None:
    """Something stays of every request."""
    right, kept = module.EngineLoop._accept, []

    def accept(self: object, request: object) -> None:
        kept.append(os.urandom(KEPT_BYTES))
        right(self, request)

    module.EngineLoop._accept = accept


BREAKS: dict[str, tuple[str, Callable[[ModuleType], None]]] = {
    "rope": ("model_runtime.blocks.rope", _wrong_rope),
    "projector": ("vision.projector", _broken_projector),
    "leak": ("server.engine", _leak),
}


class _Loader(importlib.abc.Loader):
    """Runs a module, then breaks it."""

    def __init__(self, loader: importlib.abc.Loader, breaks: Callable[[ModuleType], None]) -> None:
        self._loader, self._breaks = loader, breaks

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._breaks(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module that is broken."""

    def __init__(self, name: str, breaks: Callable[[ModuleType], None]) -> None:
        self._name, self._breaks = name, breaks

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None, name
        spec.loader = _Loader(spec.loader, self._breaks)
        return spec


if (wanted := os.environ.get("BROKEN")) is not None:
    sys.meta_path.insert(0, _Finder(*BREAKS[wanted]))
