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
            train.train(folder / "ckpts", steps=40, every=10)

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
    [file] = json.loads(sewa("evaluate", "ckpts/checkpoint-40", "--json").out)["files"]
    tokenizer = AutoTokenizer.from_pretrained("ckpts/checkpoint-40")
    model = AutoModelForSeq2SeqLM.from_pretrained("ckpts/checkpoint-40")
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


def make_speech_run(folder):
    """Make recordings of tones, three checkpoints of a Whisper that was never trained, and YAML."""
    import wave

    import numpy as np
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    words = ["<pad>", "<s>", "</s>", *"abcdefg"]
    drawn = np.random.default_rng(0)
    for part in ("selection", "heldout"):
        rows = []
        for n in range(12):
            tones = drawn.integers(0, 7, 4)
            with wave.open(str(folder / f"{part}-{n}.wav"), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(16000)
                time = np.arange(4000) / 16000
                heard = [np.sin(2 * np.pi * 200 * (1 + tone) * time) for tone in tones]
                file.writeframes((np.concatenate(heard) * 20000).astype("<i2").tobytes())
            said = " ".join(words[3 + tone] for tone in tones)
            rows.append({"audio": f"{part}-{n}.wav", "completion": said})
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **ends)
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 16}
    sizes |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_source_positions": 50}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    for step in range(1, 5):
        torch.manual_seed(step)
        config = WhisperConfig(
            vocab_size=len(words), max_target_positions=16, init_std=0.5, **sizes, **heads, **ids
        )
        model = WhisperForConditionalGeneration(config)
        model.generation_config.update(suppress_tokens=None, begin_suppress_tokens=None)
        place = folder / "ckpts" / f"checkpoint-{step}"
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
        WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(place)
    args = {"kind": "speech-seq2seq", "selection": "selection.jsonl", "heldout": "heldout.jsonl"}
    args |= {"generate": {"max_new_tokens": 6}, "batch_size": 5}
    config = {"task": "huggingface", "args": args, "checkpoints": "ckpts/"}
    (folder / "sewa.yaml").write_text(yaml.safe_dump(config))


@pytest.mark.breadth
def test_a_speech_model_is_chosen_by_the_word_error_rate_of_jiwer(
    once, tmp_path, monkeypatch, sewa
):
    from transformers import AutoFeatureExtractor, AutoModelForSpeechSeq2Seq, AutoTokenizer

    from sewa_cli.task.ready.speech import features_of

    folder = shutil.copytree(once("speech", make_speech_run), tmp_path / "work")
    monkeypatch.chdir(folder)
    ended = sewa("select", "--metric", "wer", "--budget", 40, "-o", "best", "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    model = AutoModelForSpeechSeq2Seq.from_pretrained("best").eval()
    tokenizer = AutoTokenizer.from_pretrained("best")
    extractor = AutoFeatureExtractor.from_pretrained("best")
    found, total, count = [], 0.0, 0
    rows = rows_of(folder / "heldout.jsonl")
    for row in rows:
        heard = features_of(extractor, [row["audio"]])
        tokens = model.generate(input_features=heard, max_new_tokens=6, do_sample=False)
        found += tokenizer.batch_decode(tokens, skip_special_tokens=True)
        labels = tokenizer(row["completion"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            total += float(model(input_features=heard, labels=labels).loss) * labels.numel()
        count += labels.numel()
    expected = by_the_libraries(found, [row["completion"] for row in rows])
    assert written_scores(report) == expected
    assert report["average"]["heldout_loss"] == pytest.approx(total / count, rel=1e-5)
