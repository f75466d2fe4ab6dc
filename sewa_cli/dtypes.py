"""The same dtypes under the names of safetensors, NumPy and torch.

NumPy has no bfloat16 or float8; `ml_dtypes` adds them. Only the functions at the end import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]

# safetensors' words
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
RESERVED = "__metadata__"  # no tensor of a safetensors file can be called that
WORDS = {dtype.name: word for word, dtype in DTYPES.items()}  # NumPy and torch share these names


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    import torch

    found = getattr(torch, dtype.name)
    assert isinstance(found, torch.dtype)
    return found


def as_tensor(array: Array) -> torch.Tensor:
    """Return a tensor of the same memory, which must be writable and contiguous."""
    import torch

    raw = torch.from_numpy(array.reshape(-1).view(np.uint8))
    return raw.view(torch_dtype(array.dtype)).reshape(array.shape)


def as_array(tensor: torch.Tensor) -> Array:
    """Return an array, of the same memory if the tensor is contiguous and on the CPU."""
    import torch

    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    name = str(tensor.dtype).removeprefix("torch.")
    return raw.view(DTYPES[WORDS[name]]).reshape(tuple(tensor.shape))
