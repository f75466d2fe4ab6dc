"""`task: huggingface`: a transformers model from its checkpoints or a local folder, on local data.

The model is built from its config.json; its weights are those of the checkpoints. Nothing is
downloaded, and no code in the folder is run unless `trust_remote_code: true` says so.
"""

from __future__ import annotations

import inspect
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import torch
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor, nn

from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.mirrors import bring
from sewa_cli.settings import Count, Share
from sewa_cli.task.ready import Newest, Ready, import_library
from sewa_cli.task.ready.args import DataArgs, Existing, Part, parse
from sewa_cli.task.ready.batches import TEXTS, Batch, LazyBatches, functions_of, open_image
from sewa_cli.task.ready.folder import Dtype, Source, find_folders, has_config
from sewa_cli.task.ready.generation import Generation
from sewa_cli.task.ready.head import Head
from sewa_cli.task.ready.language import Language, Tokens
from sewa_cli.task.ready.lm_eval import Harness, HarnessArgs
from sewa_cli.task.ready.speech import features_of, sound_of
from sewa_cli.task.ready.tables import Labels, Row, labels_of_config
from sewa_cli.task.ready.text import Example, TextReader, as_text
from sewa_cli.task.scoring import FUNCTIONS

Kind = Literal[
    "causal-lm",
    "masked-lm",
    "seq2seq-lm",
    "speech-seq2seq",
    "sequence-classification",
    "token-classification",
    "image-classification",
]
CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "image-classification": "AutoModelForImageClassification",
}
SPEECH = "speech-seq2seq"
LANGUAGE = ("causal-lm", "masked-lm", "seq2seq-lm", SPEECH)
# the columns each kind reads, and their usual names
COLUMNS: dict[str, dict[str, str | None]] = {
    "causal-lm": {key: key for key in ("text", "messages", "prompt", "completion")},
    "masked-lm": {"text": "text"},
    "seq2seq-lm": {key: key for key in ("prompt", "completion")},
    "speech-seq2seq": {key: key for key in ("audio", "completion")},
    "sequence-classification": {"text": "text", "text_pair": None, "label": "label"},
    "token-classification": {"text": "tokens", "label": "tags"},
    "image-classification": {"image": "image", "label": "label"},
}
GENERATING = ("lm_eval", "generate", "bleu", "chrf")
OPTIONS = {
    "causal-lm": ("tokenizer", "max_length", "pack", *GENERATING),
    "masked-lm": ("tokenizer", "max_length", "pack", "mask_probability"),
    "seq2seq-lm": ("tokenizer", "max_length", *GENERATING),
    "speech-seq2seq": ("tokenizer", "max_length", "generate", "bleu", "chrf"),
    "sequence-classification": ("tokenizer", "max_length"),
    "token-classification": ("tokenizer", "max_length"),
    "image-classification": (),
}
# of causal-lm, the first of these that the data have
FORMS = (("text",), ("messages",), ("prompt", "completion"))
USUAL_LENGTH = 128
FEWEST_TEXTS = 20  # with fewer there are no intervals
_TRAINED: Final = {"train", "training", "trainset", "traindata"}
_FRESH: Final = {
    *("val", "valid", "validation", "validate", "dev", "test", "eval", "evaluation", "heldout"),
    *("holdout", "selection", "untrained", "not"),
}
_WHY: Final = (
    "rows that the model has seen reward what it remembers, and an average chosen or judged by "
    "them may do worse on new ones"
)


class HuggingFaceArgs(DataArgs):
    """All keys of `args`."""

    kind: Kind
    model: Annotated[Path, AfterValidator(has_config)] | None = None
    tokenizer: Existing | None = None
    text: str | None = None
    messages: str | None = None
    prompt: str | None = None
    completion: str | None = None
    text_pair: str | None = None
    label: str | None = None
    image: str | None = None
    audio: str | None = None
    max_length: Count | None = None
    pack: bool = False
    mask_probability: Share = 0.15
    dtype: Dtype = "float32"
    trust_remote_code: bool = False
    lm_eval: dict[str, Any] | None = None
    generate: dict[str, Any] | None = None
    bleu: dict[str, Any] = Field(default_factory=dict)
    chrf: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits_the_kind(self) -> Self:
        own = {*COLUMNS[self.kind], *OPTIONS[self.kind]}
        others = {key for table in (COLUMNS, OPTIONS) for keys in table.values() for key in keys}
        if misplaced := sorted((others - own) & self.model_fields_set):
            raise ValueError(f"kind {self.kind} has no {', '.join(misplaced)}")
        forms = [form for form in FORMS if not self.model_fields_set.isdisjoint(form)]
        if self.kind == "causal-lm" and len(forms) > 1:
            raise ValueError("the data are `text`, `messages`, or `prompt` and `completion`: one")
        if self.lm_eval is not None and self.generate is not None:
            raise ValueError("`lm_eval` and `generate` both say what --metric is; leave out one")
        return self

    def column(self, key: str) -> str | None:
        """Return the name of a column: as given, or as usual."""
        given: str | None = getattr(self, key)
        return given or COLUMNS[self.kind][key]

    def keys(self, there: Sequence[str]) -> tuple[str, ...]:
        """Return the columns that are read from a file that has the columns `there`."""
        if self.kind != "causal-lm":
            return tuple(key for key in COLUMNS[self.kind] if self.column(key) is not None)
        named = (form for form in FORMS if not self.model_fields_set.isdisjoint(form))
        fitting = (form for form in FORMS if all(self.column(key) in there for key in form))
        return next(chain(named, fitting), FORMS[0])


