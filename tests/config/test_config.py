"""YAML, flags and --set become one frozen Config; all faults are reported at once."""

import re
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from sewa_cli import solvers
from sewa_cli.config import CompareConfig, Config, ObjectiveConfig, find_config
from sewa_cli.errors import ConfigError
from sewa_cli.extensions import load_settings as load_config
from sewa_cli.extensions import solver_for


def write_yaml(folder, text):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sewa.yaml"
    path.write_text(text)
    return path


def faults(*arguments):
    with pytest.raises(ConfigError) as caught:
        load_config(*arguments)
    return caught.value.faults


def test_the_yaml_here_is_found_unless_another_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config(None) is None
    write_yaml(tmp_path, "K: 3")
    assert find_config(None) == Path("sewa.yaml")
    assert find_config(Path("other.yaml")) == Path("other.yaml")


def test_a_flag_beats_the_yaml_and_set_beats_both(tmp_path):
    path = write_yaml(tmp_path, "K: 3\nseed: 3\nlast: 30\nevery: 2")
    config = load_config(path, {"K": "4", "seed": "4"}, ["K=5"])
    assert (config.K, config.seed, config.last) == (5, 4, 30)
    assert load_config(path, {}, ["every=null"]).every is None


def test_a_dotted_key_changes_its_neighbours_not_at_all(tmp_path):
    path = write_yaml(tmp_path, "gumbel: {lr: 0.1, samples: 7}\nargs: {a: {b: 1, c: 2}}")
    config = load_config(
        path, {"gumbel.iterations": "9"}, ["gumbel.lr=0.2", "args.a.b=[3, x]", "args.new.deep=on"]
    )
    gumbel = config.solvers["gumbel"]
    assert (gumbel["lr"], gumbel["samples"], gumbel["iterations"]) == (0.2, 7, 9)
    assert config.args == {"a": {"b": [3, "x"], "c": 2}, "new": {"deep": True}}


def test_paths_in_the_yaml_are_relative_to_it_and_paths_in_flags_are_not(tmp_path):
    run = tmp_path / "run"
    path = write_yaml(
        run, "task: ./task.py\ncheckpoints: ckpts/\noutput: out.safetensors\nreport: r.json"
    )
    config = load_config(path)
    assert config.task == str(run / "task.py")
    assert config.checkpoints == (run / "ckpts",)
    assert config.output == str(run / "out.safetensors")
    assert config.report == run / "r.json"
    flagged = load_config(
        path,
        {"checkpoints": [Path("mine/")], "output": "mine.safetensors", "task": "mine.py"},
        ["report=mine.json"],
    )
    assert flagged.checkpoints == (Path("mine"),)
    assert flagged.output == "mine.safetensors"
    assert flagged.task == "mine.py"
    assert flagged.report == Path("mine.json")


def test_args_that_start_with_a_dot_and_slash_are_paths_at_any_depth(tmp_path):
    path = write_yaml(
        tmp_path,
        "args:\n  data: ./data\n  up: ../shared\n  name: data\n  glob: .*/x\n  n: 3\n"
        "  nested: {files: [./a, plain]}",
    )
    assert load_config(path).args == {
        "data": str(tmp_path / "data"),
        "up": str(tmp_path / "../shared"),
        "name": "data",
        "glob": ".*/x",
        "n": 3,
        "nested": {"files": [str(tmp_path / "a"), "plain"]},
    }


def test_all_faults_are_told_together_each_with_its_place(tmp_path):
    path = write_yaml(tmp_path, "K: many\nlasst: 3\ngumbel: {lr: -1, smaples: 2}\nbn: maybe")
    told = faults(path, {"seed": "-5", "gumbel.iterations": "x"}, ["every", "to_step=soon"])
    starts = (
        f"{path}: K: must be a whole number, found 'many'",
        f"{path}: lasst: unknown key; did you mean last?",
        f"{path}: gumbel.lr: must be greater than 0, found -1",
        f"{path}: gumbel.smaples: unknown key; did you mean samples?",
        f"{path}: bn: must be 'auto', 'on' or 'off', found 'maybe'",
        "--seed: must be greater than or equal to 0",
        "--iterations: must be a whole number, found 'x'",
        "--set every: must look like key=value",
        "--set to_step: must be a whole number, found 'soon'",
    )
    for start in starts:
        assert len([fault for fault in told if fault.startswith(start)]) == 1, (start, told)
    assert len(told) == len(starts)
    assert not any("\n" in fault for fault in told)


