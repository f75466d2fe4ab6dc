"""Data files of the ready-made tasks: the same rows from every format, one line for bad ones."""

import csv
import gzip
import io
import json
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from sewa_cli.errors import TaskError
from sewa_cli.task.ready.args import DataArgs
from sewa_cli.task.ready.batches import open_image
from sewa_cli.task.ready.tables import Row, open_table

ROWS = [{"text": f"a, “quoted”\nline {i}", "label": f"class {i % 3}"} for i in range(25)]


def write_jsonl(path):
    path = path / "rows.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    path.write_text("\n\n".join(lines), encoding="utf-8")  # blank lines, none at the end
    return path


def write_csv(path):
    path = path / "rows.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:  # as Excel writes it
        writer = csv.DictWriter(file, ["label", "text"])
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def write_parquet(path):
    pq.write_table(pa.Table.from_pylist(ROWS), path / "rows.parquet", row_group_size=4)
    return path / "rows.parquet"


def write_saved(path):
    datasets.Dataset.from_list(ROWS).save_to_disk(path / "saved", num_shards=2)
    return path / "saved"


def write_lines(path):
    """Write lines under a name that promises a list, with a byte-order mark."""
    path = path / "rows.json"
    path.write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8-sig")
    return path


def write_json(path):
    path = path / "rows.json"
    path.write_text(json.dumps(ROWS, indent=2), encoding="utf-8-sig")
    return path


def write_gz(path):
    path = path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
    return path


def write_zst(path):
    path = path / "rows.jsonl.zst"
    with pa.output_stream(path, compression="zstd") as file:
        file.write("".join(json.dumps(row) + "\n" for row in ROWS).encode())
    return path


def write_csv_gz(path):
    plain = write_csv(path)
    path = path / "rows.csv.gz"
    path.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return path


WRITERS = [
    *(write_jsonl, write_lines, write_json, write_gz, write_zst),
    *(write_csv, write_csv_gz, write_parquet, write_saved),
]


@pytest.mark.parametrize("write", WRITERS)
def test_every_format_gives_the_same_rows_in_the_order_asked_for(write, tmp_path):
    path = write(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in sorted(tmp_path.rglob("*"))}
    table = open_table(path)
    assert len(table) == 25
    order = [24, 0, 7, 3]
    rows = table.take(order, ["text", "label"])
    assert [dict(row.values) for row in rows] == [ROWS[i] for i in order]
    assert all(str(path) in row.where for row in rows)
    with pytest.raises(TaskError, match=r"no column 'txt'; there are (text, label|label, text)$"):
        table.take([0], ["txt"])[0].get("txt")
    # nothing was written next to the user's data
    assert {p: p.stat().st_mtime_ns for p in sorted(tmp_path.rglob("*"))} == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "holds no rows"),
        ("a.csv", b"text,label\n", "holds no rows"),
        ("a.csv", b"text,label\n\xff\xfe,b\n", "cannot be read"),
        ("a.parquet", b"PAR1", "cannot be read"),
        ("a.json", b'[{"text": ', "cannot be read"),
        ("a.json", b"[" * 200_000, "cannot be read: is nested more than 100 levels deep"),
        ("a.jsonl.gz", b"no gzip", "cannot be read: Not a gzipped file"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9],
            "cannot be read: Compressed",
        ),
        ("a.jsonl.zst", b"no zstd", "cannot be read"),
        ("a.parquet.gz", b"PAR1", "must be a folder or one of .jsonl, .ndjson, .json, .csv"),
        ("a.xlsx", b"words", "must be a folder or one of .jsonl, .ndjson, .json, .csv, .parquet"),
    ],
)
def test_a_bad_file_is_reported_in_one_line(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError) as caught:
        open_table(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path / name}: {message}")
    assert "\n" not in str(caught.value)


def test_a_line_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(TaskError, match=r"a\.jsonl: row 2: is not JSON"):
        open_table(path).take([0, 1], ["text"])


def test_a_folder_of_splits_asks_for_one_of_them(tmp_path):
    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "all")
    with pytest.raises(TaskError, match=r"holds splits; name one of them: .*test, .*train$"):
        open_table(tmp_path / "all")
    assert len(open_table(tmp_path / "all" / "test")) == 25


def test_texts_are_files_each_of_them_one(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.md").write_text("# zwei\n\nWörter", encoding="utf-8")
    (tmp_path / "a.txt").write_text("one\ntwo\n", encoding="utf-8-sig")
    (tmp_path / "picture.png").write_bytes(b"no text")
    table = open_table(tmp_path)
    rows = table.take([1, 0], ["text"])
    assert [row.get("text") for row in rows] == ["# zwei\n\nWörter", "one\ntwo\n"]
    assert rows[0].where == str(tmp_path / "deep" / "b.md")
    [alone] = open_table(tmp_path / "a.txt").take([0], ["text"])
    assert alone.get("text") == "one\ntwo\n"
    (tmp_path / "a.txt").write_bytes(b"\xff\xfeo\0n\0e\0")
    with pytest.raises(TaskError, match=r"a\.txt: cannot be read: 'utf-8' codec"):
        open_table(tmp_path).take([0], ["text"])


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    path = write_parquet(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TaskError, match="needs pyarrow: pip install pyarrow"):
        open_table(path)


def test_images_are_read_from_paths_bytes_and_saved_datasets(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (4, 5, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "one.png")
    content = (tmp_path / "one.png").read_bytes()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    saved = datasets.Dataset.from_list([{"image": {"bytes": content}, "label": 0}], features)
    saved.save_to_disk(tmp_path / "saved")
    [row] = open_table(tmp_path / "saved").take([0], ["image", "label"])
    values = ["one.png", tmp_path / "one.png", {"bytes": content, "path": None}]
    values += [{"bytes": None, "path": "one.png"}, io.BytesIO(content)]
    for found in [row, *(Row("here", {"image": value}) for value in values)]:
        assert np.array_equal(np.asarray(open_image(found, "image", tmp_path)), pixels)


@given(st.integers(2, 400), st.floats(0.01, 0.99), st.integers(0, 5), st.integers(1, 50))
def test_a_split_has_every_row_once_and_limit_only_shortens_it(rows, fraction, seed, limit):
    def parts(limit):
        args = DataArgs.model_construct(
            data=Path("x"),
            selection=None,
            heldout=None,
            training=None,
            heldout_fraction=fraction,
            seed=seed,
            limit=limit,
        )
        return [args.draw(part, rows, []) for part in ("selection", "heldout")]

    try:
        selection, heldout = parts(None)
    except TaskError:
        assert round(rows * fraction) in (0, rows)
        return
    assert sorted(selection + heldout) == list(range(rows))
    assert len(heldout) == round(rows * fraction)
    assert parts(limit) == [selection[:limit], heldout[:limit]]