def make(args: Mapping[str, Any], newest: Newest | None = None) -> Ready:
    settings = parse(HuggingFaceArgs, args)
    task = _HuggingFace(settings, newest)
    head = Head(inputs_for).functions if settings.kind in LANGUAGE else None
    classes = not task.is_regression
    functions = functions_of(settings, task.batches, task.build_model, predict, classes, head)
    if scoring := task.own_scoring():
        functions = {key: f for key, f in functions.items() if key not in FUNCTIONS} | scoring
    files = (*task.files, *settings.sources.values())
    return Ready(functions, files, tuple(task.notes), tuple(task.warnings))


def predict(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(**inputs_for(model, batch)).logits
    return logits


def _note_of_few_texts(path: Path, texts: Sequence[int | None]) -> list[str]:
    """Say that rows cut from a few texts are few examples."""
    count = len(set(texts))
    if None in texts or not count < min(len(texts), FEWEST_TEXTS):
        return []
    return [
        f"{path}: its {len(texts)} rows are of {count} text{'s' * (count > 1)}, and count as "
        f"{count}; for intervals, give {FEWEST_TEXTS} texts or more, each in a row of its own"
    ]


def _warnings_of(sources: Mapping[str, Path]) -> Iterator[str]:
    """Yield a sentence for each file that is training data by its name or its folder's.

    Names are hints: silence proves nothing.
    """
    for path in dict.fromkeys(sources.values()):
        words, above = _words(path.name), path.absolute().parent.name.lower()
        if (words & _TRAINED or above == "train") and not words & _FRESH:
            used = " and ".join(part for part, own in sources.items() if own == path)
            yield (
                f"{path}: is training data by its name, and used for {used}: {_WHY}; use fresh rows"
            )


def _words(name: str) -> set[str]:
    """Split a name: train-00000-of-00001.parquet is train, of, parquet."""
    return set(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))


def inputs_for(model: nn.Module, batch: Batch) -> Batch:
    """Pick what the model takes: a tokenizer may return more."""
    known = _parameters(type(model).forward) - {"targets", "targets_per_row", TEXTS}
    return {key: x for key, x in batch.items() if key in known}


@cache
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


