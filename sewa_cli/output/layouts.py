"""The forms of an output: a safetensors file, a folder, a PyTorch file, a DCP folder.

What comes from a trainer's folders or files loads where they loaded.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch
from io import BytesIO
from pathlib import Path
from typing import IO, Any, Literal

from sewa_cli.checkpoints import (
    SUFFIX,
    WRITTEN_BY,
    Checkpoint,
    archives,
    distributed,
    files_of,
    inert,
    modules,
    pytorch,
)
from sewa_cli.checkpoints.adapters import CONFIG as ADAPTER_CONFIG
from sewa_cli.checkpoints.adapters import WEIGHTS as ADAPTER
from sewa_cli.checkpoints.checkpoint import REPORT, read_json
from sewa_cli.checkpoints.opening import MODEL, OLMO
from sewa_cli.checkpoints.safetensors import INDEX, is_ours
from sewa_cli.errors import CheckpointError, ConfigError, SewaError
from sewa_cli.files import real
from sewa_cli.mirrors import bring, mirror_of
from sewa_cli.output.average import Average

CARD = "README.md"
Form = Literal["file", "folder", "torch", "archive", "dcp"]
# what a model needs besides its weights to be loaded and used
BESIDE = (
    "config.json",
    "generation_config.json",
    ADAPTER_CONFIG,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges*",
    "*.model",
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "chat_template*",
    "*.jinja",
    "*.py",  # the model's own code, which config.json may name
)
MEGATRON = "metadata.json"  # next to .metadata in Megatron-Core's checkpoints
_OF_TRAINING = (
    *("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state*", "training_args.bin"),
    *("trainer_state.json", CARD, REPORT),
)
_BESIDE_DISTRIBUTED = ("common.pt", MEGATRON, "config.json", ".metadata.json")
_WRITTEN = (*BESIDE, CARD, REPORT)
_SUFFIXES = (SUFFIX, *(suffix for suffix in pytorch.SUFFIXES if suffix not in archives.WEIGHTS))


def form_of(output: Path | IO[bytes] | None, like: Checkpoint, shard_size: int | None) -> Form:
    """Return the form that the name asks for; where it does not, that of the checkpoints."""
    if output is not None and not isinstance(output, Path):
        return "file"
    suffix = default_suffix(like) if output is None else output.suffix
    if suffix in archives.WEIGHTS and suffix == like.path.suffix:
        return "archive"
    if suffix in pytorch.SUFFIXES and suffix not in archives.WEIGHTS:
        return "torch"
    is_folder = like.kind in ("folder", "adapter") or shard_size is not None
    if is_folder and (output is None or suffix != SUFFIX):
        return "folder"
    is_number = suffix[1:].isdigit()  # a name such as llama-0.5
    if suffix not in ("", SUFFIX) and not is_number:
        raise ConfigError(
            f"output: {output}: sewa cannot write {suffix} files from {like.path.name}; end the "
            f"name with {', '.join(_SUFFIXES)}, or use --set output_format=dcp"
        )
    return "file"


def default_suffix(like: Checkpoint) -> str:
    """Return the suffix of a file that nobody named; other archives than a run's cannot be made."""
    return like.path.suffix if like.path.suffix in archives.WEIGHTS else SUFFIX


def shard_size_of(asked: int | None, form: Form, like: Checkpoint) -> int | None:
    """Return the most bytes of a file; a run of sharded checkpoints gets a sharded average."""
    is_whole = form != "folder" or like.kind == "adapter" or bool(modules.parts_of(like.path))
    if asked is not None and is_whole:
        raise ConfigError(
            "--shard-size: splits the weights of a folder; name one with --output, without "
            f"{SUFFIX}. Adapters, PyTorch files and distributed checkpoints are never split"
        )
    is_sharded = form == "folder" and any(file.name.endswith(INDEX) for file in like.files)
    if asked is not None or not is_sharded:
        return asked
    return max(f.stat().st_size for f in like.files if not f.name.endswith(INDEX))


