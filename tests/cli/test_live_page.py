"""`--html`: while a run goes on, when it is done, and when it fails or is interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.pages import Page
from helpers.tiny import TASK, Sewa

from sewa_cli.cli import live
from sewa_cli.cli.live import LivePage

OUT = ("--output", "out.safetensors", "--html", "page.html")


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every page that is written, as it was on the disk; each stage is worth one."""
    monkeypatch.setattr(live, "PAUSE", 0.0)
    written: list[str] = []
    own = LivePage._write

    def write(self: LivePage, text: str) -> None:
        own(self, text)
        written.append(self.path.read_text())

    monkeypatch.setattr(LivePage, "_write", write)
    return written


def refreshes(page: str) -> bool:
    return any(one.get("http-equiv") == "refresh" for one in Page(page).meta)


@pytest.mark.usefixtures("run_dir")
def test_a_page_says_what_is_done_and_what_is_left_until_the_run_is_over(
    sewa: Sewa, pages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "BEAT", 0.0)
    ended = sewa("select", "--quiet", *OUT)
    assert ended.code == 0, ended.err
    *running, final = pages
    assert len(running) > 5
    assert all(map(refreshes, running))
    assert all("written anew while the run goes on" in page for page in running)
    assert "loading the task" in running[0]
    words = [Page(page).words for page in running]
    assert any("/8" in page and "so far" in page and "loss" in page for page in words)
    assert all("sewa select --quiet" in page for page in words)
    assert final == Path("page.html").read_text()
    assert not refreshes(final)
    assert "Running" not in final
    report = json.loads(Path("out.report.json").read_text())
    exact = [value for value, _ in Page(final).values]
    assert report["average"]["heldout_loss"] in exact
    assert report["command"] in Page(final).words


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize(
    "command",
    [
        ["compare", "--methods", "lawa,last", "--K", "2", "--report", "c.json"],
        ["compare", "--methods", "lawa,last", "--K", "2", "--windows", "4"],
        ["evaluate", "ckpts/step-10.safetensors", "ckpts/step-20.safetensors"],
        ["inspect", "ckpts/"],
    ],
    ids=["compare", "windows", "evaluate", "inspect"],
)
def test_other_commands_write_their_page_too(sewa: Sewa, command: list[str]) -> None:
    ended = sewa(*command, "--html", "page.html")
    assert ended.code == 0, ended.err
    assert "wrote page.html" in ended.err
    assert Page(Path("page.html").read_text()).tags["svg"] >= 1
    again = sewa(*command, "--html", "page.html")
    assert again.code == 3
    assert "page.html: exists; use --force" in again.error
    assert sewa(*command, "--html", "page.html", "--force").code == 0


@pytest.mark.usefixtures("run_dir")
def test_a_run_that_fails_leaves_a_page_that_says_so(sewa: Sewa, pages: list[str]) -> None:
    broken = TASK.replace("return data(2)", "raise RuntimeError('<b>no data</b>')")
    Path("task.py").write_text(broken)
    ended = sewa("select", *OUT)
    assert ended.code == 4
    assert pages
    found = Page(Path("page.html").read_text())
    assert not refreshes(pages[-1])
    assert "Failed" in found.words
    assert "RuntimeError: <b>no data</b>" in found.words
    assert not found.tags["b"]
    assert not Path("out.safetensors").exists()


@pytest.mark.usefixtures("run_dir")
def test_a_run_that_is_interrupted_leaves_a_page_that_says_so(sewa: Sewa, pages: list[str]) -> None:
    Path("task.py").write_text(TASK.replace("return data(2)", "raise KeyboardInterrupt"))
    assert sewa("select", *OUT).code == 130
    assert "Interrupted" in Page(pages[-1]).words
    assert not refreshes(pages[-1])


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--K", "0"], 2),
        (["--html", "page.txt"], 2),
        (["--html", "nowhere/page.html"], 3),
        (["--plot", "page.svg", "--html", "page.svg"], 2),
        (["--report", "page.html"], 2),
        (["--task", "none.py"], 4),
        (["--log", "nobody:here"], 2),
    ],
)
def test_what_is_refused_at_once_leaves_no_page(sewa: Sewa, flags: list[str], code: int) -> None:
    ended = sewa("select", *OUT, *flags)
    assert ended.code == code, ended.err
    assert not [path for path in Path().glob("page*") if path.suffix == ".html"]


@pytest.mark.usefixtures("run_dir")
def test_a_live_page_that_cannot_be_written_does_not_end_the_run(
    sewa: Sewa, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sewa_cli.errors import OutputError

    own = LivePage._write

    def write(self: LivePage, text: str) -> None:
        if "refresh" in text:
            raise OutputError("page.html: the disk is full")
        own(self, text)

    monkeypatch.setattr(LivePage, "_write", write)
    ended = sewa("select", *OUT)
    assert ended.code == 0
    assert ended.err.count("is not kept up while the run goes on") == 1
    assert Path("out.safetensors").exists()
    assert Page(Path("page.html").read_text()).tags["svg"] > 1
