"""`task: huggingface`: every kind end to end, each loss compared with transformers' own."""

import json
import math
import shutil
import socket

import pytest
import torch
import transformers
from helpers.hf_runs import (
    NAMES,
    build,
    load,
    naive_examples,
    naive_loss,
    read_rows,
    text_rows,
    tokenizer,
    train,
    write_images,
    write_model,
    write_rows,
)
from helpers.objectives import metrics_of
from torch import Tensor
from torch.nn import functional as F

from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.objective.model import FlatModel
from sewa_cli.objective.objective import Objective
from sewa_cli.task import load_task
from sewa_cli.task.ready.huggingface import CLASSES

FAST = ("causal-lm", "masked-lm", "sequence-classification")
KINDS = [
    kind if kind in FAST else pytest.param(kind, marks=pytest.mark.breadth)
    for kind in CLASSES
    if "seq2seq" not in kind  # in test_generation_task.py
]


def as_transformers(batch, kind):
    """A batch of ours as transformers wants it: labels where they stand, not shifted.

    Of a causal one, the last target of a row has no place there: its token is not an input.
    """
    inputs = {k: x for k, x in batch.items() if isinstance(x, Tensor) and k != "targets"}
    labels = batch["targets"]
    if kind == "causal-lm":
        labels = torch.cat([torch.full_like(labels[:, :1], -100), labels[:, :-1]], dim=1)
    return {**inputs, "labels": labels}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A run of each kind: model/, data/, ckpts/ and sewa.yaml; made when first asked for."""
    made = {}

    def run(kind):
        if kind not in made:
            made[kind] = make_run(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return run


def make_run(folder, kind, dtype=None):
    write_model(folder / "model", kind, NAMES.get(kind, ()))
    if kind == "image-classification":
        for seed, part in enumerate(("selection", "heldout")):
            rows = write_images(folder / "data" / part, 30, seed)
            rows = [{**row, "image": f"{part}/{row['image']}"} for row in rows]
            write_rows(folder / "data" / f"{part}.jsonl", rows)
    else:
        rows = text_rows()
        write_rows(folder / "data" / "selection.jsonl", rows[:60])
        write_rows(folder / "data" / "heldout.jsonl", rows[60:107])  # the last batch is short
    text = f"""\
        task: huggingface
        args:
          kind: {kind}
          model: model
          selection: data/selection.jsonl
          heldout: data/heldout.jsonl
        checkpoints: ckpts/
        K: 3
        device: cpu
        gumbel: {{iterations: 4}}
    """
    (folder / "sewa.yaml").write_text("".join(f"{line[8:]}\n" for line in text.splitlines()))
    torch.manual_seed(0)
    model = build(kind, folder / "model")
    task = load_task("huggingface", args_of(folder, kind))
    train(
        model,
        [as_transformers(batch, kind) for batch in task.selection_data],
        folder / "ckpts",
        dtype=dtype,
    )
    return folder


def args_of(folder, kind, **others):
    data = {part: folder / "data" / f"{part}.jsonl" for part in ("selection", "heldout")}
    return {"kind": kind, "model": folder / "model", **data, **others}


@pytest.mark.parametrize("kind", KINDS)
def test_select_reports_the_loss_of_the_written_file_as_transformers_computes_it(
    kind, runs, sewa, tmp_path
):
    folder, output = runs(kind), tmp_path / "averaged.safetensors"
    ended = sewa("select", "--config", folder / "sewa.yaml", "-o", output, "--json")
    assert ended.code == 0, ended.err
    average = json.loads(ended.out)["average"]
    if kind == "masked-lm":  # masks are drawn, so the naive twin must be given them
        task = load_task("huggingface", args_of(folder, kind, batch_size=1))
        examples = [as_transformers(batch, kind) for batch in task.heldout_data]
    else:
        examples = naive_examples(folder, kind, "heldout")
    loss, accuracy = naive_loss(load(kind, folder / "model", output), examples, kind)
    assert average["heldout_loss"] == pytest.approx(loss, rel=1e-4)
    name = "token_accuracy" if kind in ("causal-lm", "masked-lm") else "accuracy"
    assert average["metrics"][name] == pytest.approx(accuracy, abs=1e-9)
    if kind in ("causal-lm", "masked-lm"):
        assert average["metrics"]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_score_what_the_models_own_logits_do(kind, runs):
    task = load_task("huggingface", args_of(runs(kind), kind, batch_size=40))
    model = task.build_model().eval()
    parts = task.scoring.parts.list()
    found = task.scoring.score(model, parts)
    rows = []  # by the loss, whether each target of it was found
    for batch in task.selection_data:
        with torch.no_grad():
            outputs = task.predict(model, batch)
        for logits, targets in zip(outputs, batch["targets"], strict=True):
            known = targets.reshape(-1) != -100
            logits, targets = logits.reshape(len(known), -1)[known], targets.reshape(-1)[known]
            losses = F.cross_entropy(logits, targets, reduction="none")
            rows.append((losses, logits.argmax(-1) == targets))
    for score in found:
        count = sum(some.stop - some.start for some in parts[0])
        some, rows = rows[:count], rows[count:]
        parts = parts[1:]
        right = torch.cat([right for _, right in some]).double().mean()
        language = kind in ("causal-lm", "masked-lm")
        expected = {"token_accuracy" if language else "accuracy": float(right)}
        if language:
            expected["perplexity"] = float(torch.cat([x for x, _ in some]).mean().exp())
        if language or kind == "token-classification":
            expected["exact_match"] = sum(bool(right.all()) for _, right in some) / count
        assert score == pytest.approx(expected, rel=1e-5)
    assert not rows


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_does_not_depend_on_the_batches_and_splits_into_rows(kind, runs):
    folder = runs(kind)
    means = []
    for size in (1, 7, 60):
        task = load_task("huggingface", args_of(folder, kind, batch_size=size))
        torch.manual_seed(3)
        model = FlatModel(task.build_model(), torch.device("cpu"))
        units = Objective(model, task.predict, task.loss, task.backward).unit_losses(
            task.selection_data
        )
        assert float(units.rows.mean()) == pytest.approx(units.mean, rel=1e-5)
        means.append(units.mean)
    assert means == pytest.approx([means[0]] * 3, rel=1e-5)


def test_masks_are_15_percent_of_the_words_and_80_10_10(runs):
    folder = runs("masked-lm")
    args = args_of(folder, "masked-lm", selection=folder / "all.jsonl", batch_size=1)
    write_rows(folder / "all.jsonl", [{"text": row["text"]} for row in text_rows() * 5])
    args["limit"] = None
    batches = list(load_task("huggingface", args).selection_data)
    seen = torch.cat([batch["input_ids"][0] for batch in batches])
    targets = torch.cat([batch["targets"][0] for batch in batches])
    chosen = targets != -100
    words = tokenizer(brackets=True)
    special = torch.tensor(sorted(words.all_special_ids))
    assert not torch.isin(targets[chosen], special).any()
    # rows without a target are left out, so the rate is a little above 15 %
    candidates = chosen | ~torch.isin(seen, special)
    assert float(chosen.sum() / candidates.sum()) == pytest.approx(0.155, abs=0.01)
    masked = seen[chosen] == words.mask_token_id
    kept = seen[chosen] == targets[chosen]
    assert float(masked.float().mean()) == pytest.approx(0.8, abs=0.03)
    assert float(kept.float().mean()) == pytest.approx(0.1, abs=0.03)


def test_limit_and_cut_texts_are_reported(runs):
    folder = runs("causal-lm")
    task = load_task("huggingface", args_of(folder, "causal-lm", limit=20, max_length=5))
    notes = "\n".join(task.notes)
    assert "20 of 60 rows for selection, drawn with seed 0; args.limit: 60 takes all" in notes
    assert "rows that its texts make for heldout, drawn with seed 0; args.limit: " in notes
    assert "max_length" not in notes  # nothing of a text is lost
    assert sum(len(batch["targets"]) for batch in task.selection_data) == 20


def test_labels_without_names_in_the_config_are_numbered_in_sorted_order_and_noted(runs, tmp_path):
    folder = runs("sequence-classification")
    write_model(tmp_path / "model", "sequence-classification")  # LABEL_0, LABEL_1
    args = args_of(folder, "sequence-classification", model=tmp_path / "model", batch_size=100)
    task = load_task("huggingface", args)
    assert "labels in sorted order: few=0, many=1" in task.notes
    named = load_task("huggingface", args_of(folder, "sequence-classification", batch_size=100))
    assert "sorted order" not in "".join(named.notes)
    [one], [two] = task.selection_data, named.selection_data
    assert torch.equal(one["targets"], two["targets"])


def test_a_pair_of_texts_and_a_regression(tmp_path):
    config = transformers.AutoConfig.from_pretrained
    write_model(tmp_path / "model", "sequence-classification")
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    settings |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(settings))
    assert config(tmp_path / "model").num_labels == 1
    rows = [{"a": "one two", "b": "three", "score": i / 3} for i in range(9)]
    for name in ("pairs", "more"):
        write_rows(tmp_path / f"{name}.jsonl", rows)
    args = {
        "kind": "sequence-classification",
        "model": tmp_path / "model",
        "selection": tmp_path / "pairs.jsonl",
        "heldout": tmp_path / "more.jsonl",
        "text": "a",
        "text_pair": "b",
        "label": "score",
    }
    task = load_task("huggingface", args)
    model = task.build_model().eval()
    [batch] = task.selection_data
    assert set(batch["token_type_ids"].unique().tolist()) == {0, 1}
    with torch.no_grad():
        theirs = model(**as_transformers(batch, "sequence-classification")).loss
        ours = task.loss(task.predict(model, batch), batch)
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    assert set(metrics_of(task, model, task.selection_data)) == {"mean_absolute_error"}
    for label in ("much", float("nan"), [1.0]):
        write_rows(tmp_path / "pairs.jsonl", [{"a": "one", "b": "two", "score": label}])
        with pytest.raises(TaskError, match=r"row 1: score: .* is not a number"):
            load_task("huggingface", args)


@pytest.mark.parametrize("data", ["data/selection.jsonl", "data/selection"])
def test_images_are_found_from_relative_paths_even_if_the_folder_changes(
    data, runs, monkeypatch, tmp_path
):
    monkeypatch.chdir(runs("image-classification"))
    args = {"kind": "image-classification", "model": "model", "selection": data}
    task = load_task("huggingface", args)
    monkeypatch.chdir(tmp_path)
    assert sum(len(batch["targets"]) for batch in task.selection_data) == 30


def test_nothing_is_asked_of_the_network_and_no_file_is_written(runs, monkeypatch):
    def refuse(*_):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for kind in ("sequence-classification", "image-classification"):
        folder = runs(kind)
        before = sorted(folder.rglob("*"))
        task = load_task("huggingface", args_of(folder, kind))
        task.build_model()
        assert list(task.selection_data)
        assert sorted(folder.rglob("*")) == before


def test_all_faults_in_args_are_reported_together(runs, sewa, tmp_path):
    folder = runs("causal-lm")
    (tmp_path / "sewa.yaml").write_text(
        "task: huggingface\n"
        "args: {kind: causal, model: nowhere, selection: none.jsonl, batchsize: 4, limit: many}\n"
        f"checkpoints: {folder / 'ckpts'}\nK: 3\n"
    )
    ended = sewa("validate", "--config", tmp_path / "sewa.yaml")
    assert ended.code == 2
    assert "args.kind: must be 'causal-lm', 'masked-lm'" in ended.err
    assert f"args.model: {tmp_path / 'nowhere'}: must be a folder with a config.json" in ended.err
    assert f"args.selection: {tmp_path / 'none.jsonl'}: no such file" in ended.err
    assert "args.batchsize: unknown key; did you mean batch_size?" in ended.err
    assert "args.limit: must be a whole number, found 'many'" in ended.err


def first_fault(args):
    with pytest.raises((ConfigError, TaskError)) as caught:
        load_task("huggingface", args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"selection": None}, "args: give `selection` (and `heldout`), or `data`"),
        ({"label": "label"}, "args: kind causal-lm has no label"),
        ({"heldout": "selection"}, "args: `heldout` is the same as `selection`"),
        ({"max_length": 64}, "args.max_length: 64 is more than the model's 32 positions"),
        ({"text": "txt"}, ": no column 'txt'; there are text, label, tokens, tags"),
    ],
)
def test_wrong_args_are_one_line_with_their_place(change, message, runs):
    folder = runs("causal-lm")
    args = args_of(folder, "causal-lm") | change
    if change.get("heldout") == "selection":
        args["heldout"] = folder / "data" / ".." / "data" / "selection.jsonl"
    assert message in first_fault(args)


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("causal-lm", {"text": 5}, "rows.jsonl: row 2: text: must be text, found int"),
        ("causal-lm", {"text": "a\ud800b"}, "rows.jsonl: row 2: text: is not valid Unicode"),
        ("causal-lm", "text", "rows.jsonl: row 2: must be an object with columns"),
        (
            "sequence-classification",
            {"text": "a", "label": "none"},
            "row 2: label: 'none' is not a label; label2id in config.json has few, many",
        ),
        (
            "token-classification",
            {"tokens": ["a", "b"], "tags": ["long"]},
            "rows.jsonl: row 2: 2 tokens, but 1 tags",
        ),
        (
            "image-classification",
            {"image": "none.png", "label": "purple"},
            "rows.jsonl: row 2: label: 'purple' is not a label",
        ),
    ],
)
def test_a_wrong_row_is_named(kind, row, message, runs, tmp_path):
    folder = runs(kind)
    good = read_rows(folder / "data" / "selection.jsonl")[0]
    write_rows(tmp_path / "rows.jsonl", [good, row, good])
    assert message in first_fault(args_of(folder, kind, selection=tmp_path / "rows.jsonl"))


def test_without_transformers_it_says_what_to_install(runs, sewa, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    ended = sewa("validate", "--config", runs("causal-lm") / "sewa.yaml")
    assert ended.code == 4
    assert ended.error == "task: huggingface needs transformers: pip install transformers"


def test_data_is_never_overwritten_by_an_output(runs, sewa, tmp_path):
    shutil.copytree(runs("causal-lm"), tmp_path / "run")
    data = tmp_path / "run" / "data" / "selection.jsonl"
    before = data.read_bytes()
    ended = sewa("select", "--config", tmp_path / "run" / "sewa.yaml", "--report", data, "-f")
    assert ended.code == 3
    assert data.read_bytes() == before