def folder_is_ours(folder: Path) -> bool:
    """Whether --force may replace it: an average of ours, and nothing else is in it."""
    try:
        weights = [file for file in files_of(folder) if file.suffix == SUFFIX]
        inside, parts = list(folder.iterdir()), modules.parts_of(folder).values()
    except (SewaError, OSError):
        return False
    if parts:
        return all(is_ours(p, WRITTEN_BY) or pytorch.mentions(p, WRITTEN_BY) for p in parts)
    return bool(weights) and all(
        is_ours(path, WRITTEN_BY)
        if path.suffix == SUFFIX
        else path.is_file()
        and (path.name.endswith(INDEX) or any(fnmatch(path.name, name) for name in _WRITTEN))
        for path in inside
    )


def fill(made: Path, average: Average, form: Form, shard_size: int | None) -> None:
    """Write an average into an empty folder, or into a file."""
    newest = average.sources[-1]
    parts = modules.parts_of(newest.path) if form == "folder" else {}
    if form == "dcp":
        _fill_distributed(made, average)
    elif parts:
        _fill_parts(made, average, parts)
    elif form == "folder":
        _fill_folder(made, average, shard_size)
    else:
        like = newest.path if newest.kind == "torch" else None
        with made.open("wb") as file:
            if form == "file":
                average.write(file)
            elif form == "torch":
                _write_torch(average, file, like)
            else:
                weights = BytesIO()
                _write_torch(average, weights, like)
                archives.rewrite(newest.path, weights.getvalue(), file)


