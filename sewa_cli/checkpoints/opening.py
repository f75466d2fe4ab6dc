"""Opens one checkpoint, file or folder: which format it is, its step, what was logged at it."""

from __future__ import annotations

from pathlib import Path

from sewa_cli.checkpoints import adapters, distributed, means, modules, pytorch
from sewa_cli.checkpoints import safetensors as tensor_files
from sewa_cli.checkpoints.checkpoint import (
    Checkpoint,
    Header,
    Kind,
    Reads,
    plain_numbers,
    read_json,
    reading,
    stamp_of,
)
from sewa_cli.checkpoints.order import scheme, step_in
from sewa_cli.dtypes import DTYPES, RESERVED
from sewa_cli.errors import CheckpointError, Unfinished
from sewa_cli.text import is_utf8, shown

MODEL = "model.safetensors"
MODEL_BIN = "pytorch_model.bin"
TRAINER_STATE = "trainer_state.json"
FSDP = "pytorch_model_fsdp_0"  # where accelerate puts a sharded model inside a checkpoint
OLMO = "model_and_optim"  # where OLMo-core puts it
# of several in one folder, the first counts
FOLDER_WEIGHTS: dict[str, Kind] = {
    distributed.METADATA: "distributed",
    f"{FSDP}/{distributed.METADATA}": "distributed",
    f"{OLMO}/{distributed.METADATA}": "distributed",
    adapters.WEIGHTS: "adapter",
    modules.SPEECHBRAIN: "folder",
    MODEL: "folder",
    MODEL + tensor_files.INDEX: "folder",
    MODEL_BIN: "folder",
    MODEL_BIN + tensor_files.INDEX: "folder",
    modules.SENTENCES: "folder",
}


def weights_in(folder: Path) -> Path | None:
    """The file that makes a folder a checkpoint; None: it is not one."""
    return next((p for name in FOLDER_WEIGHTS if (p := folder / name).is_file()), None)


def kind_of(path: Path) -> Kind:
    """Return what it is by names alone."""
    if path.is_dir():
        weights = weights_in(path)
        if weights is None:
            return "folder"
        return FOLDER_WEIGHTS[str(weights.relative_to(path))]
    if path.name == means.IN_FOLDER and weights_in(path.parent) is not None:
        kind = kind_of(path.parent)
        return kind if kind in ("folder", "adapter") else "file"
    if path.name.endswith(tensor_files.INDEX):
        return "set"
    return "torch" if path.suffix in pytorch.SUFFIXES else "file"


def open_checkpoint(path: Path, reads: Reads, state_key: str | None = None) -> Checkpoint:
    """Read the header of one file, or of a folder that is one checkpoint."""
    if not is_utf8(str(path)):
        raise CheckpointError(f"{str(path)!r}: is not a UTF-8 name; rename it")
    with reading(path):
        path.stat()
    weights = weights_in(path) if path.is_dir() else path
    if weights is None:
        raise Unfinished(
            f"{path}: is a folder without {MODEL}, {adapters.WEIGHTS} or {MODEL_BIN}; name the "
            "files in it, or it alone"
        )
    first = stamp_of(weights)  # before it is read; the other files are known only afterwards
    header = _read_header(path, weights, state_key)
    stamps = {file: stamp_of(file) for file in header.files} | {weights: first}
    if not header.tensors:
        raise CheckpointError(f"{path}: holds no tensors; name a file with weights")
    for name, info in header.tensors.items():
        if not is_utf8(name):
            raise CheckpointError(
                f"{path}: {shown(name, 100)}: is not a UTF-8 name; rename the tensor"
            )
        if name == RESERVED:
            raise CheckpointError(f"{path}: {name}: no safetensors file can hold it; rename it")
        if info.dtype not in DTYPES:  # complex, or several values packed in a byte
            raise CheckpointError(
                f"{path}: {shown(name, 100)}: {info.dtype} tensors cannot be averaged; "
                "save them as another dtype"
            )
    step, metrics = header.step, header.metrics
    is_inside = path.name == means.IN_FOLDER
    if path.is_dir() or is_inside:
        logged_step, logged = _trainer_state(path.parent if is_inside else path)
        step = logged_step if step is None else step
        metrics = logged | metrics
    is_recorded = step is not None
    step = step if is_recorded else step_in(path)
    if header.mean_steps is not None and not 0 < header.mean_steps < 2**63:
        raise CheckpointError(f"{path}: metadata sewa_mean_steps must be 1 or more; save it again")
    if step is not None and abs(step) >= 2**63:
        raise CheckpointError(
            f"{path}: its step is 2^63 or more, which no trainer counts to; correct its name or "
            "metadata"
        )
    return Checkpoint(
        **{**vars(header), "step": step, "metrics": metrics},
        path=path,
        size=sum(stamp.size for stamp in stamps.values()),
        reads=reads,
        kind=kind_of(path),
        scheme=None if is_recorded or step is None else scheme(path),
        stamps=stamps,
    )


def _read_header(path: Path, weights: Path, state_key: str | None) -> Header:
    if weights.name == distributed.METADATA:
        return distributed.open_folder(weights.parent, state_key)
    if weights.name == adapters.WEIGHTS and path.is_dir():
        adapters.read_config(path)  # now, not when the average is written
    if path.is_dir() and (parts := modules.parts_of(path)):
        return modules.open_folder(path, parts, state_key)
    if weights.name == MODEL_BIN + tensor_files.INDEX:
        return pytorch.open_set(weights, state_key)
    if weights.name.endswith(tensor_files.INDEX):
        return tensor_files.open_set(weights)
    if weights.suffix in pytorch.SUFFIXES:
        return pytorch.open_file(weights, state_key)
    try:
        return tensor_files.open_file(weights)
    except Unfinished:
        if weights.suffix == tensor_files.SUFFIX:
            raise
        suffixes = ", ".join((tensor_files.SUFFIX, *pytorch.SUFFIXES))
        raise CheckpointError(
            f"{path}: unknown format; sewa reads {suffixes}, sets of them by their index, and "
            "folders of weights"
        ) from None


def files_of(path: Path) -> tuple[Path, ...]:
    """The files that hold or index a checkpoint's weights."""
    weights = (weights_in(path) or path) if path.is_dir() else path
    if weights.name == distributed.METADATA:
        return distributed.files_in(weights.parent)
    if path.is_dir() and (parts := modules.parts_of(path)):
        return modules.files_of(path, parts)
    if weights.name.endswith(tensor_files.INDEX):
        return (weights, *tensor_files.shards_of(tensor_files.read_index(weights)))
    return (weights,)


def _trainer_state(folder: Path) -> tuple[int | None, dict[str, float]]:
    """The step, and all metrics that the Hugging Face Trainer logged at it."""
    path = folder / TRAINER_STATE
    if not path.is_file():
        return None, {}
    state = read_json(path)
    try:
        step = int(state["global_step"])
        entries = [e for e in state.get("log_history", ()) if e.get("step") == step]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise Unfinished(f"{path}: is not a complete trainer state; save it again") from error
    metrics = {name: value for entry in entries for name, value in plain_numbers(entry).items()}
    metrics.pop("step", None)
    return step, metrics
