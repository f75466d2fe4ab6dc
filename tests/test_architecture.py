"""Rules of the code base: imports point down, the core knows no files, imports are cheap."""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "sewa_cli"
LAYERS = [
    {
        *("config", "settings", "errors", "direction", "dtypes", "events", "files"),
        *("interrupts", "mirrors", "publish", "ranks", "text", "rng"),
    },
    {"trajectory", "checkpoints", "remote", "task", "report", "callbacks", "stats"},
    {"objective", "present"},
    {"solvers", "methods", "output", "trackers"},
    {"cache", "candidates", "extensions", "judge", "opening", "placing", "scores"},
    {"scoring"},
    {"comparison"},
    {"commands", "templates"},
    {"api", "demo"},
    {"cli"},
]
LAYER = {package: number for number, packages in enumerate(LAYERS) for package in packages}
CORE = {"trajectory", "objective", "solvers", "methods"}  # arithmetic: no file, no Config
OUTSIDE = {"config", "checkpoints", "task", "output", "callbacks"}

# seconds each, in every process that collects tests; they belong into fixtures and tests
SLOW_IMPORTS = {
    "accelerate",
    "datasets",
    "gymnasium",
    "lightning",
    "matplotlib",
    "peft",
    "sklearn",
    "tensorboard",
    "sewa_cli.callbacks.huggingface",
    "sewa_cli.callbacks.lightning",
    "torch.distributed",
    "transformers",
}
# to be emptied: tests that still import one of them at the top of a module
STILL_SLOW = {
    "checkpoints/test_hostile_pickles.py",
    "checkpoints/test_layouts_peft.py",
    "checkpoints/test_layouts_pickles.py",
    "faults/fuzz.py",
    "task/test_data_files.py",
    "task/test_gymnasium_task.py",
    "task/test_head.py",
    "task/test_huggingface_task.py",
    "task/test_newest_checkpoint.py",
}


@cache
def sources():
    """Every module of the product, its package, and the packages that it imports from."""
    return [
        (path.relative_to(PACKAGE), package_of(path), imported_packages(path))
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "__main__.py" and path.parent.parent != PACKAGE / "templates"
    ]


def package_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_packages(path):
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sewa_cli"):
            parts = (node.module or "").split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {parts[1] for parts in names if parts[0] == "sewa_cli" and len(parts) > 1}
    return found & LAYER.keys()


def test_every_package_has_a_layer():
    assert {package for _, package, _ in sources()} == {*LAYER, "__init__"}


def test_imports_point_down():
    above = [
        f"{path} imports {other}"
        for path, package, imported in sources()
        if package != "__init__"
        for other in imported - {package}
        if LAYER[other] > LAYER[package]
    ]
    assert not above


def test_writing_knows_nothing_of_how_reports_look():
    assert not [
        path
        for path, package, imported in sources()
        if package == "output" and "present" in imported
    ]


def test_the_core_knows_no_file_and_no_config():
    outside = [
        f"{path} imports {other}"
        for path, package, imported in sources()
        if package in CORE
        for other in imported & OUTSIDE
    ]
    assert not outside


def test_the_core_is_given_its_ranks():
    """One process or several: nothing in the core asks the environment."""
    asking = [
        str(path)
        for path, package, _ in sources()
        if package in {*CORE, "opening", "placing", "scores", "scoring", "comparison"}
        if "ranks.here()" in (PACKAGE / path).read_text()
    ]
    assert asking == ["opening.py"]  # where a session is opened


def test_a_class_name_is_used_once():
    """Apart from the callbacks of two trainers, which users import by one name."""
    classes = Counter(
        node.name
        for path, _, _ in sources()
        for node in ast.parse((PACKAGE / path).read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in classes.items() if count > 1} == {"SaveForSewa"}


def test_help_does_not_import_torch():
    code = (
        "import sys; from sewa_cli.cli import main;"
        "codes = [main(a.split()) for a in ('--help', 'select --help', '--version')];"
        "heavy = {'torch', 'numpy', 'pydantic', 'jinja2', 'matplotlib'} & set(sys.modules);"
        "print(codes, heavy, file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr.strip() == "[0, 0, 0] set()"
    assert "--K" in ended.stdout


def test_test_modules_import_slow_libraries_in_functions_only():
    slow = {
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("*.py")
        if path.parent.parent != TESTS / "frozen"  # tasks, imported by tests
        if any(is_slow(name) for name in imports_at_the_top(ast.parse(path.read_text())))
    }
    assert slow <= STILL_SLOW


def is_slow(module):
    return any(module == name or module.startswith(f"{name}.") for name in SLOW_IMPORTS)


def imports_at_the_top(node):
    """All but those inside of functions, which run when a test runs, and those for types alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.Call) and ast.unparse(child.func) == "pytest.importorskip":
            yield str(ast.literal_eval(child.args[0]))
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports_at_the_top(child)
