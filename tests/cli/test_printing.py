"""One way to ask and to print: every command that prints data takes the same formats."""

import csv
import io
import json
import re
from pathlib import Path

import jsonschema
import pytest
from helpers.tiny import TASK

from sewa_cli.cli.flags import FLAGS, FORMATS
from sewa_cli.extensions import load_settings
from sewa_cli.present import show
from sewa_cli.report import KINDS, model_of

METRIC = "\ndef metrics(model):\n    return {'size': 7, 'a|b': 0.5}\n"
REPORTS = {
    "select": ["select"],
    "forecast": ["select", "--dry-run"],
    "compare": ["compare", "--methods", "last,lawa", "--K", "3"],
    "evaluate": ["evaluate", "ckpts/step-10.safetensors", "ckpts/step-20.safetensors"],
    "inspect": ["inspect"],
    "validate": ["validate"],
    "average": ["average", "ckpts"],
    "verify": ["verify", "mean.report.json"],
}
LISTS = {"methods": ["methods"], "solvers": ["solvers"]}
COMMANDS = {**REPORTS, **LISTS}
ROWS = {"select": 4, "forecast": 4, "compare": 2, "evaluate": 2}
ROWS |= {"inspect": 12, "validate": 1, "average": 12, "verify": 13}


@pytest.fixture
def measured(run_dir, sewa):
    """Besides, an average to verify."""
    (run_dir / "task.py").write_text(TASK + METRIC)
    mean = ["-o", "mean.safetensors", "--report", "mean.report.json"]
    assert sewa("average", "ckpts", *mean).code == 0
    return run_dir


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_prints_data_prints_it_in_every_format(sewa, name):
    printed = {}
    for form in FORMATS:
        ended = sewa(*COMMANDS[name], "--format", form, *quietly(name))
        assert ended.code == 0, ended.err
        printed[form] = ended.out
    assert json.loads(printed["json"]) is not None
    lines = [json.loads(line) for line in printed["jsonl"].splitlines()]
    rows = list(csv.DictReader(io.StringIO(printed["csv"])))
    assert len(lines) == len(rows) == ROWS.get(name, len(lines))
    for line, row in zip(lines, rows, strict=True):
        assert list(line) == list(row)
        # not the same in the next run
        for column in line.keys() - {"seconds", "cap_bytes", "peak_memory_bytes"}:
            assert row[column] == ("" if line[column] is None else str(line[column]))
    tables = [line for line in printed["markdown"].splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in tables)
    assert tables or not lines
    assert printed["table"].strip() or not lines


def quietly(name):
    return [] if name in LISTS else ["--quiet"]


@pytest.mark.parametrize("name", LISTS)
def test_json_is_short_for_format_json(sewa, name):
    assert sewa(name, "--json").out == sewa(name, "--format", "json").out
    assert sewa(name, "--json", "--format", "json").code == 0
    refused = sewa(name, "--json", "--format", "csv")
    assert (refused.code, refused.out) == (2, "")
    assert "--json is short for --format json" in refused.error


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_format_is_refused_before_any_work(sewa, name):
    Path("task.py").write_text("raise RuntimeError('work was done')")
    ended = sewa(*COMMANDS[name], "--format", "xml")
    assert (ended.code, ended.out) == (2, "")
    assert re.match(r"--format: must be one of (paths, )?table, json, jsonl, csv, ", ended.error)
    assert not list(Path().glob("averaged*"))


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("kind", KINDS)
def test_every_report_fits_the_schema_that_sewa_prints(sewa, kind):
    found = json.loads(sewa(*REPORTS[kind], "--json").out)
    schema = json.loads(sewa("schema", kind).out)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(found, schema)
    assert found.keys() == schema["properties"].keys()
    assert (found["schema_version"], found["kind"]) == (3, kind)
    assert {"versions", "created", "config", "warnings"} <= found.keys()
    assert ("task" in found) == ({"device", "seed"} <= found.keys())
    # what was printed can be read again, and says the same
    again = model_of(kind).model_validate(found)
    assert json.loads(show(again, "json")) == found


@pytest.mark.parametrize("name", ["select", "compare", "average"])
def test_help_comes_in_panels(sewa, name):
    out = sewa(name, "--help").out
    titles = ["Common", "Which checkpoints", "What to write", "How to run"]
    places = [out.index(f"─ {title} ─") for title in titles]
    assert places == sorted(places)
    assert "--K" in out[places[0] : places[1]]
    assert "--last" in out[places[1] : places[2]]
    assert "--format" in out[places[2] : places[3]]
    assert "--quiet" in out[places[3] :]
    assert "<bool>" not in out
    assert f"sewa {name} ckpts/" in out[out.index("Examples:") :]


def test_select_has_few_enough_flags_to_be_read(sewa):
    out = sewa("select", "--help").out
    assert len(re.findall(r"^│ --", out, re.MULTILINE)) <= 34  # with --help
    also = " ".join(out[out.index("Also (see the docs):") :].split())
    for rare in ("--every N", "--state-key KEY", "--incumbent NAME", "--shard-size SIZE"):
        assert f"{rare}, " in also


def test_a_flag_has_one_name_and_its_setting_exists():
    config = load_settings(None)
    for name, flag in FLAGS.items():
        assert flag.help, name
        if flag.key is not None:
            section, _, leaf = (flag.key or name).rpartition(".")
            fields = type(getattr(config, section) if section else config).model_fields
            assert leaf in {field.alias or key for key, field in fields.items()}


def test_shells_complete_commands_and_values(sewa, monkeypatch):
    monkeypatch.setenv("_SEWA_COMPLETE", "complete_bash")
    for words, expected in {
        "sewa sel": ["select"],
        "sewa inspect --format j": ["json", "jsonl"],
        "sewa schema f": ["forecast"],
    }.items():
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        assert sewa().out.split() == expected
