"""The parts of a model (config, tokenizer, adapter, base), found and put together.

They come from the newest checkpoint, or from a folder that the user names. Nothing is downloaded,
no code in a folder is run unless the user says so, and the weights of a base model are read from
safetensors alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from sewa_cli.checkpoints import Checkpoint
from sewa_cli.checkpoints.adapters import CONFIG as ADAPTER
from sewa_cli.checkpoints.adapters import read_config
from sewa_cli.errors import ConfigError, SewaError, TaskError
from sewa_cli.task.ready import import_library
from sewa_cli.text import few, one_line, shown

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "*.vocab")
PROCESSOR_FILES = ("*processor_config.json",)
_MORE_WORDS = ("merges.txt", "chat_template*", "special_tokens*", "added_tokens*")
_PLACES = {"checkpoints", "checkpoint"}  # folders that trainers put between a run and its files
_BASE = "base_model_name_or_path"
Dtype = Literal["float32", "bfloat16", "float16", "auto"]


def has_config(path: Path) -> Path:
    if not (path / CONFIG).is_file():
        raise ValueError(f"{path}: must be a folder with a config.json; nothing is downloaded")
    return path


@dataclass(frozen=True)
class Folders:
    """Each part's folder. `base`: with the weights that an adapter is added to."""

    config: Path
    words: Path  # tokenizer, or image processor
    adapter: Path | None = None
    base: Path | None = None
    note: str = ""  # what is used without having been named

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that are read: a change of one matters, and none may be overwritten."""
        words = (*TOKENIZER_FILES, *PROCESSOR_FILES, *_MORE_WORDS)
        found = [*self.config.glob("*.py"), *chain(*map(self.words.glob, words))]
        found += [] if self.base is None else self.base.glob("*.safetensors")
        found += [] if self.adapter is None else self.adapter.glob(ADAPTER)
        found += self.config.glob(GENERATION)
        return (self.config / CONFIG, *sorted(found))


def find_folders(
    model: Path | None, tokenizer: Path | None, newest: Checkpoint | None, of_images: bool
) -> Folders:
    """`model` and `tokenizer` as the user named them; else near the newest checkpoint."""
    near = [] if newest is None else _near(newest)
    adapter = newest.folder if newest is not None and newest.kind == "adapter" else None
    named = [] if model is None else [model]
    base = None if adapter is None else model or _base_of(adapter, near)
    if adapter is not None and base is not None:
        places, words = [adapter, base], [*named, *near, base]  # an adapter may have own labels
    else:
        places, words = named or near, [*named, *near]
    config = next((folder for folder in places if (folder / CONFIG).is_file()), None)
    if config is None:
        looked = f", and there is no {CONFIG} in {few(list(map(str, near)))}" if near else ""
        raise ConfigError(f"args.model: is missing{looked}; name a folder with a {CONFIG}")
    word, patterns = (
        ("image processor", PROCESSOR_FILES) if of_images else ("tokenizer", TOKENIZER_FILES)
    )
    # from a folder without one, transformers silently makes an empty tokenizer
    having = (p for p in words if any(next(p.glob(pattern), None) for pattern in patterns))
    found = tokenizer or next(having, None)
    if found is None:
        looked = few(list(dict.fromkeys(map(str, words))))
        raise TaskError(f"{looked}: holds no {word} ({patterns[0]}); name a folder that does")
    if adapter is not None:
        note = f"adapters on the base model {base}, {word} from {found}"
    elif model is not None:
        note = f"{word} from {found}" if found not in (model, tokenizer) else ""
    else:
        note = f"model from {config}, {word} from {found}"
        note = f"model and {word} from {config}" if config == found else note
    return Folders(config, found, adapter, base, note)


def _near(newest: Checkpoint) -> list[Path]:
    """Return a checkpoint's folder and its run's."""
    return [newest.folder, _above(newest.folder)]


def _above(folder: Path) -> Path:
    parent = folder.parent if folder.name not in ("", "..") else folder / ".."
    return _above(parent) if parent.name in _PLACES else parent


def _base_of(adapter: Path, near: Sequence[Path]) -> Path:
    named = read_config(adapter).get(_BASE)
    if isinstance(named, str) and named:
        for folder in (*(place / named for place in near), Path(named)):
            if _is_model(folder):
                return folder
    raise ConfigError(
        f"args.model: is missing: name the folder of the base model; {adapter}/adapter_config.json "
        f"calls it {shown(named, 100)}, which is not a folder with {CONFIG} here"
    )


def _is_model(folder: Path) -> bool:
    try:
        return (folder / CONFIG).is_file()
    except (OSError, ValueError):  # no name that a file can have
        return False


# ---- what is made of them ---------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Reads the parts with transformers and reports every fault in one line."""

    folders: Folders
    trust_remote_code: bool
    transformers: Any

    def read(self, auto: str, folder: Path) -> Any:
        """Read AutoConfig, AutoTokenizer or AutoImageProcessor from a folder."""
        with making(f"an {auto}", folder):
            return getattr(self.transformers, auto).from_pretrained(folder, **self._options())

    def generation(self) -> Any:
        """Read how the model generates; None where the folder does not say."""
        folder = self.folders.config
        if not (folder / GENERATION).is_file():
            return None
        with making("settings of generation", folder / GENERATION):
            return self.transformers.GenerationConfig.from_pretrained(folder)

    def _options(self) -> dict[str, Any]:
        return {"local_files_only": True, "trust_remote_code": self.trust_remote_code}

    def model(self, auto: str, kind: str, config: Any, dtype: str) -> nn.Module:
        """Build the model, without weights; with those of its base for adapters."""
        make, base = getattr(self.transformers, auto), self.folders.base
        if base is None:
            with making(f"a model for {kind}", self.folders.config):
                built: nn.Module = make.from_config(
                    config, trust_remote_code=self.trust_remote_code
                )
        else:
            built = self._adapted(make, kind, config, base)
        built.config.use_cache = False  # type: ignore[union-attr]
        named: Any = dtype
        if dtype == "auto":
            found = (getattr(config, name, None) for name in ("dtype", "torch_dtype"))
            named = next((one for one in found if one is not None), "float32")
        return built.to(getattr(torch, named) if isinstance(named, str) else named)

    @contextmanager
    def _without_bars(self) -> Iterator[None]:
        """Hide the bars of transformers, which would fill a log."""
        logging = self.transformers.utils.logging
        shown_before = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            if shown_before:
                logging.enable_progress_bar()

    def _adapted(self, make: Any, kind: str, config: Any, base: Path) -> nn.Module:
        """Load the base with the adapter's layers in it, under the names of the base."""
        adapter, peft = self.folders.adapter, import_library("an adapter", "peft")
        assert adapter is not None
        with making("settings of an adapter", adapter):
            settings = peft.PeftConfig.from_pretrained(adapter)
        _check_inside(adapter, settings)
        with making(f"a model for {kind}", base), self._without_bars():
            built, found = make.from_pretrained(
                base,
                config=config,
                use_safetensors=True,
                output_loading_info=True,
                **self._options(),
            )
        with making("a model with the adapter", f"{adapter} on {base}"):
            whole = peft.PeftModel.from_pretrained(built, adapter, config=settings)
        inside: nn.Module = whole.get_base_model()
        saved = {name for name, _ in inside.named_modules() if name.endswith(".modules_to_save")}
        lost = [
            name
            for name in sorted(found["missing_keys"])
            if not any(name.startswith(m.removesuffix("modules_to_save")) for m in saved)
        ]
        if lost:
            raise TaskError(
                f"{base}: has no weights for {few(lost)}, and neither has {adapter}; name its "
                "base: args.model"
            )
        return inside


def _check_inside(adapter: Path, settings: Any) -> None:
    """Refuse adapters outside the base's layers, and settings that make PEFT run code."""
    if settings.is_prompt_learning or settings.peft_type == "XLORA":
        kind = str(settings.peft_type).rpartition(".")[2]
        raise TaskError(f"{adapter}: {kind} is not weights inside the model; write a task.py")
    if getattr(settings, "megatron_config", None) is not None:
        raise TaskError(
            f"{adapter}/adapter_config.json: megatron_core names a Python module to run; refused"
        )


@contextmanager
def making(what: str, source: object) -> Iterator[None]:
    try:
        yield
    except (MemoryError, SewaError):
        raise
    except Exception as error:
        reason = one_line(error, 200)
        raise TaskError(f"{source}: {what} cannot be made from it: {reason}") from error
