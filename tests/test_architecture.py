"""The rules of the house, checked on the source itself: import arrows, sizes, bans, typing, documentation."""

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("server", "scheduler", "model_runtime", "vision", "loadtest")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in SOURCES}

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 50
MAX_MEDIAN_FUNCTION_LINES = 12
MAX_MODEL_FILE_LINES = 180

# The scheduler decides; it may not touch tensors, sockets, clocks, or print.
SCHEDULER_MAY_NOT_IMPORT = {"asyncio", "logging", "time", "datetime", "socket", "threading", "subprocess", "random"}
# Where the server side may see the runtime, and what of it.
DISTRIBUTED = {"model_runtime/parallel.py", "model_runtime/rendezvous.py"}
RUNTIME_USERS = {
    "server/engine.py",
    "server/engine_process.py",
    "server/rank_process.py",
    "server/other_ranks.py",
    "server/doctor.py",
    "server/engine_bench.py",
    "server/speculation_bench.py",
    "server/speculation_check.py",
    "server/structured_bench.py",
    "server/quality_command.py",
    "server/validate/machine.py",
    "server/validate/context_process.py",
    "server/align/command.py",
    "server/align/report.py",
    "server/align/ops_command.py",
    "server/plan/candidates.py",
    "server/plan/command.py",
    "server/plan/offloading.py",
    "server/plan/roofline.py",
    "server/plan/show.py",
}
TORCH_USERS = {"server/doctor.py", "server/plan/candidates.py"}
RUNTIME_LEAVES = {
    "model_runtime.config",
    "model_runtime.host",
    "model_runtime.layout",
    "model_runtime.rank_stats",
    "model_runtime.shared_memory",
    "model_runtime.pooling_config",
    "model_runtime.weights.errors",
    "model_runtime.weights.gguf_file",
    "model_runtime.weights.json_file",
}

# The image side of `vision` runs in the API process, its towers in the engine with torch; neither sees the other.
TOWERS = ("vision/encoder/", "vision/projector.py", "vision/tower_config.py", "vision/weights.py")
TOWER_MODULES = {"vision.encoder", "vision.projector", "vision.tower_config", "vision.weights"}
VISION_MAY_IMPORT = {"vision", "numpy", "PIL", "pillow_heif", "httpx", "pybase64"}
# How the embedded model learned to see: a tool, which may use all of the project and which nothing of it uses, but for
# the gate, which asks some questions of its examination.
TRAINING, TRAINING_MODULE = "vision/embedded/", "vision.embedded"
EXAMINER, EXAMINATION = "server/validate/eyes.py", {"vision.embedded.examine", "vision.embedded.figures"}

# What `firstlight align` compares with. It stands in the place of a function of transformers that takes any keywords.
REFERENCES = ("model_runtime/align/transformers_model.py", "model_runtime/align/transformers_reference.py")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield node.module or ""


def functions(tree: ast.AST) -> list[Function]:
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def length(node: Function) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def test_files_are_one_idea() -> None:
    for path, tree in TREES.items():
        lines = len(path.read_text().splitlines())
        limit = MAX_MODEL_FILE_LINES if path.parent.name == "models" else MAX_FILE_LINES
        assert lines <= limit, f"{relative(path)}: {lines} lines"
        too_long = [f"{node.name}: {length(node)}" for node in functions(tree) if length(node) > MAX_FUNCTION_LINES]
        assert not too_long, relative(path)


def test_functions_are_short() -> None:
    lengths = [length(node) for tree in TREES.values() for node in functions(tree)]
    assert statistics.median(lengths) <= MAX_MEDIAN_FUNCTION_LINES


def test_public_things_are_documented() -> None:
    for path, tree in TREES.items():
        says_what_it_owns = path.name == "__init__.py" or ast.get_docstring(tree)
        assert says_what_it_owns, f"{relative(path)}: the module says what it owns, who calls it, where"
        public = [
            node for node in tree.body if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")
        ]
        assert [node.name for node in public if ast.get_docstring(node) is None] == [], relative(path)


def test_import_arrows() -> None:
    for path in SOURCES:
        assert_import_arrows(path)


