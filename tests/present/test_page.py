"""The page: the report's numbers and nothing else, whatever names are in it, in one small file."""

import json
import re
import sys
from pathlib import Path

import pytest
from helpers.pages import (
    EVIL,
    NAMES,
    Page,
    evil,
    many_checkpoints,
    numbers,
    plain_page,
    raw,
    report,
)
from helpers.tiny import finding

from sewa_cli import Selection, present
from sewa_cli.errors import ConfigError
from sewa_cli.present import page as pages
from sewa_cli.present.page import core, page
from sewa_cli.present.view import Table
from sewa_cli.report.reading import misfit, read_any
from sewa_cli.text import number, shown


def is_shown(exact, text):
    """Whether the words are the number with five digits or three."""
    known = [number(exact), number(exact, 3), f"{exact:,.0f}" if exact == int(exact) else ""]
    return text in known


@pytest.mark.parametrize("name", NAMES)
def test_every_number_on_the_page_is_the_reports(name):
    content = raw(name)
    found = Page(plain_page(name))
    known = {*numbers(content)}
    expected = finding(content, "expected")
    if expected and expected["by"] is not None:
        known.add(expected["loss"] + expected["by"])  # of the best simple
    if name == "compare":  # its table is the terminal's, with megabytes and milliseconds
        costs = [row["cost"] for row in content["rows"]]
        known |= {round(cost["bytes_read"] / 1e6, 3) for cost in costs}
        known |= {round(cost["seconds"], 3) for cost in costs}
    if name == "inspect":
        known |= {round(one["cosine"], 3) for one in content["checkpoints"] if one["cosine"]}
    assert len(found.values) > 8
    for exact, text in found.values:
        assert exact in known, text
        assert is_shown(exact, text), (exact, text)


def test_what_people_ask_first_is_there_first():
    content = {**raw("mask"), "command": "sewa select ckpts/ --K 4"}
    found = Page(page(report(content), "mask.report.json"))
    words = " ".join(found.words.split())
    order = (
        "Held-out loss",
        "4 of 12 checkpoints averaged; vs best baseline",
        "sewa select ckpts/ --K 4",
        "Against baselines",
        "Which checkpoints",
        "How the loss changes",
        "What it cost",
        "sewa apply mask.report.json -o again.safetensors",
        "sewa verify mask.report.json",
        content["files"][0]["sha256"],
    )
    places = [words.index(part) for part in order]
    assert places == sorted(places)
    assert not found.tags["script"]
    assert len(found.labels) == found.tags["svg"] >= 3
    assert all(len(label) > 40 for label in found.labels)
    weights = [c["weight"] for c in content["candidates"] if c["weight"]]
    assert [exact for exact, _ in found.values if exact in weights]


def test_hovering_says_what_every_point_is():
    text = plain_page("compare")
    for row in raw("compare")["rows"]:
        name = row["method"] if row["K"] is None else f"{row['method']} K={row['K']}"
        said = f"{number(row['heldout_loss'])}, 95 % CI [{number(row['interval']['low'])}, "
        assert re.search(f"<title>{name}, [a-z ]+ {re.escape(said)}[^<]*</title>", text)
    text = plain_page("select")
    for candidate in raw("select")["candidates"]:
        said = f"<title>step {candidate['step']}, coefficient {number(candidate['weight'])}</title>"
        assert (said in text) == bool(candidate["weight"])


@pytest.mark.parametrize("name", NAMES)
def test_whatever_names_a_report_has_they_are_text(name):
    content = raw(name)
    plain = Page(plain_page(name))
    nasty = evil(content)
    text = page(report(nasty), EVIL)
    found = Page(text)
    assert not found.tags["script"]
    assert found.tags.keys() <= {*plain.tags, "code", "aside", "ul", "li", "p", "pre", "div"}
    assert not found.tags["img"]
    assert not {key for key in found.attributes if key.startswith("on")}
    assert "\u202e" not in text
    assert "{{7*7}}" in found.words
    assert shown(EVIL) in found.words
    if name == "inspect":
        cell = core(report(nasty))
        assert "&lt;script&gt;alert(1)" in cell
        assert not Page(cell).tags["script"]


