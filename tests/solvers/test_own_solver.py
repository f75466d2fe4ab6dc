"""A solver of the user's own: from a file or a package, with its settings, in every command."""

import json
import re
import sys
from pathlib import Path

import pytest

from sewa_cli import solvers

pytestmark = pytest.mark.usefixtures("climb")

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "solvers.md"
OWN = ["--solver", "climb", "--set", "solver_from=climb.py"]


@pytest.fixture
def climb(run_dir):
    """The example of the documentation, in the user's folder."""
    [example] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (run_dir / "climb.py").write_text(example)
    yield example
    for name in {*solvers.REGISTRY} - {*solvers.BUILTIN}:
        del solvers.REGISTRY[name]


def test_the_example_chooses_better_than_where_it_began(sewa):
    ended = sewa("select", "--K", 4, *OWN, "--set", "climb.tries=60", "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert len(report["selected"]) == 4
    assert report["config"]["solver"] == "climb"
    assert report["config"]["solvers"]["climb"] == {"tries": 60}
    assert report["recipe"]["metadata"]["sewa_method"] == "climb"
    table = sewa("compare", "--methods", "sewa,latest", "--K", 4, *OWN, "--format", "json")
    losses = {row["method"]: row["selection_loss"] for row in json.loads(table.out)["rows"]}
    assert losses["sewa"] < losses["latest"]


def test_the_same_seed_gives_the_same_bytes_in_every_tier(sewa):
    for tier in ("memory", "files"):
        ended = sewa("select", *OWN, "--set", f"tier={tier}", "-o", f"{tier}.safetensors")
        assert ended.code == 0, ended.err
    assert Path("memory.safetensors").read_bytes() == Path("files.safetensors").read_bytes()


def test_its_settings_are_checked_under_its_name(sewa, run_dir):
    yaml = run_dir / "sewa.yaml"
    text = yaml.read_text() + "solver: climb\nsolver_from: climb.py\n"
    yaml.write_text(text + "climb: {tries: 3}\n")
    report = json.loads(sewa("select", "--json").out)
    assert report["config"]["solvers"]["climb"] == {"tries": 3}
    yaml.write_text(text + "climb: {trys: 3}\n")
    ended = sewa("select")
    assert ended.code == 2
    assert ended.error == "sewa.yaml: climb.trys: unknown key; did you mean tries?"
    assert sewa("average").code == 0  # which chooses nothing, and looks at no solver


def test_it_is_listed_planned_and_refused_as_ours_are(sewa):
    listed = sewa("solvers", "--set", "solver_from=climb.py").out
    assert re.search(r"^climb +From the K newest, one random swap", listed, re.MULTILINE)
    forecast = json.loads(sewa("select", *OWN, "--dry-run", "--json").out)
    assert not forecast["is_declared"]  # it has no plan
    ended = sewa("select", *OWN, "--K", "auto")
    assert ended.code == 2
    assert "K: auto needs a solver that finds K" in ended.error


def test_a_package_brings_one_by_an_entry_point(climb, sewa, tmp_path, monkeypatch):
    package = tmp_path / "site"
    info = package / "guest-1.0.dist-info"
    info.mkdir(parents=True)
    (package / "guest.py").write_text(climb.replace('register("climb", Climb)\n', ""))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sewa.solvers]\nguest = guest:Climb\n")
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.delitem(sys.modules, "guest", raising=False)
    ended = sewa("select", "--solver", "guest", "--set", "guest.tries=2", "--json")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["config"]["solver"] == "guest"


def test_a_fault_in_it_is_shown_with_the_users_frames(sewa):
    path = Path("climb.py")
    path.write_text(
        path.read_text().replace("        k, draw =", "        1 / 0\n        k, draw =")
    )
    ended = sewa("select", *OWN)
    assert ended.code == 4
    assert "ZeroDivisionError" in ended.error
    assert "climb.py" in ended.err


def test_a_second_solver_of_one_name_is_refused():
    with pytest.raises(ValueError, match="there is a solver named gumbel already"):
        solvers.register("gumbel", type("Mine", (solvers.Solver,), {}))