def assert_import_arrows(path: Path) -> None:
    name, package = relative(path), path.relative_to(ROOT).parts[0]
    for module in imports(TREES[path]):
        top = module.split(".")[0]
        assert top != "transformers" or name in REFERENCES, "transformers is a reference, never served"
        if name.startswith(TRAINING):
            continue
        is_examination = name == EXAMINER and module in EXAMINATION
        assert is_examination or not f"{module}.".startswith(f"{TRAINING_MODULE}."), f"{name} imports {module}"
        if package == "scheduler":
            allowed = top == "scheduler" or top in sys.stdlib_module_names
            assert allowed and top not in SCHEDULER_MAY_NOT_IMPORT - _extra(name), f"the scheduler imports {module}"
        elif package == "model_runtime":
            assert top != "server", f"{name} imports {module}"
            allowed_modules = {"scheduler.plan", "scheduler.config"}
            assert top != "scheduler" or module in allowed_modules, f"{name} imports {module}"
        elif package == "vision":
            allowed_tops = {"vision", "torch"} if name.startswith(TOWERS) else VISION_MAY_IMPORT
            assert top in allowed_tops or top in sys.stdlib_module_names, f"{name} imports {module}"
            is_tower_module = ".".join(module.split(".")[:2]) in TOWER_MODULES
            assert name.startswith(TOWERS) or not is_tower_module, f"{name} imports {module}"
        elif package == "loadtest":
            # A client like any other: it knows servers by what they say over HTTP.
            assert top not in set(PACKAGES) - {"loadtest"}, f"{name} imports {module}"
        elif top == "model_runtime":
            assert name in RUNTIME_USERS or module in RUNTIME_LEAVES, f"{name} imports {module}"
        if top == "torch":
            has_torch = package == "model_runtime" or name in TORCH_USERS or name.startswith(TOWERS)
            assert has_torch, f"{name} imports torch"
        is_distributed = module.startswith("torch.distributed")
        assert not is_distributed or name in DISTRIBUTED, f"{name} imports {module}"


def _extra(name: str) -> set[str]:
    """The simulator makes random loads and prints a table; the scheduler proper does neither."""
    return {"random", "time"} if name.startswith("scheduler/simulat") else set()


def test_bans() -> None:
    for path in SOURCES:
        assert_no_bans(path)


def assert_no_bans(path: Path) -> None:
    tree, name = TREES[path], relative(path)
    banned = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing"}
    assert not banned & {module.split(".")[0] for module in imports(tree)}, name
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"{name}:{node.lineno} global"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{name}:{node.lineno} bare except"
            body_is_pass = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
            assert not body_is_pass, f"{name}:{node.lineno} swallows an exception"
        if isinstance(node, Function):
            assert node.args.kwarg is None or node.name == "__init_subclass__" or name in REFERENCES, (
                f"{name}:{node.lineno} **{node.args.kwarg}"
            )
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "eval", "exec")
        ):
            has_default = node.func.id == "getattr" and len(node.args) > 2
            assert node.func.id == "getattr" and not has_default, f"{name}:{node.lineno} {node.func.id}"
        if isinstance(node, ast.Attribute) and node.attr == "__setattr__":
            raise AssertionError(f"{name}:{node.lineno} writes to a frozen object")
    text = path.read_text()
    assert not re.search(r"\b(is_prefill|is_decode)\b", text), f"{name}: there are no phases"
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text), name


def test_modules_hold_no_mutable_state() -> None:
    """Module-level names are constants, types, loggers, compiled things or registries: never reassigned."""
    for path, node in ((path, node) for path, tree in TREES.items() for node in tree.body):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.List | ast.ListComp):
            raise AssertionError(f"{relative(path)}:{node.lineno} a module-level list can be changed; use a tuple")
        if isinstance(node, ast.AugAssign | ast.For | ast.While):
            raise AssertionError(f"{relative(path)}:{node.lineno} work at import time")


def test_executor_computes_plans_and_does_nothing_else() -> None:
    tree = TREES[ROOT / "model_runtime" / "executor.py"]
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    methods = [
        node for node in classes["Executor"].body if isinstance(node, Function) and not node.name.startswith("_")
    ]
    working = [
        node.name
        for node in methods
        if not any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)
    ]
    assert working == ["execute", "begin", "end"]  # the whole, and its halves


def test_api_process_never_imports_torch() -> None:
    """Nor does a command before it needs it."""
    code = (
        "import importlib, sys, server.api_process; from server.cli import COMMANDS; "
        "[importlib.import_module(command.module) for command in COMMANDS.values()]; print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "False"


def test_supervisor_is_light() -> None:
    code = (
        "import sys, server.cli, server.serve_command; heavy = {'torch', 'fastapi', 'uvicorn', 'tokenizers', 'httpx', "
        "'numpy', 'uvloop', 'matplotlib', 'loadtest.command'}; print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"


def test_packages_are_listed() -> None:
    listed = set(
        re.findall(
            r'"((?:server|scheduler|model_runtime|vision|loadtest)(?:\.\w+)*)"', (ROOT / "pyproject.toml").read_text()
        )
    )
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES}
    assert listed >= found


def test_project_names_no_private_place() -> None:
    """Nothing that is shipped names a private path of the machine it was written on."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    pattern = re.compile(r"(?<![\w.])/(?:work|farm|root|home/\w+)/")
    offenders = [
        name
        for name in tracked
        if (ROOT / name).suffix in {".py", ".md", ".toml", ".cpp", ".h"} and pattern.search((ROOT / name).read_text())
    ]
    assert [name for name in offenders if name != "tests/test_architecture.py"] == []
