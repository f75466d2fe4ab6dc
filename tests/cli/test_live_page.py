"""`--html`: while a run goes on, when it is done, and when it fails or is interrupted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.pages import Page
from helpers.tiny import TASK, Sewa

from sewa_cli.cli import live
from sewa_cli.cli.console import Talk
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
    assert any("Running: learning" in page for page in words)
    assert not any("Running: working" in page for page in words)
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
    assert "then it stopped" in found.words
    assert not Path("out.safetensors").exists()
    Path("task.py").write_text(TASK)
    ended = sewa("select", *OUT)  # its page stands in nobody's way
    assert ended.code == 0, ended.err
    assert Page(pages[-1]).tags["svg"] > 1
    assert "exists; use --force" in sewa("inspect", "ckpts/", "--html", "page.html").error


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
        (["--log", "tensorboard:page.html"], 2),
        (["--config", "page.htm", "--html", "page.htm", "--force"], 3),
        (["--dry-run", "--plot", "page.svg"], 2),
    ],
)
def test_what_is_refused_at_once_leaves_no_page(sewa: Sewa, flags: list[str], code: int) -> None:
    Path("page.htm").write_text("seed: 1\n")
    ended = sewa("select", *OUT, *flags)
    assert ended.code == code, ended.err
    assert not [path for path in Path().glob("page*") if path.suffix == ".html"]
    assert Path("page.htm").read_text() == "seed: 1\n"


@pytest.mark.usefixtures("run_dir")
def test_a_live_page_that_cannot_be_written_does_not_end_the_run(
    sewa: Sewa, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sewa_cli.errors import OutputError

    own, written = LivePage._write, 0

    def write(self: LivePage, text: str) -> None:
        nonlocal written
        if "refresh" in text and written:  # the first is on the disk, all after it fail
            raise OutputError("page.html: the disk is full")
        own(self, text)
        written += 1

    monkeypatch.setattr(LivePage, "_write", write)
    ended = sewa("select", *OUT)
    assert ended.code == 0, ended.err
    assert ended.err.count("is not kept up while the run goes on") == 1
    assert Path("out.safetensors").exists()
    assert written == 2
    assert Page(Path("page.html").read_text()).tags["svg"] > 1


@pytest.mark.usefixtures("run_dir")
def test_a_forecast_has_a_page_that_ends(sewa: Sewa) -> None:
    ended = sewa("select", "--dry-run", *OUT)
    assert ended.code == 0, ended.err
    assert "wrote page.html" in ended.err
    text = Path("page.html").read_text()
    assert not refreshes(text)
    assert "forward passes" in Page(text).words


@pytest.mark.usefixtures("run_dir")
def test_a_page_that_cannot_be_drawn_does_not_undo_the_run(
    sewa: Sewa, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: object, **__: object) -> str:
        raise ZeroDivisionError("no picture of this")

    monkeypatch.setattr("sewa_cli.present.page.page", fault)
    ended = sewa("select", *OUT)
    assert ended.code == 0, ended.err
    assert "no picture of this" in ended.err
    assert "wrote page.html" not in ended.err
    assert Path("out.safetensors").exists()
    text = Path("page.html").read_text()
    assert not refreshes(text)
    assert "Done, without its page" in Page(text).words


def test_no_page_is_left_running_whoever_forgets_to_end_it(tmp_path: Path) -> None:
    talk = Talk(quiet=True, verbose=False)
    talk.page = LivePage(tmp_path / "page.html", force=False, command=None)
    with talk, talk.stage("working"):
        pass
    text = (tmp_path / "page.html").read_text()
    assert not refreshes(text)
    assert not talk.page.is_done


def test_a_demo_whose_page_is_taken_is_refused_before_it_trains(sewa: Sewa, tmp_path: Path) -> None:
    (tmp_path / "demo.html").write_text("mine")
    ended = sewa("demo", tmp_path)
    assert ended.code == 3
    assert "demo.html: exists; use --force" in ended.error
    assert [path.name for path in tmp_path.iterdir()] == ["demo.html"]


@pytest.mark.usefixtures("run_dir")
def test_a_page_without_pictures_is_a_warning_too(
    sewa: Sewa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sewa_cli.present.page.has_pictures", lambda: False)
    ended = sewa("inspect", "ckpts/", "--html", "page.html")
    assert ended.code == 0, ended.err
    assert "warning: the page is without pictures" in ended.err
    assert not Page(Path("page.html").read_text()).tags["svg"]