def test_nothing_is_asked_of_anybody():
    for name in ("select", "compare"):
        text = plain_page(name)
        found = Page(text)
        [policy] = [one for one in found.meta if one.get("http-equiv") == "Content-Security-Policy"]
        assert "default-src 'none'" in (policy["content"] or "")
        assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & {*found.tags}
        assert "src" not in found.attributes
        assert "@import" not in text
        assert "url(" not in text.replace("url(#", "")
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text


def test_a_large_run_makes_a_page_that_can_be_sent():
    text = page(report(many_checkpoints()))
    assert len(text.encode()) < 850_000
    assert Page(text).tags["tr"] > 60


def test_a_table_of_more_rows_than_anybody_reads_is_cut_and_says_so(monkeypatch):
    monkeypatch.setattr(pages, "MOST_ROWS", 10)
    text = page(report(raw("inspect")))
    assert "The first 10 of 12; the report has all of them." in text
    assert "step-110.safetensors" not in text


def test_without_matplotlib_the_page_has_all_but_pictures_and_says_so(monkeypatch, tmp_path, sewa):
    (tmp_path / "a.json").write_text(json.dumps(raw("select")))
    for module in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, module, None)
    ended = sewa("report", tmp_path / "a.json", "-o", tmp_path / "a.html")
    assert ended.code == 0
    assert "pip install matplotlib" in ended.err
    found = Page((tmp_path / "a.html").read_text())
    assert not found.tags["svg"]
    assert "without pictures" in found.words
    assert number(raw("select")["average"]["heldout_loss"]) in found.words


def test_a_notebook_shows_the_core_of_the_page():
    assert report(raw("inspect"))._repr_html_() == core(report(raw("inspect")))
    found = Page(Selection(report(raw("mask")), None)._repr_html_())
    assert not {"html", "body", "script", "meta"} & {*found.tags}
    assert found.tags["svg"] >= 3
    assert "checkpoints" in found.words
    ids = [{*re.findall(r' id="([^"]+)"', core(report(raw(name))))} for name in ("mask", "seed1")]
    assert all(ids)
    assert not ids[0] & ids[1]


@pytest.mark.parametrize("name", ["select", "compare"])
def test_no_metric_takes_the_place_of_a_column(name):
    words = ("held-out", "selection", "95 % CI", "minus best", "expected loss", "average", "mark")
    content, plain = raw(name), raw(name)
    places = content["rows"] if name == "compare" else [*content["references"].values()]
    for row in [*places, content.get("average", {})]:
        row["metrics"] = dict.fromkeys(words, 77.0)
    [before] = present.view_of(report(plain)).tables
    [after] = present.view_of(report(content)).tables
    assert isinstance(before, Table)
    assert isinstance(after, Table)
    for old, new in zip(before.rows, after.rows, strict=True):
        assert {key: new[key] for key in old} == old
        assert [*new.values()].count(77.0) == len(words)


def test_a_picture_of_too_many_points_is_left_out(monkeypatch):
    monkeypatch.setattr(pages, "MOST_POINTS", 3)
    found = Page(page(report(raw("compare"))))
    assert "Nothing is drawn: " in found.words
    assert not found.tags["svg"]


@pytest.mark.usefixtures("run_dir")
def test_every_kind_of_report_has_a_page(sewa):
    commands = {
        "select": ["select", "-o", "s.safetensors"],
        "forecast": ["select", "--dry-run"],
        "validate": ["validate"],
        "average": ["average", "--report", "r.json"],
        "verify": ["verify", "r.json"],
    }
    for kind, command in commands.items():
        ended = sewa(*command, "--json")
        assert ended.code == 0, ended.err
        Path(f"{kind}.json").write_text(ended.out)
        made = sewa("report", f"{kind}.json", "-o", f"{kind}.html")
        assert f"wrote {kind}.html" in made.err
        text = Path(f"{kind}.html").read_text()
        assert Page(text).tags["h1"] == 1
        assert f"sewa {' '.join(command)} --json" in text
        read = read_any(Path(f"{kind}.json"))
        if kind in ("select", "average"):
            assert present.draw(read).axes
        else:
            with pytest.raises(ConfigError, match="has no picture"):
                present.draw(read)
    said = present.summary(read_any(Path("average.json")))
    assert "ckpts/step-120.safetensors   120  0.083333" in said
    assert said.endswith("uniform of 12 checkpoints\nwrote averaged.safetensors\n")
    assert sewa("report", "verify.json", "-o", "-").out == Path("verify.html").read_text()


