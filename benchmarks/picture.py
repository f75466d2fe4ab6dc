"""Draw the README's pictures from a fresh demo: `python benchmarks/picture.py docs`.

Trains the demo's network, selects from its checkpoints, and shows how each scores alone on held-out
images, what the averages score, and the weights (demo.png); makes the demo's page (page.html) and,
where Chromium is found, photographs it (page.png). Every number comes from the report.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch
from safetensors.torch import load_file

from sewa_cli.demo import run_demo
from sewa_cli.events import Events
from sewa_cli.present.page import page
from sewa_cli.report.select import Report
from sewa_cli.report.shared import to_json
from sewa_cli.task import load_task


def single_losses(folder: Path, report: Report) -> list[float]:
    """Held-out loss of each checkpoint alone, for the grey dots."""
    task = load_task(str(folder / "task.py"), {})
    model = task.build_model().eval()
    if task.heldout_data is None:
        raise ValueError("the demo has held-out data")
    batches = list(task.heldout_data)
    losses = []
    for candidate in report.candidates:
        model.load_state_dict(load_file(candidate.path))
        with torch.no_grad():
            parts = [(len(b[1]), float(task.loss(task.predict(model, b), b))) for b in batches]
        losses.append(sum(n * loss for n, loss in parts) / sum(n for n, _ in parts))
    return losses


def draw(report: Report, singles: list[float], target: Path) -> None:
    steps = [candidate.step or 0 for candidate in report.candidates]
    chosen = set(report.selected)
    weights = [candidate.weight or 0.0 for candidate in report.candidates]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(8, 5.2), sharex=True, height_ratios=[3, 2], layout="constrained"
    )
    others = [i for i in range(len(steps)) if i not in chosen]
    top.scatter(
        [steps[i] for i in others],
        [singles[i] for i in others],
        s=12,
        c="0.7",
        label="another checkpoint",
    )
    top.scatter(
        [steps[i] for i in sorted(chosen)],
        [singles[i] for i in sorted(chosen)],
        s=[10 + 600 * weights[i] for i in sorted(chosen)],
        marker="D",
        c="black",
        label="a checkpoint of the average, larger with its coefficient",
    )
    rows = {"learned": report.average, **report.references}
    best = next(iter(report.references))
    names = {
        "learned": "average by sewa",
        "last": "last checkpoint",
        "uniform": "mean of all 100",
        best: f"best baseline, {best}",
    }
    styles = ["-", "-.", ":", "--"]
    for (name, scores), style in zip(rows.items(), styles, strict=False):
        loss = scores.heldout_loss or 0.0
        width = 2.2 if name.startswith("learned") else 1.2
        label = f"{names.get(name, name)}: {loss:.3f}"
        top.axhline(loss, ls=style, lw=width, c="black", label=label)
    top.set_yscale("log")
    ticks = [0.1, 0.2, 0.3, 0.5, 1.0]
    top.set_yticks(ticks, [f"{tick:g}" for tick in ticks], minor=False)
    top.set_yticks([], minor=True)
    top.set_ylabel("held-out loss")
    top.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, 1.26), frameon=False)
    bottom.vlines(steps, 0, weights, color="black")
    bottom.set_ylabel("coefficient")
    bottom.set_xlabel("training step")
    bottom.set_ylim(0, None)
    figure.savefig(target, dpi=130)


def photograph(file: Path, target: Path) -> None:
    """Photograph what one sees first, without scrolling far."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    if browser is None:
        print(f"no Chromium is found: {target} stays as it is")
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=browser)
        tab = found.new_page(viewport={"width": 1120, "height": 1330}, color_scheme="light")
        tab.goto(file.resolve().as_uri())
        tab.screenshot(path=target)
        found.close()


def main(docs: Path) -> None:
    torch.set_num_threads(1)
    events = Events()
    events.command = "sewa demo"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "demo"
        report = run_demo(folder, 0, events).report
        draw(report, single_losses(folder, report), docs / "demo.png")
    # without the folder that it was made in
    text = to_json(report).replace(f"{temporary}/", "").replace(str(Path.cwd()), "")
    shown = Report.model_validate_json(text)
    (docs / "page.html").write_text(page(shown, "demo/demo.report.json"))
    photograph(docs / "page.html", docs / "page.png")
    for name, scores in {"learned": report.average, **report.references}.items():
        print(f"{name:>8}  held-out loss {scores.heldout_loss:.4f}  {scores.metrics}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
