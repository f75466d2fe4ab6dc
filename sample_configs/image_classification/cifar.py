"""CIFAR-10 and CIFAR-100 as their authors publish them: binary files, or Python pickles.

    images, labels = load("cifar-10-batches-bin", "training").take(0, 1000)

Which of the four it is follows from the names of the files in the folder.
"""

import pickle
from pathlib import Path

import numpy as np

from sewa_cli.errors import TaskError

DATA = Path(__file__).resolve().parent.parent / "data"
PIXELS = 3 * 32 * 32


def load(data, part):
    """The images of a part, "training" or "test", of a folder or of a name in ../data."""
    folder, classes, read, files = recognise(data)
    paths = [folder / name for name in files[part]]
    return Images([(path, *read(path, classes)) for path in paths], classes)


class Images:
    """Images of several files in a row. Binary files are read where images are taken only."""

    def __init__(self, files, classes):
        self.files, self.classes = files, classes

    def __len__(self):
        return sum(len(labels) for path, images, labels in self.files)

    def take(self, first, last):
        """Images [n, 3, 32, 32] of bytes, red, green and blue, and labels [n] of int64."""
        taken = []
        for path, images, labels in self.files:
            here = slice(max(first, 0), max(last, 0))
            taken.append((images[here], labels[here].astype(np.int64)))
            if ((taken[-1][1] < 0) | (taken[-1][1] >= self.classes)).any():
                raise TaskError(f"{path}: has a label that is not 0 to {self.classes - 1}")
            first, last = first - len(labels), last - len(labels)
        images, labels = (np.concatenate(arrays) for arrays in zip(*taken, strict=True))
        return images.reshape(-1, 3, 32, 32), labels


def count_classes(data):
    return recognise(data)[1]


def recognise(data):
    """The folder, the number of classes, the function that reads a file, and the files' names."""
    folder = Path(data) if "/" in str(data) else DATA / data
    if not folder.is_dir():
        raise TaskError(f"{folder}: no such folder; `make data` at the root of sewa fetches it")
    for classes, read, files in LAYOUTS:
        names = files["training"] + files["test"]
        missing = [name for name in names if not (folder / name).is_file()]
        if not missing:
            return folder, classes, read, files
        if len(missing) < len(names):
            raise TaskError(f"{folder}: CIFAR-{classes} without {', '.join(missing)}")
    raise TaskError(
        f"{folder}: has the files of neither CIFAR-10 (data_batch_1.bin or data_batch_1, …) "
        "nor CIFAR-100 (train.bin or train, …)"
    )


def read_binary(path, classes):
    """Records of a label (CIFAR-100: the coarse one, then the fine one) and 3072 pixels."""
    before = 1 if classes == 10 else 2
    size, length = path.stat().st_size, before + PIXELS
    if not size or size % length:
        raise TaskError(f"{path}: {size} bytes are not whole records of {length}; is it cut short?")
    records = np.memmap(path, np.uint8, "r").reshape(-1, length)
    return records[:, before:], records[:, before - 1]


def read_pickle(path, classes):
    """A dictionary that Python 2 pickled: its strings are bytes here."""
    key = b"labels" if classes == 10 else b"fine_labels"
    try:
        with path.open("rb") as file:
            content = ArraysOnly(file, encoding="bytes").load()
    except Exception as error:  # a broken pickle can raise anything
        raise TaskError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict) or not {b"data", key} <= content.keys():
        raise TaskError(f"{path}: is not a dictionary with 'data' and {key.decode()!r}")
    images, labels = content[b"data"], np.asarray(content[key])
    fits = isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.ndim == 2
    if not fits or images.shape[1] != PIXELS:
        raise TaskError(f"{path}: 'data' is not an array of bytes with {PIXELS} columns")
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise TaskError(f"{path}: {key.decode()!r} is not one whole number for each image")
    return images, labels


class ArraysOnly(pickle.Unpickler):
    """Makes plain values and numpy arrays, and nothing else that a pickle may ask for."""

    ADMITTED = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module, name):
        if (module, name) not in self.ADMITTED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which CIFAR does not need")
        return self.ADMITTED[module, name]


FIVE = [f"data_batch_{number}" for number in range(1, 6)]
LAYOUTS = [
    (10, read_binary, {"training": [f"{n}.bin" for n in FIVE], "test": ["test_batch.bin"]}),
    (10, read_pickle, {"training": FIVE, "test": ["test_batch"]}),
    (100, read_binary, {"training": ["train.bin"], "test": ["test.bin"]}),
    (100, read_pickle, {"training": ["train"], "test": ["test"]}),
]
