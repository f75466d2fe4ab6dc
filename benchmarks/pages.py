"""The size and cost of pages, for docs/how-to/reports.md: `python benchmarks/pages.py`.

The largest that are still drawn, made of reports of a tiny real run that are blown up: their size,
seconds of one processor to make them, and seconds until Chromium shows them, where one is found.
`--into DIR` keeps them.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers.pages import many_checkpoints, many_rows, raw, report

from sewa_cli.present.page import page

Content = dict[str, Any]


def inspected(k: int) -> Content:
    found = raw("inspect")
    first = found["checkpoints"][3]
    found["checkpoints"] = [
        {**first, "path": f"runs/model/checkpoint-{50 * i}.safetensors", "step": 50 * i}
        for i in range(k)
    ]
    return found


def evaluated(files: int) -> Content:
    found = raw("evaluate")
    found["files"] = [
        {**found["files"][i % 3], "path": f"runs/checkpoint-{50 * i}.safetensors", "step": 50 * i}
        for i in range(files)
    ]
    return found


def compared(methods: int, k: int) -> Content:
    found = many_rows(methods)
    found["candidates"] = many_checkpoints(k)["candidates"]
    found["k"] = k
    for n, row in enumerate(found["rows"]):
        row["coefficients"] = [[(i * (n + 1)) % 97 / 97 for i in range(k)]]
    return found


CASES: dict[str, Callable[[], Content]] = {
    "`select`, 12 checkpoints": lambda: raw("select"),
    "`select`, 1,000 checkpoints": lambda: many_checkpoints(1000),
    "`select`, 3,000 checkpoints": lambda: many_checkpoints(3000),
    "`compare`, 15 methods × 4 K": lambda: many_rows(),
    "the same, 1,000 checkpoints": lambda: compared(15, 1000),
    "`compare`, 240 rows": lambda: many_rows(60),
    "`compare`, 1,000 rows": lambda: many_rows(250),
    "`inspect`, 3,000 checkpoints": lambda: inspected(3000),
    "`evaluate`, 3,000 files": lambda: evaluated(3000),
}


def shown(file: Path, browser: Any) -> float | None:
    """Seconds until it is laid out and painted."""
    if browser is None:
        return None
    tab = browser.new_page(viewport={"width": 1400, "height": 900})
    began = time.perf_counter()
    tab.goto(file.resolve().as_uri(), timeout=300_000)
    tab.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))")
    took = time.perf_counter() - began
    tab.close()
    return took


def main(into: Path) -> None:
    for warm in ("select", "compare", "inspect", "evaluate"):  # the runs, matplotlib's font
        page(report(raw(warm)))
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    driver = browser = None
    if chromium is not None:
        from playwright.sync_api import sync_playwright

        driver = sync_playwright().start()
        browser = driver.chromium.launch(executable_path=chromium)
    print("| page | MB | made in, s | shown in, s |\n|---|---|---|---|")
    for n, (name, make) in enumerate(CASES.items()):
        found = report(make())
        began = time.process_time()
        text = page(found, "run.report.json")
        made = time.process_time() - began
        file = into / f"{n}.html"
        file.write_text(text)
        took = shown(file, browser)
        seen = "–" if took is None else f"{took:.1f}"
        print(f"| {name} | {len(text.encode()) / 1e6:.2f} | {made:.1f} | {seen} |", flush=True)
    if browser is not None and driver is not None:
        browser.close()
        driver.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--into", type=Path)
    asked = parser.parse_args()
    if asked.into is not None:
        asked.into.mkdir(exist_ok=True)
        main(asked.into)
    else:
        with tempfile.TemporaryDirectory() as place:
            main(Path(place))