BAD = {
    "not JSON": ("{", "not a report of sewa"),
    "a list": ("[]", "is not a JSON object"),
    "another kind": ('{"kind": "windows"}', "its kind is 'windows', and must be one of select"),
    "half of one": ('{"kind": "select", "schema_version": 3}', "not a report of sewa"),
    "an older one": ('{"kind": "select", "schema_version": 2}', "this version of sewa shows 3"),
    "not UTF-8": (b'{"kind": "\xff"}', "not a report of sewa"),
    "too deep": ("[" * 10_000, "not a report of sewa"),
    "too many values": ("[" + "0," * 4_000_001 + "0]", "values, the most that sewa reads"),
}
CONTRADICTIONS = {
    "a best row that is not there": ("compare", {"best": 999}),
    "fewer candidates than k": ("compare", {"k": 13}),
    "no rows": ("compare", {"rows": [], "best": None}),
    "no references": ("select", {"references": {}}),
    "a blend of nothing": ("select", {"candidates": []}),
    "selected that are not there": ("mask", {"selected": [10**9], "selected_steps": []}),
    "K above k": ("mask", {"K": 13}),
    "selected twice": ("mask", {"selected": [1, 1, 2, 3]}),
    "no checkpoints": ("inspect", {"checkpoints": []}),
    "no files": ("evaluate", {"files": []}),
}


@pytest.mark.parametrize("case", [*BAD, *CONTRADICTIONS])
def test_what_is_no_report_or_inconsistent_is_refused_in_a_line(tmp_path, sewa, case):
    file, why = tmp_path / "a.json", "is inconsistent"
    if case in BAD:
        content, why = BAD[case]
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    else:
        name, change = CONTRADICTIONS[case]
        assert misfit(report(raw(name))) is None
        file.write_text(json.dumps({**raw(name), **change}))
    ended = sewa("report", file, "-o", tmp_path / "a.html")
    assert ended.code == 3
    assert why in ended.error
    assert not (tmp_path / "a.html").exists()


def test_numbers_that_cannot_be_drawn_are_gaps(tmp_path, sewa):
    content = json.dumps(raw("select"))
    for loss in (
        raw("select")["average"]["heldout_loss"],
        finding(raw("select"), "expected")["loss"],
    ):
        content = content.replace(json.dumps(loss), "NaN")
    content = content.replace('"step": 10,', '"step": 1' + "0" * 400 + ",")
    (tmp_path / "a.json").write_text(content)
    ended = sewa("report", tmp_path / "a.json", "-o", tmp_path / "a.html")
    assert ended.code == 0, ended.err
    assert ended.err.splitlines() == [f"wrote {tmp_path / 'a.html'}"]
    assert "nan" not in Page((tmp_path / "a.html").read_text()).words.lower()


def test_a_page_replaces_nothing_without_force(tmp_path, sewa):
    file, target = tmp_path / "a.json", tmp_path / "a.html"
    file.write_text(json.dumps(raw("inspect")))
    target.write_text("mine")
    assert "use --force" in sewa("report", file, "-o", target).error
    assert target.read_text() == "mine"
    assert sewa("report", file, "-o", target, "--force").code == 0
    assert target.read_text().startswith("<!doctype html>")
    assert "name it .html" in sewa("report", file, "-o", tmp_path / "a.pdf").error
    renamed = file.rename(tmp_path / "b.html")
    assert "the report itself" in sewa("report", renamed, "-o", renamed, "--force").error
    assert "no such" in sewa("report", file, "-o", tmp_path / "none" / "a.html").error.lower()
    assert sewa("report", renamed, "-o", "-", "--open").code == 2
