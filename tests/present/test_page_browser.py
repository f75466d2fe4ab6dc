"""The page in a real browser: Debian's Chromium, driven by Playwright; axe-core looks at contrast.

Where there is no browser these tests say so and are left out; `make test-browser` installs it.
"""

import os
import shutil
from pathlib import Path

import pytest
from helpers.pages import EVIL, evil, many_checkpoints, plain_page, raw, report

from sewa_cli.present.page import page

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
AXE = ROOT / ".venv" / "browser" / "node_modules" / "axe-core" / "axe.min.js"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
WIDE, NARROW = 1400, 360
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def browser():
    if FOUND is None:
        pytest.skip("no browser is found: `make test-browser` installs Chromium")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=FOUND)
        yield found
        found.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


def written(folder, name):
    """A page on the disk, made when it is first asked for."""
    target = folder / f"{name}.html"
    if not target.exists():
        if name == "evil":
            text = page(report(evil(raw("compare"))), EVIL)
        elif name == "long":
            text = page(report(many_checkpoints()))
        else:
            text = plain_page(name)
        target.write_text(text)
    return target


class Tab:
    """A page that is open, and all that it complained about or asked for."""

    def __init__(self, browser, file, width=WIDE, **options):
        size = {"width": width, "height": 900}
        self._context = browser.new_context(viewport=size, **options)
        self.page = self._context.new_page()
        self.complaints = []
        self.asked = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._context.close()

    def ask(self, script):
        return self.page.evaluate(script)


LATER = [pytest.param(name, marks=pytest.mark.breadth) for name in ("inspect", "evaluate")]


@pytest.mark.parametrize("name", ["select", "compare", "evil", "long", *LATER])
def test_it_complains_of_nothing_asks_for_nothing_and_fits_every_width(browser, folder, name):
    file = written(folder, name)
    with Tab(browser, file) as tab:
        assert tab.ask(OVERFLOW) <= 0
        tab.page.set_viewport_size({"width": NARROW, "height": 740})
        assert tab.ask(OVERFLOW) <= 0
        unnamed = "[...document.querySelectorAll('svg')].filter(s => !s.getAttribute('aria-label'))"
        assert tab.ask(f"{unnamed}.length") == 0
        assert tab.ask("document.querySelectorAll('svg[role=img]').length") > 0
        assert not tab.complaints
        assert tab.asked == [file.as_uri()]


def test_pointing_at_a_checkpoint_says_which_it_is(browser, folder):
    with Tab(browser, written(folder, "select")) as tab:
        said = tab.ask("""() => {
            const hints = [...document.querySelectorAll(".hints circle")];
            const hint = hints.findLast((one) => one.textContent.startsWith("step"));
            hint.scrollIntoView({block: "center"});
            const box = hint.getBoundingClientRect();
            const x = box.x + box.width / 2, y = box.y + box.height / 2;
            return document.elementFromPoint(x, y).querySelector("title").textContent;
        }""")
        last = raw("select")["candidates"][-1]
        assert said.startswith(f"step {last['step']}, coefficient ")


def test_dark_is_dark_light_is_light_and_paper_is_white(browser, folder):
    back = "getComputedStyle(document.body).backgroundColor"
    for scheme in ("light", "dark"):
        with Tab(browser, written(folder, "select"), color_scheme=scheme) as tab:
            shade = sum(map(int, tab.ask(back).strip("rgb()").split(",")))
            assert (shade < 150) == (scheme == "dark")
            tab.page.emulate_media(media="print")
            assert tab.ask(back) == "rgb(255, 255, 255)"
            assert tab.ask("getComputedStyle(document.querySelector('nav')).display") == "none"
            assert tab.page.pdf().startswith(b"%PDF")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["select", "compare", *LATER])
def test_axe_finds_no_fault_in_contrast_names_and_structure(browser, folder, name, scheme):
    if not AXE.exists():
        pytest.skip("axe-core is not here: `make test-browser` fetches it")
    file = written(folder, name)
    # axe is put into the page, which its own policy would not let happen
    with Tab(browser, file, color_scheme=scheme, bypass_csp=True) as tab:
        tab.ask("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        tab.page.add_script_tag(path=str(AXE))
        found = tab.ask("axe.run({resultTypes: ['violations']})")
        faults = [
            f"{one['id']}: {one['help']}: {[node['html'][:120] for node in one['nodes'][:3]]}"
            for one in found["violations"]
        ]
        assert not faults
        assert {"color-contrast", "svg-img-alt"} <= {one["id"] for one in found["passes"]}


def test_the_example_shows_the_demos_answer(browser):
    with Tab(browser, ROOT / "docs" / "images" / "page.html") as tab:
        assert "vs best baseline" in tab.page.locator(".answer").inner_text()
        assert tab.ask(OVERFLOW) <= 0
        assert not tab.complaints