class _HuggingFace:
    """Reads the model's folder and all batches."""

    def __init__(self, args: HuggingFaceArgs, newest: Newest | None) -> None:
        self._args = args
        transformers = import_library("task: huggingface", "transformers")
        opened = None if newest is None else newest()
        is_images = args.kind == "image-classification"
        folders = find_folders(args.model, args.tokenizer, opened, is_images)
        self._folder, self.files = folders.config, folders.files
        for file in self.files:
            bring(file)
        self._source = Source(folders, args.trust_remote_code, transformers)
        self._config = self._source.read("AutoConfig", folders.config)
        self.notes = [folders.note] if folders.note else []
        judged = {str(part): path for part, path in args.sources.items() if part != "training"}
        self.warnings = list(_warnings_of(judged))
        tables = args.tables()
        self._keys = {part: args.keys(table.names) for part, table in tables.items()}
        self._rows = rows = {
            part: args.take(part, table, self._columns(part), self.notes)
            for part, table in tables.items()
        }
        self._labels = self._make_labels([row for some in rows.values() for row in some])
        make = self._images if is_images else self._texts
        self.batches: dict[Part, Sequence[Batch]] = make(rows)

    def build_model(self) -> nn.Module:
        auto = CLASSES[self._args.kind]
        return self._source.model(auto, self._args.kind, self._config, self._args.dtype)

    @cached_property
    def tokenizer(self) -> Any:
        return self._source.read("AutoTokenizer", self._source.folders.words)

    def own_scoring(self) -> dict[str, Callable[..., Any]]:
        """Return functions for --metric that do not come from the loss's batches, if any."""
        args = self._args
        if args.lm_eval is not None:
            return Harness(
                parse(HarnessArgs, args.lm_eval, "args.lm_eval"), self.tokenizer
            ).functions
        if args.generate is None:
            return {}
        if any("completion" not in keys for keys in self._keys.values()):
            raise ConfigError("args.generate: needs data with a prompt and a completion")
        options = (args.generate, args.bleu, args.chrf, self._extractor)
        prompts, references = {}, {}
        for part, rows in self._rows.items():
            prompt, reference = self._columns(part)
            prompts[part] = self._prompts(part, rows, prompt)
            references[part] = [as_text(row, reference) for row in rows]
        return Generation(self._source, self.tokenizer, *options).functions(prompts, references)

    def _prompts(self, part: Part, rows: Sequence[Row], column: str) -> list[Any]:
        if self._args.kind != SPEECH:
            return [as_text(row, column) for row in rows]
        folder = self._args.sources[part].absolute().parent
        return [sound_of(row, column, folder) for row in rows]

    @cached_property
    def _extractor(self) -> Any:
        """Return what makes features of recordings; None: there are none."""
        if self._args.kind != SPEECH:
            return None
        return self._source.read("AutoFeatureExtractor", self._source.folders.words)

    def _hear(self, batch: Batch, sounds: Sequence[Any]) -> Batch:
        return {**batch, "input_features": features_of(self._extractor, sounds)}

    def _columns(self, part: Part) -> list[str]:
        return [self._args.column(key) or "" for key in self._keys[part]]

    # ---- labels ------------------------------------------------------------------------------

    @property
    def is_regression(self) -> bool:
        kind, problem = self._args.kind, getattr(self._config, "problem_type", None)
        if kind != "sequence-classification":
            return False
        return problem == "regression" or (problem is None and self._config.num_labels == 1)

    def _make_labels(self, rows: Sequence[Row]) -> Labels | None:
        if self._args.kind in LANGUAGE or self.is_regression:
            return None
        if getattr(self._config, "problem_type", None) == "multi_label_classification":
            raise TaskError(
                f"{self._folder}/config.json: problem_type multi_label_classification has no "
                "ready-made task; write a task.py"
            )
        column = self._args.column("label") or ""
        seen = [row.get(column) for row in rows]
        if self._args.kind == "token-classification":
            seen = [tag for tags in seen if isinstance(tags, list) for tag in tags]
        label2id, number = self._config.label2id, self._config.num_labels
        labels, notes = labels_of_config(label2id or {}, number, seen)
        self.notes += notes
        return labels

    def _target(self, row: Row) -> float | int:
        """Return the class of a row, or its value."""
        column = self._args.column("label") or ""
        value = row.get(column)
        if self._labels is not None:
            return self._labels.number(row, column, value)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise TaskError(f"{row.where}: {column}: {value!r} is not a number")
        return number

    # ---- texts -------------------------------------------------------------------------------

    def _texts(self, rows: Mapping[Part, list[Row]]) -> dict[Part, Sequence[Batch]]:
        args, padding = self._args, self._padding(self.tokenizer)
        if args.kind == "sequence-classification":
            self._config.pad_token_id = padding  # some models find the last token by it
        reader = TextReader(self.tokenizer, self._max_length(), 0 if padding is None else padding)
        batches: dict[Part, Sequence[Batch]] = {}
        for part, some in rows.items():
            examples = self._examples(part, reader, some)
            self._check_vocabulary(examples)
            path = args.sources[part]
            batches[part], note = reader.batch(examples, args.batch_size, path)
            if note and args.kind == SPEECH:
                raise TaskError(note)
            self.notes += [note] if note else []
            if args.kind == SPEECH:
                sounds = self._prompts(part, some, self._columns(part)[0])
                starts = range(0, len(sounds), args.batch_size)
                heard = [sounds[start : start + args.batch_size] for start in starts]
                pairs = zip(batches[part], heard, strict=True)
                batches[part] = LazyBatches([partial(self._hear, *pair) for pair in pairs])
            if part != "training":
                self.notes += _note_of_few_texts(path, [x.text for x in examples])
            if cut := sum(example.is_cut for example in examples):
                self.notes.append(
                    f"{path}: {cut} of {len(examples)} rows for {part} are longer than "
                    f"max_length, {reader.max_length} tokens, and lose the rest"
                )
        return batches

    def _padding(self, tokenizer: Any) -> int | None:
        """Return the padding token, or None: it is masked, so any token will do."""
        size = getattr(self._config, "vocab_size", None)
        padding, whose = getattr(self._config, "pad_token_id", None), "pad_token_id"
        if padding is None:
            padding, whose = tokenizer.pad_token_id, "the tokenizer's padding token"
        if padding is not None and padding in range(size or padding + 1):
            return int(padding)
        if self._args.kind == "sequence-classification" and self._args.batch_size > 1:
            fault = "has no pad_token_id; add one"
            if padding is not None:
                fault = f"{whose} is {padding}, and the model has {size} tokens; name one of them"
            raise TaskError(f"{self._folder}/config.json: {fault}, or set args.batch_size: 1")
        return None

    def _examples(self, part: Part, reader: TextReader, rows: Sequence[Row]) -> list[Example]:
        args = self._args
        if args.kind in LANGUAGE:
            return self._drawn(part, self._language(part, reader, rows))
        text, label = args.column("text") or "", args.column("label") or ""
        if args.kind == "token-classification":
            assert self._labels is not None
            return reader.tagged(rows, text, label, self._labels)
        texts = [text, args.text_pair] if args.text_pair else [text]
        return reader.classified(rows, texts, self._target)

    def _language(self, part: Part, reader: TextReader, rows: Sequence[Row]) -> list[Example]:
        args = self._args
        if args.kind in ("seq2seq-lm", SPEECH):
            start = getattr(self._config, "decoder_start_token_id", None)
            if start is None:
                raise TaskError(
                    f"{self._folder}/config.json: has no decoder_start_token_id; add it"
                )
            columns = self._columns(part)
            if args.kind == SPEECH:
                return reader.transcribed(rows, columns[1], start)
            return reader.translated(rows, columns, start)
        language = Language(reader.tokenizer, reader.max_length, args.pack)
        if args.kind == "masked-lm":
            [column] = self._columns(part)
            return language.masked(rows, column, args.mask_probability, args.seed)
        read: dict[str, Callable[..., list[Tokens]]] = {
            "text": language.texts,
            "messages": language.chats,
            "prompt": language.completions,
        }
        return language.causal(read[self._keys[part][0]](rows, *self._columns(part)))

    def _drawn(self, part: Part, examples: list[Example]) -> list[Example]:
        """Draw at most `limit` of the rows that the texts were cut into, from all over them."""
        limit = self._args.limit
        if limit is None or len(examples) <= limit:
            return examples
        chosen = sorted(random.Random(self._args.seed).sample(range(len(examples)), limit))
        self.notes.append(
            f"{self._args.sources[part]}: {limit} of the {len(examples)} rows that its texts make "
            f"for {part}, drawn with seed {self._args.seed}; args.limit: {len(examples)} takes all"
        )
        return [examples[i] for i in chosen]

    def _max_length(self) -> int:
        positions = getattr(self._config, "max_position_embeddings", None)
        if self._args.max_length is None:
            return min(USUAL_LENGTH, positions or USUAL_LENGTH)
        if positions is not None and self._args.max_length > positions:
            raise ConfigError(
                f"args.max_length: {self._args.max_length} is more than the model's "
                f"{positions} positions (max_position_embeddings in config.json); lower it"
            )
        return self._args.max_length

    def _check_vocabulary(self, examples: Sequence[Example]) -> None:
        size = getattr(self._config, "vocab_size", None)
        seen = [ids for x in examples for key, ids in x.inputs.items() if key.endswith("_ids")]
        if self._args.kind in LANGUAGE:  # the last token of a text is a target only
            seen += [x.targets for x in examples if isinstance(x.targets, list)]
        top = max((max(ids, default=0) for ids in seen), default=0)
        if size is not None and top >= size:
            raise TaskError(
                f"{self._folder}: its tokenizer gives token {top}, but the model has "
                f"{size} (vocab_size in config.json); use the model's own"
            )

    # ---- images ------------------------------------------------------------------------------

    def _images(self, rows: Mapping[Part, list[Row]]) -> dict[Part, Sequence[Batch]]:
        processor = self._source.read("AutoImageProcessor", self._source.folders.words)
        batches: dict[Part, Sequence[Batch]] = {}
        for part, some in rows.items():
            folder = self._args.sources[part].absolute().parent
            targets = [self._target(row) for row in some]  # a wrong label is reported at once
            make = partial(self._batch_of_images, processor, folder)
            batches[part] = LazyBatches.of(self._args.batch_size, make, some, targets)
        return batches

    def _batch_of_images(
        self, processor: Any, folder: Path, rows: Sequence[Row], targets: Sequence[float]
    ) -> Batch:
        column = self._args.column("image") or ""
        images = [open_image(row, column, folder) for row in rows]
        encoded = processor(images=images, return_tensors="pt")
        return {**encoded, "targets": torch.tensor(targets), "targets_per_row": 1.0}
