"""The report says what happened, fits its schema, and is enough to build the file again."""

from pathlib import Path

import pytest
from helpers.tiny import WEIGHTS, finding, report_of

from sewa_cli.methods.fixed import baselines


@pytest.fixture
def reported(run_dir, sewa):
    ended = sewa("select", "-o", "out.safetensors")
    assert ended.code == 0, ended.err
    return report_of(run_dir / "out.report.json")


def test_the_report_names_every_candidate_and_what_was_chosen(reported):
    candidates = reported["candidates"]
    assert [c["index"] for c in candidates] == list(range(12))
    assert [c["step"] for c in candidates] == list(range(10, 130, 10))
    assert len(reported["selected"]) == 4
    assert reported["selected_paths"] == [candidates[i]["path"] for i in reported["selected"]]
    assert reported["selected_steps"] == [candidates[i]["step"] for i in reported["selected"]]
    s = finding(reported, "mask")["probabilities"]
    chosen = {s[i] for i in reported["selected"]}
    others = {s[c["index"]] for c in candidates if c["index"] not in reported["selected"]}
    assert min(chosen) >= max(others)


def test_the_report_counts_the_cost(reported):
    # 3 batches of selection and 3 of held-out data. The simple averages on the first, the best of
    # them, `last` and `uniform` on the second, the average on both; 8 iterations × 2 samples
    simple = len(baselines(12, 4))
    assert len(reported["simple"]) == simple
    assert len(reported["references"]) == 3
    assert reported["cost"]["forward_passes"] == 3 * simple + 3 * 3 + (3 + 3) + 8 * 2
    assert reported["cost"]["backward_passes"] == 8 * 2
    # all 12 into W, and the 4 chosen twice: to be evaluated, to be written
    assert reported["cost"]["bytes_read"] == (12 + 2 * 4) * WEIGHTS
    assert reported["cost"]["peak_memory_bytes"] > 10**7
    assert len(finding(reported, "history")["values"]) == 8
    assert reported["selection_rows"] == reported["heldout_rows"] == 300
    assert reported["config"]["solvers"]["gumbel"]["iterations"] == 8
    assert reported["config"]["solvers"]["gumbel"]["temperature"] == 0.5


def test_apply_gives_the_same_bytes(reported, run_dir, sewa):
    assert reported["recipe"]["replaced"] is None
    ended = sewa("apply", "out.report.json", "-o", "again.safetensors")
    assert ended.code == 0, ended.err
    assert (run_dir / "again.safetensors").read_bytes() == (
        run_dir / "out.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("change", ["size", "hash", "gone"])
def test_apply_refuses_when_an_input_has_changed(reported, sewa, change):
    victim = Path(reported["selected_paths"][1])
    content = victim.read_bytes()
    if change == "gone":
        victim.unlink()
    else:
        victim.write_bytes(content + b" " if change == "size" else content[:-1] + b"\x7f")
    ended = sewa("apply", "out.report.json", "-o", "again.safetensors")
    assert ended.code == 3
    assert victim.name in ended.error
    assert {"size": "bytes", "hash": "SHA-256", "gone": "not found"}[change] in ended.error
    assert not Path("again.safetensors").exists()


@pytest.mark.parametrize("text", ["", "{}", "not json", '{"schema_version": 99}'])
def test_apply_refuses_what_is_no_report(run_dir, sewa, text):
    (run_dir / "odd.json").write_text(text)
    ended = sewa("apply", "odd.json", "-o", "again.safetensors")
    assert ended.code == 3
    assert "odd.json: not a report of sewa" in ended.error
