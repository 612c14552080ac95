"""Families of models that installed packages bring, found by their entry points when a file of such a model is read.

A package has an entry point in the group `firstlight.families.v1`, whose name is the model_type of config.json and
whose object is a `Family` (docs/new-model.md). Only the package of the model that is loaded is ever imported, so one
that is broken stops no other model. Used by `hf/config.py` and `weights/spelling.py`, engine and worker processes; does
not import torch.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from typing import Literal, TypeVar, TypeVarTuple, get_args, get_origin, get_type_hints

from model_runtime.models.families import FAMILIES
from model_runtime.models.family import ExpertKeys, Family
from model_runtime.weights.errors import CheckpointError

GROUP, CONTRACT = "firstlight.families", 1
"""The number changes with what `model_runtime/family_package.py` has in a way that packages notice."""

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


def packaged_families() -> tuple[tuple[str, str], ...]:
    """(model_type, package) of every family in a package, whether it loads or not."""
    return tuple(sorted((entry.name, package_of(entry)) for entry in entry_points(group=f"{GROUP}.v{CONTRACT}")))


def known_families() -> frozenset[str]:
    """Every model_type that there is a family for, here or in a package."""
    return frozenset(FAMILIES) | {name for name, _ in packaged_families()}


def family_named(name: str) -> Family:
    """The family of a known model_type. Raises CheckpointError, which names the package, for one that does not load."""
    found = tuple(entry_points(group=f"{GROUP}.v{CONTRACT}", name=name))
    if len(found) + (name in FAMILIES) > 1:
        others = " and firstlight itself" if name in FAMILIES else ""
        owners = " and ".join(sorted(package_of(entry) for entry in found))
        raise CheckpointError(f"model_type {name!r} is registered by {owners}{others}: uninstall all packages but one")
    return _loaded(found[0]) if found else FAMILIES[name]


def other_contracts(name: str) -> str:
    """Of an unknown model_type: what is to be said of packages that have it for another version of firstlight."""
    groups = [group for group in entry_points().groups if group.split(".v")[0] == GROUP]
    found = [entry for group in sorted(groups) for entry in entry_points(group=group, name=name)]
    return "".join(
        f"; {package_of(entry)} has it in the group {entry.group}, where this version of firstlight reads "
        f"{GROUP}.v{CONTRACT}: install the version of one that fits the other"
        for entry in found
    )


def package_of(entry: EntryPoint) -> str:
    """Name and version, for people."""
    return f"package {entry.dist.name} {entry.dist.version}" if entry.dist else f"module {entry.module}"


def _loaded(entry: EntryPoint) -> Family:
    package = package_of(entry)
    family = _guarded(package, f"could not load {entry.value}", entry.load)()
    if not isinstance(family, Family):
        raise CheckpointError(f"{package}: {entry.value} is no Family but {type(family).__name__}")
    _check_words(package, family)
    if family.experts is not None:
        _check_words(package, family.experts)
    own = family.own_feed_forward
    if own is not None:
        own = replace(
            own,
            package=package,
            table=_guarded(package, "own_feed_forward.table failed", own.table),
            build=_guarded(package, "own_feed_forward.build failed", own.build),
            floats=_guarded(package, "own_feed_forward.floats failed", own.floats),
        )
    return replace(
        family,
        finish=_guarded(package, "finish failed", family.finish) if family.finish else None,
        spelling=_guarded(package, "spelling failed", family.spelling) if family.spelling else None,
        own_feed_forward=own,
    )


def _check_words(package: str, described: Family | ExpertKeys) -> None:
    """Raises CheckpointError for a word that no field of its kind can be; it would be passed over in silence."""
    for name, kind in get_type_hints(type(described)).items():
        words = [word for part in (kind, *get_args(kind)) if get_origin(part) is Literal for word in get_args(part)]
        value = getattr(described, name)
        if words and isinstance(value, str) and value not in words:
            raise CheckpointError(f"{package}: {name} {value!r} is not one of {', '.join(words)}")


def _guarded(package: str, what: str, function: Callable[[*Arguments], Result]) -> Callable[[*Arguments], Result]:
    """The function, whose errors name the package."""

    def call(*arguments: *Arguments) -> Result:
        try:
            return function(*arguments)
        except CheckpointError as error:
            raise CheckpointError(f"{package}: {error}") from error
        except Exception as error:
            raise CheckpointError(f"{package}: {what}: {type(error).__name__}: {error}") from error

    return call
