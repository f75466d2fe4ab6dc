"""Tiny transformers runs, made offline: a folder with config and tokenizer, data, checkpoints."""

from __future__ import annotations

import inspect
import json
import random
import textwrap
import types
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sewa_cli.callbacks import save_weights
from sewa_cli.task.ready.huggingface import CLASSES

if TYPE_CHECKING:
    import transformers

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = 300
TINY: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT: dict[str, Any] = {
    **TINY,
    "intermediate_size": 16,
    "vocab_size": WORDS,
    "max_position_embeddings": 32,
}
BERT |= {"pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LLAMA: dict[str, Any] = {
    **TINY,
    "vocab_size": WORDS,
    "intermediate_size": 16,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
COLOURS = ["blue", "green", "red"]
NAMES = {
    "sequence-classification": ["few", "many"],
    "token-classification": ["short", "long"],  # not in sorted order
    "image-classification": COLOURS,
}
Batch = dict[str, Tensor]


def sentences() -> list[str]:
    """Real text that is always at hand: the docstrings of the standard library."""
    texts = []
    for module in (json, random, inspect, types, textwrap):
        members = (getattr(module, name) for name in sorted(dir(module)))
        texts += [inspect.getdoc(member) or "" for member in members if callable(member)]
    lines = dict.fromkeys(line.strip() for text in texts for line in text.splitlines())
    return [line for line in lines if len(line.split()) > 2][:300]


def tokenizer(*, brackets: bool) -> transformers.PreTrainedTokenizerFast:
    """Trained on the spot; with [CLS] and [SEP] around every text if `brackets`."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    inner = Tokenizer(models.BPE(unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=WORDS, special_tokens=SPECIAL, show_progress=False)
    inner.train_from_iterator(sentences(), trainer)
    if brackets:
        inner.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    named = dict(zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL, strict=True))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"][
            :: 1 if brackets else 2
        ],
        **{f"{name}_token": token for name, token in named.items()},
    )


def config_of(kind: str, classes: Sequence[str] = ()) -> transformers.PreTrainedConfig:
    import transformers

    names: dict[str, Any] = {"id2label": dict(enumerate(classes))} if classes else {}
    names |= {"label2id": {c: i for i, c in enumerate(classes)}} if classes else {}
    if kind == "causal-lm":
        return transformers.GPT2Config(
            vocab_size=WORDS,
            n_positions=32,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=2,
            eos_token_id=3,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    if kind == "image-classification":
        return transformers.ViTConfig(
            **TINY, intermediate_size=16, image_size=8, patch_size=4, **names
        )
    return transformers.BertConfig(**BERT, **names)


def write_model(folder: Path, kind: str, classes: Sequence[str] = ()) -> None:
    """Write config.json and a tokenizer or an image processor, but no weights."""
    config_of(kind, classes).save_pretrained(folder)
    if kind == "image-classification":
        import transformers

        transformers.ViTImageProcessorPil(size={"height": 8, "width": 8}).save_pretrained(folder)
    else:
        tokenizer(brackets=kind != "causal-lm").save_pretrained(folder)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def text_rows() -> list[dict[str, Any]]:
    """A text, its label (does it have many words?), its words and a tag for each."""
    rows = []
    for line in sentences():
        words = line.split()
        tags = ["long" if len(word) > 4 else "short" for word in words]
        label = "many" if len(words) > 8 else "few"
        rows.append({"text": line, "label": label, "tokens": words, "tags": tags})
    return rows


def write_images(folder: Path, number: int, seed: int) -> list[dict[str, Any]]:
    """Noisy images of three colours, in a folder each; returned as rows of path and label."""
    from PIL import Image

    draw = np.random.default_rng(seed)
    rows = []
    for i in range(number):
        colour = i % len(COLOURS)
        pixels = draw.integers(0, 120, (10, 12, 3))
        pixels[..., 2 - colour] += 90
        path = folder / COLOURS[colour] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
        rows.append({"image": f"{COLOURS[colour]}/{i}.png", "label": COLOURS[colour]})
    return rows


def build(kind: str, folder: Path) -> nn.Module:
    import transformers

    auto = getattr(transformers, CLASSES[kind])
    model: nn.Module = auto.from_config(transformers.AutoConfig.from_pretrained(folder))
    return model


def load(kind: str, folder: Path, weights: Path) -> Any:
    """The naive way: transformers' own class, and a file's weights put into it."""
    model = build(kind, folder)
    missing, unexpected = model.load_state_dict(load_file(weights), strict=False)
    assert not unexpected
    assert all("lm_head" in name or "decoder" in name for name in missing), missing  # tied
    return model.eval()


def train(
    model: nn.Module,
    batches: Sequence[dict[str, torch.Tensor]],
    folder: Path,
    checkpoints: int = 6,
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """A plain loop with labels in its batches, at a noisy rate; step-2, step-4 …"""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    order = cycle(batches)
    paths = []
    for step in range(1, 2 * checkpoints + 1):
        optimizer.zero_grad()
        model(**next(order)).loss.backward()
        optimizer.step()
        if step % 2 == 0:
            paths.append(save_weights(model, folder, step, dtype=dtype))
    return paths


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def naive_examples(folder: Path, kind: str, part: str) -> list[Batch]:
    """Rows one by one, straight from the file, labelled as transformers' documents say."""
    import transformers
    from PIL import Image

    rows = read_rows(folder / "data" / f"{part}.jsonl")
    if kind == "image-classification":
        processor = transformers.ViTImageProcessorPil.from_pretrained(folder / "model")
        return [
            {
                **processor(Image.open(folder / "data" / row["image"]), return_tensors="pt"),
                "labels": torch.tensor([COLOURS.index(row["label"])]),
            }
            for row in rows
        ]
    words = transformers.AutoTokenizer.from_pretrained(folder / "model")
    limit: dict[str, Any] = {"truncation": True, "max_length": 32, "return_tensors": "pt"}
    examples = []
    for row in rows:
        if kind == "token-classification":
            encoded = words(row["tokens"], is_split_into_words=True, **limit)
            labels = []
            for place, word in enumerate(encoded.word_ids()):
                first = word is not None and encoded.word_ids().index(word) == place
                labels.append(NAMES[kind].index(row["tags"][word]) if first else -100)
            examples.append({**encoded, "labels": torch.tensor([labels])})
        elif kind == "sequence-classification":
            label = torch.tensor([NAMES[kind].index(row["label"])])
            examples.append({**words(row["text"], **limit), "labels": label})
        else:
            ids = words(row["text"], return_tensors="pt")["input_ids"]
            for start in range(0, ids.shape[1], 32):
                piece, rest = ids[:, start : start + 32], ids[:, start + 32 :]
                examples.append({"input_ids": piece, "labels": piece, "following": rest[:, :1]})
    return examples


def naive_loss(model: Any, examples: list[Batch], kind: str) -> tuple[float, float]:
    """Mean of model(**batch).loss over all labels that count, and the accuracy over them."""
    total, count, right = 0.0, 0, 0
    for example in examples:
        following = example.pop("following", torch.zeros(1, 0, dtype=torch.long))
        labels = example["labels"][:, 1:] if kind == "causal-lm" else example["labels"]
        n = int((labels != -100).sum())
        with torch.no_grad():
            outputs = model(**example)
        if following.numel():  # what comes after a piece of a long text is predicted too
            logits = outputs.logits[:, -1]
            total += float(nn.functional.cross_entropy(logits, following[0]))
            right += int(logits.argmax(-1) == following)
            count += 1
        if n == 0:
            continue
        logits = outputs.logits[:, :-1] if kind == "causal-lm" else outputs.logits
        total += n * float(outputs.loss)
        right += int((logits.argmax(-1) == labels).sum())
        count += n
    return total / count, right / count
