"""Recordings for speech models: WAV files, as the checkpoint's feature extractor sees them."""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sewa_cli.errors import TaskError
from sewa_cli.task.ready.tables import Row

Sound = str | bytes  # a path, or what is in the file


def sound_of(row: Row, column: str, folder: Path) -> Sound:
    """Return a path (relative to `folder`), or the bytes that `datasets` keeps."""
    value = row.get(column)
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise TaskError(f"{row.where}: {column}: must be a path, found {type(value).__name__}")
    return str(folder / value)


def features_of(extractor: Any, sounds: Sequence[Sound]) -> Tensor:
    """Return what a model hears, [n, …]."""
    rate = extractor.sampling_rate
    waves = [_read(sound, rate) for sound in sounds]
    found: Tensor = extractor(waves, sampling_rate=rate, return_tensors="pt")["input_features"]
    return found


def _read(sound: Sound, rate: int) -> NDArray[np.float32]:
    name = "a recording" if isinstance(sound, bytes) else sound
    wanted = f"must be a WAV file of 16 bits at {rate} Hz; convert it: ffmpeg -i IN -ar {rate} OUT"
    try:
        with wave.open(io.BytesIO(sound) if isinstance(sound, bytes) else sound) as file:
            kind, channels = (file.getframerate(), file.getsampwidth()), file.getnchannels()
            frames = file.readframes(file.getnframes())
    except OSError as error:
        raise TaskError(f"{name}: {error.strerror}") from error
    except (wave.Error, EOFError) as error:
        raise TaskError(f"{name}: {wanted}") from error
    if kind != (rate, 2):
        raise TaskError(f"{name}: {wanted}")
    samples = np.frombuffer(frames, "<i2").astype(np.float32).reshape(-1, channels)
    heard: NDArray[np.float32] = samples.mean(1) / np.float32(2**15)
    return heard