FAULTS = {
    "__init__": ("def __init__(self, settings=None): raise RuntimeError('boom')", "boom"),
    "vectors": ("vectors = property(lambda self: 1 / 0)", "ZeroDivisionError"),
    "plan": ("def plan(self, sizes): raise RuntimeError('boom')", "boom"),
    "prepare": ("def prepare(self, problem): raise RuntimeError('boom')", "boom"),
    "not a choice": ("def choose(self, problem, K): return 1", "must return a Choice"),
    "probabilities": (
        "def choose(self, problem, K): return Choice.of([1], problem.trajectory.k, "
        "Mask(probabilities=[1.0]))",
        "1 probabilities for 12 checkpoints",
    ),
    "details": (
        "def choose(self, problem, K): return Choice.of([1], problem.trajectory.k, "
        "Details(found={'x': object()}))",
        "not JSON serializable",
    ),
    "no finding": (
        "def choose(self, problem, K): return Choice.of([1], problem.trajectory.k, {'x': 1})",
        "a finding must be a Finding of sewa_cli.report.findings, or a subclass; found dict",
    ),
    "weights": (
        "def choose(self, problem, K): return Choice([0.5] * problem.trajectory.k)",
        "sum to 6 instead of 1",
    ),
}


@pytest.mark.parametrize(("lines", "words"), FAULTS.values(), ids=FAULTS)
def test_whatever_is_wrong_with_it_is_the_users_and_nothing_is_written(sewa, lines, words):
    Path("climb.py").write_text(
        "from sewa_cli.report.findings import Details, Mask\n"
        "from sewa_cli.solvers import Solver, Choice, register\n"
        "class Climb(Solver):\n"
        "    def choose(self, problem, K): return Choice.of([1], problem.trajectory.k)\n"
        f"    {lines}\nregister('climb', Climb)\n"
    )
    command = ["select", "--dry-run"] if "plan" in lines else ["select"]
    if "prepare" in lines:
        command = ["compare", "--methods", "sewa"]
    ended = sewa(*command, "--K", 3, *OWN)
    assert ended.code == 4, ended.err
    assert words in ended.error
    assert not list(Path().glob("averaged*"))


def test_its_own_finding_is_shown_and_can_be_read_without_it(sewa):
    path = Path("climb.py")
    path.write_text(
        "from sewa_cli.report.findings import Finding\n"
        "from sewa_cli.solvers import Solver, Choice, register\n"
        "class Swaps(Finding):\n"
        "    taken: int\n"
        "    def says(self): return [f'{self.taken} swaps were taken']\n"
        "class Climb(Solver):\n"
        "    def choose(self, problem, K):\n"
        "        return Choice.of([1], problem.trajectory.k, Swaps(taken=12))\n"
        "register('climb', Climb)\n"
    )
    ended = sewa("select", "--K", 3, *OWN, "-v", "--html", "page.html", "-o", "o.safetensors")
    assert ended.code == 0, ended.err
    assert "12 swaps were taken" in ended.err
    assert "12 swaps were taken" in Path("page.html").read_text()
    [found] = json.loads(Path("o.report.json").read_text())["findings"]
    assert (found["name"], found["found"]) == ("Swaps", {"taken": 12})
    path.unlink()
    assert sewa("report", "o.report.json", "-o", "again.html").code == 0
    assert "12 swaps were taken" in Path("again.html").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("class A(Solver): pass\nregister('climb', A)", "has no choose"),
        ("A = 3\nregister('climb', A)", "a solver is a subclass"),
        (
            "class A(Solver):\n    Settings = dict\n    def choose(self, problem, K): ...\n"
            "register('climb', A)",
            "its Settings must be a subclass",
        ),
    ],
)
def test_what_is_no_solver_is_refused_when_it_is_registered(sewa, text, words):
    Path("climb.py").write_text(f"from sewa_cli.solvers import Solver, register\n{text}\n")
    ended = sewa("select", *OWN)
    assert ended.code == 4, ended.err
    assert words in ended.error


def test_a_name_that_is_a_key_of_the_config_is_refused(sewa):
    path = Path("climb.py")
    path.write_text(path.read_text().replace('register("climb"', 'register("task"'))
    ended = sewa("select", "--solver", "task", "--set", "solver_from=climb.py")
    assert ended.code == 2
    assert "'task' is a key of sewa.yaml" in ended.error


def test_a_fast_comparison_says_that_it_does_not_ask_it(sewa):
    ended = sewa("compare", "--fast", "--methods", "sewa,last", "--K", 3, *OWN)
    assert ended.code == 0, ended.err
    assert "--fast: `sewa` chooses by predicted outputs, not by --solver" in ended.err