@pytest.mark.parametrize(
    ("text", "flags", "sets", "words"),
    [
        ("K: 3", {"K": "0"}, [], ["--K: "]),
        ("K: 3", {"K": "4"}, ["K=0"], ["--set K: "]),
        ("", {}, ["gumbel={lr: fast, samples: 3}"], ["--set gumbel", "lr: must be a number"]),
        ("zzz: 1", {}, [], ["known keys: task, args, checkpoints, K, "]),
        ("gumbel: {zzz: 1}", {}, [], ["known keys: iterations, samples, "]),
        ("", {}, ["args.x={a: [1"], ["--set args.x={a: [1: "]),
        ("checkpoints: {folder: x}", {}, [], ["checkpoints: must be a path or a list of paths"]),
        ("", {"solver": "newton"}, [], [f"there are {', '.join(solvers.BUILTIN)}"]),
        ("", {"solver": "newton", "solver.iterations": "3"}, [], ["unknown solver 'newton'"]),
    ],
)
def test_a_fault_names_what_gave_the_value(tmp_path, text, flags, sets, words):
    [fault] = faults(write_yaml(tmp_path, text), flags, sets)
    assert all(word in fault for word in words), fault
    assert "\n" not in fault


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("task: ./task.py\nK: 3\nK: 4\n", ":3:1: the key 'K' is given twice"),
        ("gumbel:\n  lr: 1\n  lr: 2\n", ":3:3: the key 'lr' is given twice"),
        ("task: ./task.py\nK: [3\n", ":3:1: "),
        ("K:\t- 3\n", ":1:"),
        ("args: !!timestamp x\n", ": has a value that cannot be read"),
        ("args: " + "[" * 1500 + "]" * 1500, ": is nested too deep"),
    ],
)
def test_a_broken_yaml_is_told_with_line_and_column(tmp_path, text, place):
    path = write_yaml(tmp_path, text)
    [told] = faults(path)
    assert told.startswith(f"{path}{place}")
    assert told.endswith("; fix the YAML")


TEMPLATE = (files("sewa_cli") / "templates" / "init" / "sewa.yaml").read_text(encoding="utf-8")


def commented_out():
    """The template's commented keys, read as YAML."""
    is_key = re.compile(r"# ( *[\w-]+:(?: .*)?)$")
    lines = [found[1] for line in TEMPLATE.splitlines() if (found := is_key.match(line))]
    settings = yaml.safe_load("\n".join(lines))
    assert isinstance(settings, dict)
    return settings


def sections():
    own = {name: solvers.find(name).Settings for name in solvers.BUILTIN}
    return {**own, "compare": CompareConfig, "objective": ObjectiveConfig}


def test_the_template_is_a_valid_config_and_so_is_all_it_comments_out():
    live = yaml.safe_load(TEMPLATE)
    load_config(None, live)
    load_config(None, {**live, **commented_out()})
    assert not live.keys() & commented_out().keys()


def test_the_template_shows_every_key_there_is():
    shown = {**yaml.safe_load(TEMPLATE), **commented_out()}
    keys = {field.alias or name for name, field in Config.model_fields.items()}
    assert shown.keys() == keys - {"solvers"} | {*solvers.BUILTIN}
    for name, section in sections().items():
        assert shown[name].keys() == section.model_fields.keys(), name


def test_every_commented_key_of_the_template_shows_the_real_default():
    shown = commented_out()
    assert shown.pop("args") == {"data": "./data"}  # an example; the default is none
    assert shown.pop("output") == "averaged.safetensors"  # null: a free name like it
    real = Config().model_dump(mode="json", by_alias=True)
    real |= {n: solvers.find(n).Settings().model_dump(mode="json") for n in solvers.BUILTIN}
    assert shown == {name: real[name] for name in shown}


@pytest.mark.parametrize(
    ("flags", "serves"),
    [
        ({}, "aggregate"),
        ({"K": "auto"}, "aggregate"),
        ({"sparse": True}, "linear"),
        ({"K": "auto", "sparse": True}, "linear"),
        ({"K": "4"}, "gumbel"),
        ({"K": "4", "solver": "linear"}, "linear"),
    ],
)
def test_where_no_solver_is_named_k_says_which_one_serves(flags, serves):
    config = load_config(None, flags)
    assert config.solver == flags.get("solver")
    assert solver_for(config, config.K) == serves
    assert config.solvers.keys() == {serves}
