"""`kind: seq2seq-lm` and `args.generate`: the numbers of transformers, sacrebleu and jiwer."""

import json
import shutil
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
import yaml

SAMPLES = Path(__file__).parents[2] / "sample_configs"


@pytest.fixture
def sample(once, tmp_path, monkeypatch):
    """sample("translation") → a copy with four checkpoints, as the working directory."""

    def made(name):
        def make(folder):
            shutil.copytree(SAMPLES / name, folder, dirs_exist_ok=True)
            spec = spec_from_file_location(f"train_{name}", folder / "train.py")
            train = module_from_spec(spec)
            spec.loader.exec_module(train)
            train.write_data("selection", 40, seed=-1)
            train.write_data("heldout", 50, seed=-2)
            train.train(folder / "ckpts", steps=80, every=20)

        shutil.copytree(once(f"generated_{name}", make), tmp_path / "work")
        monkeypatch.chdir(tmp_path / "work")
        return tmp_path / "work"

    return made


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def written_scores(report):
    [contest] = [found for found in report["findings"] if found["kind"] == "contest"]
    written = next(iter(contest["scores"].values()))
    return {contest["metric"]: written["heldout"], **written["others"]}


def by_the_libraries(found, wanted):
    import jiwer
    import sacrebleu

    return {
        "bleu": sacrebleu.corpus_bleu(found, [wanted]).score,
        "chrf": sacrebleu.corpus_chrf(found, [wanted]).score,
        "wer": jiwer.wer(wanted, found),
        "cer": jiwer.cer(wanted, found),
        "exact_match": sum(map(str.__eq__, found, wanted)) / len(wanted),
    }


def test_a_corpus_score_is_that_of_sacrebleu_and_jiwer_on_the_written_model(sample, sewa):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    folder = sample("translation")
    ended = sewa("select", "--metric", "chrf", "--budget", 60, "-o", "best", "--json")
    assert ended.code == 0, ended.err
    tokenizer = AutoTokenizer.from_pretrained("best")
    model = AutoModelForSeq2SeqLM.from_pretrained("best")
    found, rows = [], rows_of(folder / "data" / "heldout.jsonl")
    for row in rows:
        inputs = tokenizer(row["source"], return_tensors="pt")
        tokens = model.generate(inputs["input_ids"], max_new_tokens=12)
        found += tokenizer.batch_decode(tokens, skip_special_tokens=True)
    expected = by_the_libraries(found, [row["target"] for row in rows])
    assert 0 < expected["chrf"] < 100
    assert written_scores(json.loads(ended.out)) == expected
    [file] = json.loads(sewa("evaluate", "best", "--metric", "chrf", "--json").out)["files"]
    assert expected.items() <= file["metrics"].items()


@pytest.mark.breadth
def test_the_loss_of_a_translation_is_that_of_transformers(sample, sewa):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    folder = sample("translation")
    [file] = json.loads(sewa("evaluate", "ckpts/checkpoint-80", "--json").out)["files"]
    tokenizer = AutoTokenizer.from_pretrained("ckpts/checkpoint-80")
    model = AutoModelForSeq2SeqLM.from_pretrained("ckpts/checkpoint-80")
    total = count = 0
    for row in rows_of(folder / "data" / "heldout.jsonl"):
        labels = tokenizer(text_target=row["target"], return_tensors="pt")["input_ids"]
        inputs = tokenizer(row["source"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            total += float(model(input_ids=inputs, labels=labels).loss) * labels.numel()
        count += labels.numel()
    assert file["heldout_loss"] == pytest.approx(total / count, rel=1e-5)


@pytest.mark.breadth
def test_a_causal_model_completes_its_prompts(sample, sewa):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = sample("lm_eval")
    for part in ("selection", "heldout"):
        rows = rows_of(folder / "data" / f"{part}.jsonl")
        pairs = [
            {"prompt": r["question"], "completion": f" {r['choices'][r['answer']]}"} for r in rows
        ]
        text = "".join(json.dumps(pair) + "\n" for pair in pairs)
        (folder / f"{part}.jsonl").write_text(text)
    args = {"kind": "causal-lm", "selection": "selection.jsonl", "heldout": "heldout.jsonl"}
    args["generate"] = {"max_new_tokens": 1}
    config = {"task": "huggingface", "args": args, "checkpoints": "ckpts/"}
    (folder / "sewa.yaml").write_text(yaml.safe_dump(config))
    ended = sewa("select", "--metric", "wer", "--budget", 60, "-o", "best", "--json")
    assert ended.code == 0, ended.err
    tokenizer = AutoTokenizer.from_pretrained("best")
    model = AutoModelForCausalLM.from_pretrained("best")
    found = []
    for pair in pairs:
        inputs = tokenizer(pair["prompt"], return_tensors="pt")["input_ids"]
        tokens = model.generate(inputs, max_new_tokens=1, do_sample=False)
        found.append(tokenizer.decode(tokens[0, inputs.shape[1] :], skip_special_tokens=True))
    wrong = sum(
        one.strip() != pair["completion"].strip() for one, pair in zip(found, pairs, strict=True)
    )
    assert written_scores(json.loads(ended.out))["wer"] == wrong / len(pairs)
    args["generate"] = {"max_new_token": 1}
    (folder / "sewa.yaml").write_text(yaml.safe_dump(config))
    ended = sewa("validate")
    assert "args.generate: generate() has no max_new_token" in ended.error