def _fill_folder(folder: Path, average: Average, shard_size: int | None) -> None:
    """Write weights under the names that loaders look for; copy what else the newest one has."""
    newest = average.sources[-1]
    weights = ADAPTER if newest.kind == "adapter" else MODEL
    shards = average.shards(shard_size)
    places: dict[str, str] = {}  # tensor → file
    for number, names in enumerate(shards, 1):
        part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        name = weights.replace(SUFFIX, part + SUFFIX)
        places |= dict.fromkeys(names, name)
        with (folder / name).open("wb") as file:
            average.write(file, names)
    if len(shards) > 1:
        total = {"total_size": sum(average.sizes().values())}
        index = {"metadata": total, "weight_map": places}
        text = json.dumps(index, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
        (folder / (weights + INDEX)).write_bytes(text.encode())
    for source in _beside(newest):
        _copy(source, folder / source.name, average.dtype)


def _copy(source: Path, target: Path, dtype: str | None) -> None:
    bring(source)
    if source.name == "config.json" and dtype is not None:
        target.write_bytes(_with_dtype(source, dtype))
    else:
        shutil.copyfile(source, target)


def _fill_parts(folder: Path, average: Average, parts: Mapping[str, Path]) -> None:
    """Write weights in several files; copy what else is in the newest checkpoint's folder."""
    newest = average.sources[-1]
    targets = {path: folder / path.relative_to(newest.path) for path in parts.values()}
    for source in sorted(newest.path.rglob("*")):
        is_left = source in targets or any(fnmatch(source.name, one) for one in _OF_TRAINING)
        if source.is_file() and not is_left:
            _check_link(source, newest.path)
            target = folder / source.relative_to(newest.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy(source, target, average.dtype)
    for prefix, path in parts.items():
        targets[path].parent.mkdir(parents=True, exist_ok=True)
        cut = len(prefix)
        own = {name[cut:]: one for name, one in average.names.items() if name.startswith(prefix)}
        replaced = {n[cut:]: one for n, one in average.replaced.items() if n.startswith(prefix)}
        part = replace(average, names=own, replaced=replaced)
        with targets[path].open("wb") as file:
            part.write(file) if path.suffix == SUFFIX else _write_torch(part, file, path)


def _fill_distributed(folder: Path, average: Average) -> None:
    """Write what `torch.distributed.checkpoint` loads; whole in memory once.

    Under the key `model`, or the keys of several state dicts, which begin the names. Megatron has
    no such key, and more values among the tensors; OLMo-core has a folder inside.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    class Planner(DefaultSavePlanner):
        def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002
            is_written = isinstance(object, BytesIO)
            return object if is_written else super().transform_object(write_item, object)

    newest, state = average.sources[-1], dict[str, Any](average.tensors())
    is_megatrons = newest.kind == "distributed" and (newest.path / MEGATRON).is_file()
    if is_megatrons:
        values = distributed.values_in(newest.path)
        state |= {
            key: value for key, value in values.items() if not key.startswith(distributed.OPTIMIZER)
        }
    content = state if newest.groups or is_megatrons else {"model": state}
    place = folder / OLMO if (newest.path / OLMO).is_dir() else folder
    for name in _BESIDE_DISTRIBUTED if newest.path.is_dir() else ():
        if (source := newest.path / name).is_file():
            _check_link(source, newest.path)
            _copy(source, folder / name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one process saves, as it should
        writer, planner = FileSystemWriter(place), Planner(flatten_state_dict=not is_megatrons)
        dcp.save(content, storage_writer=writer, planner=planner, no_dist=True)  # type: ignore[attr-defined]


def _beside(newest: Checkpoint) -> list[Path]:
    """List files of the checkpoint and, where it has none, of the run's folder above it."""
    if newest.kind not in ("folder", "adapter"):
        return []
    folder = newest.folder
    found: dict[str, Path] = {}
    for place in (real(folder).parent, folder):
        for path in sorted(place.iterdir()):
            is_wanted = any(fnmatch(path.name, pattern) for pattern in BESIDE)
            # code next to the checkpoints is the user's script; only in them is it the model's
            if path.is_file() and is_wanted and (place == folder or path.suffix != ".py"):
                found[path.name] = path
    for path in found.values():
        _check_link(path, folder)
    return list(found.values())


def _check_link(path: Path, folder: Path) -> None:
    """Refuse what a stranger's checkpoint would take along of ours by a link.

    In the cache of the Hugging Face hub every file is a link.
    """
    place, run = real(path), real(folder).parent
    is_cached = run.name == "snapshots" and run.parent / "blobs" in place.parents
    if run not in place.parents and not is_cached and mirror_of(path) is None:
        raise CheckpointError(f"{path}: is a link out of its run; put the file itself there")


def check_beside(like: Checkpoint, dtype: str | None) -> None:
    """Refuse now what `fill` would refuse in the end."""
    for path in _beside(like):
        if path.name == "config.json" and dtype is not None:
            _with_dtype(path, dtype)


def _with_dtype(path: Path, dtype: str) -> bytes:
    """config.json says in which dtype the weights are, and loaders go by it."""
    config = read_json(path)
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = dtype
    # escaped as transformers does it; half a character has no other way into a file
    return (json.dumps(config, indent=2) + "\n").encode()


def _write_torch(average: Average, file: IO[bytes], like: Path | None = None) -> None:
    """A PyTorch file; the whole average is held in memory for it.

    Everything else that the file `like` holds is taken along (hyper-parameters, versions), but for
    the state of the training and copies of the weights.
    """
    import torch

    tensors = dict(average.tensors())
    content: Any = tensors
    if like is not None:
        state = pytorch.find_state(like, pytorch.load(like), average.state_key)
        content = state.filled(tensors)
    about = {"sewa": dict(average.metadata)}
    if content.keys() - tensors.keys():
        content.update(about)
    else:  # load_state_dict takes no other keys, but an attribute
        content = OrderedDict(content)
        content._metadata = about
    try:
        torch.save(content, file, pickle_module=inert)
    except RecursionError:
        raise CheckpointError(
            f"{like}: is nested too deeply to be written again; write a {SUFFIX} file"
        ) from None
    except RuntimeError as error:  # its writer has words of its own for a full disk
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise
