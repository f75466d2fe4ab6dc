"""`task: huggingface`: a transformers model from a local folder, on local data.

The model is built from its config.json; its weights are those of the checkpoints. Nothing is
downloaded, and no code in the folder is run unless `trust_remote_code: true` says so.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import AfterValidator, model_validator
from torch import Tensor, nn

from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.settings import Count, Share
from sewa_cli.task.ready import Ready
from sewa_cli.task.ready.args import DataArgs, Part, parse
from sewa_cli.task.ready.batches import (
    Batch,
    LazyBatches,
    functions_of,
    inputs_of,
    open_image,
)
from sewa_cli.task.ready.head import Head
from sewa_cli.task.ready.tables import Labels, Row, labels_of_config
from sewa_cli.task.ready.text import Example, Reader
from sewa_cli.text import one_line

CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "image-classification": "AutoModelForImageClassification",
}
LANGUAGE = ("causal-lm", "masked-lm")
# the columns each kind reads, and their usual names
COLUMNS: dict[str, dict[str, str | None]] = {
    "causal-lm": {"text": "text"},
    "masked-lm": {"text": "text"},
    "sequence-classification": {"text": "text", "text_pair": None, "label": "label"},
    "token-classification": {"text": "tokens", "label": "tags"},
    "image-classification": {"image": "image", "label": "label"},
}
USUAL_LENGTH = 128
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "*.vocab")


def _has_config(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: must be a folder with a config.json; nothing is downloaded")
    return path


class HuggingFaceArgs(DataArgs):
    """All keys of `args`."""

    kind: Literal[
        "causal-lm",
        "masked-lm",
        "sequence-classification",
        "token-classification",
        "image-classification",
    ]
    model: Annotated[Path, AfterValidator(_has_config)]
    text: str | None = None
    text_pair: str | None = None
    label: str | None = None
    image: str | None = None
    max_length: Count | None = None
    mask_probability: Share = 0.15
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _fits_the_kind(self) -> Self:
        of_some_kinds = {"text", "text_pair", "label", "image", "max_length", "mask_probability"}
        own = {*COLUMNS[self.kind]}
        own |= set() if self.kind == "image-classification" else {"max_length"}
        own |= {"mask_probability"} if self.kind == "masked-lm" else set()
        if misplaced := sorted(of_some_kinds & self.model_fields_set - own):
            raise ValueError(f"kind {self.kind} has no {', '.join(misplaced)}")
        return self

    def column(self, key: str) -> str | None:
        """The name of a column: as given, or as usual."""
        given: str | None = getattr(self, key)
        return given or COLUMNS[self.kind][key]

    @property
    def columns(self) -> list[str]:
        return [name for key in COLUMNS[self.kind] if (name := self.column(key)) is not None]


def make(args: Mapping[str, Any]) -> Ready:
    settings = parse(HuggingFaceArgs, args)
    task = _HuggingFace(settings)
    language, classes = settings.kind in LANGUAGE, not task.is_regression
    functions = functions_of(settings, task.batches, task.build_model, predict, classes, language)
    if language:
        functions |= Head(inputs_for).functions
    files = (settings.model / "config.json", *settings.sources.values())
    return Ready(functions, files, tuple(task.notes))


def predict(model: nn.Module, batch: Batch) -> Tensor:
    logits: Tensor = model(**inputs_for(model, batch)).logits
    return logits


def inputs_for(model: nn.Module, batch: Batch) -> Batch:
    """A tokenizer may return more than the model takes; trainers leave it out as well."""
    known = _parameters(type(model).forward)
    return {key: x for key, x in inputs_of(batch).items() if key in known}


@cache
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


class _HuggingFace:
    """Reads the model's folder and all batches."""

    def __init__(self, args: HuggingFaceArgs) -> None:
        self._args = args
        self._transformers = _import_transformers()
        self._config = self._read("AutoConfig", "config")
        self.notes: list[str] = []
        rows = args.read(args.columns, self.notes)
        self._labels = self._make_labels([row for some in rows.values() for row in some])
        make = self._images if args.kind == "image-classification" else self._texts
        self.batches: dict[Part, Sequence[Batch]] = make(rows)

    def build_model(self) -> nn.Module:
        auto = getattr(self._transformers, CLASSES[self._args.kind])
        try:
            model: nn.Module = auto.from_config(
                self._config, trust_remote_code=self._args.trust_remote_code
            )
        except ValueError as error:
            raise self._unreadable(f"a model for {self._args.kind}", error) from error
        model.config.use_cache = False  # type: ignore[union-attr]
        dtype: Any = self._args.dtype
        if dtype == "auto":
            named = (getattr(self._config, name, None) for name in ("dtype", "torch_dtype"))
            dtype = next((found for found in named if found is not None), "float32")
        return model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    def _read(self, auto: str, what: str) -> Any:
        """A part of the model's folder."""
        try:
            return getattr(self._transformers, auto).from_pretrained(
                self._args.model,
                local_files_only=True,
                trust_remote_code=self._args.trust_remote_code,
            )
        except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
            raise self._unreadable(f"a {what}", error) from error

    def _unreadable(self, what: str, error: Exception) -> TaskError:
        reason = one_line(error, 200)
        return TaskError(f"{self._args.model}: {what} cannot be made from it: {reason}")

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
                f"{self._args.model}/config.json: problem_type multi_label_classification has no "
                "ready-made task; write a task.py"
            )
        column = self._args.column("label")
        assert column is not None
        seen = [row.get(column) for row in rows]
        if self._args.kind == "token-classification":
            seen = [tag for tags in seen if isinstance(tags, list) for tag in tags]
        label2id, number = self._config.label2id, self._config.num_labels
        labels, notes = labels_of_config(label2id or {}, number, seen)
        self.notes += notes
        return labels

    def _target(self, row: Row) -> float | int:
        """The class of a row, or its value."""
        column = self._args.column("label")
        assert column is not None
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
        # from a folder without one, transformers silently makes an empty tokenizer
        if not any(next(self._args.model.glob(name), None) for name in TOKENIZER_FILES):
            raise TaskError(f"{self._args.model}: holds no tokenizer (tokenizer.json or the like)")
        tokenizer = self._read("AutoTokenizer", "tokenizer")
        padding = getattr(self._config, "pad_token_id", None)
        if padding is None:
            padding = tokenizer.pad_token_id
        if self._args.kind == "sequence-classification":
            if padding is None and self._args.batch_size > 1:
                raise TaskError(
                    f"{self._args.model}/config.json: has no pad_token_id; add one, or set "
                    "args.batch_size: 1"
                )
            self._config.pad_token_id = padding  # some models find the last token by it
        reader = Reader(tokenizer, self._max_length(), 0 if padding is None else padding)
        batches: dict[Part, Sequence[Batch]] = {}
        for part, some in rows.items():
            examples = self._examples(reader, some)
            self._check_vocabulary(examples)
            path = self._args.sources[part]
            batches[part], note = reader.batch(examples, self._args.batch_size, path)
            full = sum(len(x.inputs["input_ids"]) == reader.max_length for x in examples)
            if full:
                self.notes.append(
                    f"{path}: {full} of {len(examples)} rows for {part} fill max_length, "
                    f"{reader.max_length} tokens; longer texts are cut"
                )
            self.notes += [note] if note else []
        return batches

    def _examples(self, reader: Reader, rows: Sequence[Row]) -> list[Example]:
        args = self._args
        text, label = args.column("text") or "", args.label or COLUMNS[args.kind].get("label") or ""
        match args.kind:
            case "causal-lm":
                return reader.causal(rows, text)
            case "masked-lm":
                return reader.masked(rows, text, args.mask_probability, args.seed)
            case "token-classification":
                assert self._labels is not None
                return reader.tagged(rows, text, label, self._labels)
        texts = [text, args.text_pair] if args.text_pair else [text]
        return reader.classified(rows, texts, self._target)

    def _max_length(self) -> int:
        positions = getattr(self._config, "max_position_embeddings", None)
        if self._args.max_length is None:
            return min(USUAL_LENGTH, positions or USUAL_LENGTH)
        if positions is not None and self._args.max_length > positions:
            raise ConfigError(
                f"args.max_length: {self._args.max_length} is more than the model's "
                f"{positions} positions (max_position_embeddings in config.json)"
            )
        return self._args.max_length

    def _check_vocabulary(self, examples: Sequence[Example]) -> None:
        size = getattr(self._config, "vocab_size", None)
        top = max((max(x.inputs["input_ids"], default=0) for x in examples), default=0)
        if size is not None and top >= size:
            raise TaskError(
                f"{self._args.model}: its tokenizer gives token {top}, but the model has "
                f"{size} (vocab_size in config.json)"
            )

    # ---- images ------------------------------------------------------------------------------

    def _images(self, rows: Mapping[Part, list[Row]]) -> dict[Part, Sequence[Batch]]:
        processor = self._read("AutoImageProcessor", "image processor")
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


def _import_transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        if error.name not in (None, "transformers"):
            raise
        raise TaskError(
            "task: huggingface needs transformers: pip install 'sewa-cli[hf]'"
        ) from None
    return transformers
