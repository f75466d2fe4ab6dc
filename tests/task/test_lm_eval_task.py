"""`task: lm-eval` and `args.lm_eval`: the numbers of the harness's own run."""

import json
import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import yaml

from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.task import load_task

SAMPLE = Path(__file__).parents[2] / "sample_configs" / "lm_eval"


@pytest.fixture
def work(once, tmp_path, monkeypatch):
    """A copy of the sample with six checkpoints, as the working directory."""

    def make(folder):
        shutil.copytree(SAMPLE, folder, dirs_exist_ok=True)
        spec = spec_from_file_location("train_lm_eval", folder / "train.py")
        train = module_from_spec(spec)
        spec.loader.exec_module(train)
        train.write_data("selection", 60, seed=-1)
        train.write_data("heldout", 80, seed=-2)
        train.train(folder / "ckpts", steps=90, every=15)

    shutil.copytree(once("lm_eval", make), tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return tmp_path / "work"


def by_the_harness(folder, *tasks, names=("acc", "acc_norm"), **options):
    """Return what the harness itself finds in a folder, from its files."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    torch.manual_seed(5)
    manager = TaskManager(include_path="tasks", include_defaults=False)
    settings = {"device": "cpu", "batch_size": 16, "bootstrap_iters": 0, "log_samples": False}
    found = simple_evaluate(
        "hf",
        model_args={"pretrained": str(folder)},
        tasks=list(tasks),
        task_manager=manager,
        **settings,
        **options,
    )["results"]
    return {task: {name: found[task][f"{name},none"] for name in names} for task in tasks}


@pytest.mark.usefixtures("work")
def test_the_reported_metric_is_that_of_lm_eval_on_the_written_folder(sewa):
    ended = sewa("select", "--metric", "acc", "--budget", "200", "-o", "best", "--json")
    assert ended.code == 0, ended.err
    assert "%|" not in ended.err  # no bars of the harness
    assert "WARNING" not in ended.err
    report = json.loads(ended.out)
    [contest] = [found for found in report["findings"] if found["kind"] == "contest"]
    written = next(iter(contest["scores"].values()))
    found = by_the_harness("best", "largest_heldout")["largest_heldout"]
    assert {"acc": written["heldout"], **written["others"]} == found
    assert contest["evaluations"] <= 200


@pytest.mark.breadth
@pytest.mark.usefixtures("work")
def test_evaluate_and_compare_show_the_numbers_of_lm_eval(sewa):
    found = by_the_harness("ckpts/checkpoint-45", "largest_heldout")["largest_heldout"]
    ended = sewa("evaluate", "ckpts/checkpoint-45", "--json")
    [file] = json.loads(ended.out)["files"]
    assert file["metrics"] == found
    ended = sewa("compare", "--metric", "acc", "--methods", "last,uniform", "--json")
    assert ended.code == 0, ended.err
    row, found = json.loads(ended.out)["rows"][0], by_the_harness(NEWEST, "largest_heldout")
    found = found["largest_heldout"]
    assert {"acc": row["score"]["heldout"], **row["metrics"]} == found


@pytest.mark.breadth
def test_two_workers_and_a_cache_change_nothing(work, sewa):
    command = ["select", "--metric", "acc", "--budget", "120", "--quiet", "--cache", "kept"]
    for name, more in (("one", []), ("again", []), ("two", ["--workers", 2, "--cache", "other"])):
        ended = sewa(*command, "-o", name, *more)
        assert ended.code == 0, ended.err
    weights = [(work / name / "model.safetensors").read_bytes() for name in ("one", "again", "two")]
    assert weights[0] == weights[1] == weights[2]
    assert any((work / "kept").iterdir())


@pytest.mark.breadth
def test_several_tasks_are_one_mean_over_documents_and_each_its_own(work, sewa):
    (work / "sewa.yaml").write_text(
        "task: lm-eval\n"
        "args: {tasks: [largest, largest_heldout], include_path: tasks, limit: 50}\n"
        "checkpoints: ckpts/\n"
    )
    ended = sewa("evaluate", "ckpts/checkpoint-45", "--json")
    [file] = json.loads(ended.out)["files"]
    found = by_the_harness("ckpts/checkpoint-45", "largest", "largest_heldout", limit=50)
    for task, metrics in found.items():
        for name, value in metrics.items():
            assert file["metrics"][f"{task}/{name}"] == value
    both = [metrics["acc"] for metrics in found.values()]
    assert file["metrics"]["acc"] == pytest.approx(sum(both) / 2)


@pytest.mark.breadth
def test_the_harness_stands_next_to_a_loss(work, sewa):
    rows = [json.loads(line) for line in (work / "data/selection.jsonl").read_text().splitlines()]
    texts = [f"{row['question']} {row['choices'][row['answer']]}" for row in rows]
    (work / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    settings = {"kind": "causal-lm", "data": "texts.jsonl"}
    settings["lm_eval"] = {"tasks": ["largest"], "heldout": ["largest_heldout"]}
    settings["lm_eval"]["include_path"] = "./tasks"
    config = {"task": "huggingface", "args": settings, "checkpoints": "ckpts/"}
    (work / "sewa.yaml").write_text(yaml.safe_dump(config))
    ended = sewa("select", "--metric", "acc", "--budget", "200", "-o", "best", "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    assert report["average"]["heldout_loss"] > 0
    [contest] = [found for found in report["findings"] if found["kind"] == "contest"]
    assert contest["incumbent"] == "by loss"
    written = next(iter(contest["scores"].values()))["heldout"]
    assert written == by_the_harness("best", "largest_heldout")["largest_heldout"]["acc"]
    settings["lm_eval"]["limt"] = 3
    (work / "sewa.yaml").write_text(yaml.safe_dump(config))
    ended = sewa("validate")
    assert ended.code == 2
    assert "args.lm_eval.limt: unknown key; did you mean limit?" in ended.error


@pytest.mark.breadth
def test_answers_that_are_generated_are_judged_by_every_filter(work):
    (work / "tasks" / "written.yaml").write_text(GENERATING)
    task = load_task("lm-eval", {"tasks": ["written"], "include_path": "tasks", "model": NEWEST})
    assert task.scoring is not None
    model = task.build_model()
    found = task.scoring.score(model, task.scoring.parts.list()[:3])
    assert [sorted(one) for one in found] == [["exact_match,first", "exact_match,plain"]] * 3


NEWEST = "ckpts/checkpoint-90"
GENERATING = """\
include: largest.yaml
task: written
output_type: generate_until
doc_to_choice: null
doc_to_target: "= {{choices[answer]}}"
generation_kwargs: {until: ["is"], max_gen_toks: 2}
metric_list: [{metric: exact_match}]
filter_list:
  - {name: first, filter: [{function: regex, regex_pattern: "(\\\\d+)"}, {function: take_first}]}
  - {name: plain, filter: [{function: take_first}]}
"""


@pytest.mark.breadth
@pytest.mark.usefixtures("work")
def test_a_task_that_there_is_not_is_named():
    args = {"tasks": ["largst"], "include_path": "tasks", "model": NEWEST}
    with pytest.raises(ConfigError, match="lm-eval has no largst; did you mean largest"):
        load_task("lm-eval", args)
    Path("data/selection.jsonl").unlink()
    with pytest.raises(TaskError, match=r"args.tasks: requests .*: Unable to find .*selection"):
        load_task("lm-eval", args | {"tasks": ["largest"]})


@pytest.mark.breadth
def test_a_perplexity_is_that_of_all_documents_together(work, sewa):
    (work / "tasks" / "rolling.yaml").write_text(ROLLING)
    args = "{tasks: [rolling], include_path: tasks}"
    (work / "sewa.yaml").write_text(f"task: lm-eval\nargs: {args}\ncheckpoints: ckpts/\n")
    ended = sewa("evaluate", NEWEST, "--json")
    assert ended.code == 0, ended.err
    assert "%|" not in ended.err
    [file] = json.loads(ended.out)["files"]
    found = by_the_harness(NEWEST, "rolling", names=("word_perplexity", "bits_per_byte"))["rolling"]
    assert file["metrics"] == pytest.approx(found, rel=1e-6)


ROLLING = """\
include: largest.yaml
task: rolling
output_type: loglikelihood_rolling
doc_to_choice: null
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
