"""Every method in the paper's three settings: `python benchmarks/quality`, tables in Markdown.

Trains what is not trained yet, runs what has not been run, then prints the tables and leaves
results.json and quality.png in the folder (quality-dir/). It takes hours, and may be
stopped and started again at any time. It needs `make data`. Of the study of regret, what other
machines have done is kept in regret.json beside this file, and not done again.

    python benchmarks/quality                            everything
    python benchmarks/quality --settings text --jobs 2   one setting, two processes
    python benchmarks/quality --studies methods windows  some of the studies
    python benchmarks/quality --tables                   only what there is, nothing new
    python benchmarks/quality --studies regret --keep    the rest of one, and keep it for others
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from claims import counted, findings, gains, summary
from pictures import draw
from plan import REPORTED, SETTINGS, STUDIES, TUNING, Job, Setting, regret
from regret import keep, left_to_do, load_units
from regret import tables as regret_tables
from running import Failed, run_all
from studies import (
    Table,
    auto_table,
    draws_table,
    load_curves,
    overfitting_table,
    windows_table,
)
from tables import Results, fill, full_table, learned_against, load, markdown, paper_table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("quality-dir"))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--seeds", nargs="+", type=int, help="other training runs than planned")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, a core each")
    parser.add_argument("--again", action="store_true", help="what regret.json has, too")
    parser.add_argument("--keep", action="store_true", help="put what is done into regret.json")
    parser.add_argument("--tables", action="store_true", help="run nothing")
    parser.add_argument("--into", type=Path, nargs="+", default=[], help="pages to fill, at marks")
    asked = parser.parse_args(arguments)
    settings = [SETTINGS[name] for name in asked.settings]
    if not asked.tables:
        work = [
            (setting, seed, job)
            for study in asked.studies
            for seed in asked.seeds or STUDIES[study][1]
            for setting in settings
            for job in planned(study, setting, seed, asked.again)
        ]
        try:
            run_all(asked.folder, work, asked.jobs)
        except Failed as failed:
            sys.exit(str(failed))
    if asked.keep:
        keep(load_units(asked.folder, settings, asked.seeds or REPORTED))
    tables = report(asked.folder, settings, asked.seeds or REPORTED, asked.seeds or TUNING)
    fill(asked.into, tables)


def planned(study: str, setting: Setting, seed: int, again: bool) -> Iterable[Job]:
    if study != "regret":
        return STUDIES[study][0](setting)
    return regret(setting, seed) if again else left_to_do(setting, seed)


def report(
    folder: Path, settings: Sequence[Setting], reported: Sequence[int], tuned: Sequence[int]
) -> dict[str, Table]:
    found = load(folder, settings, reported)
    results = Results(found, settings)
    tables: dict[str, Table] = {}
    for what, title in (
        ("metric", "the metric, more is better"),
        ("heldout_loss", "held-out loss"),
    ):
        tables[f"The paper's table: {title}"] = paper_table(results, what)
        for setting in settings:
            tables[f"{setting.name}, every method: {title}"] = full_table(results, setting, what)
        for ours in ("sewa", "sewa linear", "sewa auto"):
            rows = [r for s in settings for r in learned_against(results, s, what, ours)]
            K = "K chosen" if ours == "sewa auto" else "K=10"
            tables[f"{ours}, {K}, against others: {title}"] = rows
        tables[f"The paper's claims: {title}"] = summary(findings(results, what))
        tables[f"Gains of ten chosen: {title}"] = gains(results, what)
    by_loss, by_metric = (findings(results, what) for what in ("heldout_loss", "metric"))
    tables["The paper's claims, counted"] = counted(by_loss, by_metric)
    tables["What `--K auto` took"] = auto_table(folder, settings, reported)
    for setting in settings:
        tables[f"{setting.name}: over-fitting"] = overfitting_table(found, setting)
    if units := load_units(folder, settings, reported):
        tables |= regret_tables(units)
    tables["One run, other rows each time"] = draws_table(folder, settings, tuned[:1])
    curves = [c for s in settings if (c := load_curves(folder, s, reported)) is not None]
    for curve in curves:
        tables[f"{curve.setting.name}: windows, the metric"] = windows_table(curve)
    for title, rows in tables.items():
        if rows:
            print(f"### {title}\n\n{markdown(rows)}\n", flush=True)
    kept = {title: rows for title, rows in tables.items() if rows}
    if not kept or len(settings) < len(SETTINGS):
        return tables  # a part is printed; files are of the whole
    folder.mkdir(parents=True, exist_ok=True)  # there is none where only kept units are shown
    (folder / "results.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    if any(results.methods(setting) for setting in settings):
        draw(results, folder / "quality.png")
    return tables


if __name__ == "__main__":
    main()
