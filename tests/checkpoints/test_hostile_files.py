"""Files that would hang, blow up or crash whoever reads them: each is one line, at once."""

import json
import os
import socket
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sewa_cli import files
from sewa_cli.checkpoints.checkpoint import MOST_TENSORS

DEEP = "[" * 100_000 + "]" * 100_000
ENDLESS = "9" * 5000  # digits: more than Python reads into an int


def save(path, **metadata):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"w": torch.ones(6)}, path, metadata or None)
    return path


def check_refused(sewa, folder, words, *arguments):
    """Exit code 3 and one short line with these words; nothing was written."""
    before = sorted(folder.rglob("*"))
    ended = sewa(*arguments)
    assert (ended.code, ended.out) == (3, ""), ended.err
    assert words in ended.error
    assert len(ended.error) < 700
    assert sorted(folder.rglob("*")) == before


# ---- not a file at all ------------------------------------------------------------------------


def listen(path):
    with socket.socket(socket.AF_UNIX) as server:
        before = Path.cwd()
        os.chdir(path.parent)  # the name of a socket must be short
        server.bind(path.name)
        os.chdir(before)


KINDS = {
    "a pipe": os.mkfifo,
    "a socket": listen,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["a.safetensors", "a.pt", "a.safetensors.index.json"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_file_is_refused_and_never_waited_for(tmp_path, sewa, kind, name):
    KINDS[kind](tmp_path / name)
    sound = save(tmp_path / "b.safetensors")
    words = f"{name}: is {kind}, not a file"
    check_refused(sewa, tmp_path, words, "average", tmp_path / name, sound, "-o", "o.pt")


def test_a_pipe_put_in_the_place_of_a_file_is_not_waited_for(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(files, "check_regular", lambda _: None)  # as if it was a file just now
    with pytest.raises(OSError, match="is a pipe"):
        files.read_bytes(tmp_path / "pipe", 100)


# ---- more than can be read --------------------------------------------------------------------


def sparse(path, start, size):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(start)
    os.truncate(path, size)
    return path


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name", ["m.safetensors.index.json", "d/.metadata", "a/trainer_state.json"]
)
def test_small_files_without_end_are_not_read(tmp_path, sewa, name):
    save(tmp_path / "a/model.safetensors")
    path = sparse(tmp_path / name, b"{", 2**40)
    where = path if path.suffix == ".json" and "/" not in name else path.parent
    check_refused(sewa, tmp_path, "MiB, the largest that sewa reads", "inspect", where)


@pytest.mark.timeout(60)
def test_a_file_too_large_to_be_mapped_is_one_line(tmp_path, sewa):
    values = 2**40
    entry = {"dtype": "F32", "shape": [values], "data_offsets": [0, 4 * values]}
    header = json.dumps({"w": entry}).encode()
    start = struct.pack("<Q", len(header)) + header
    path = sparse(tmp_path / "a.safetensors", start, len(start) + 4 * values)
    check_refused(sewa, tmp_path, "a.safetensors: w: cannot be read", "inspect", path)


# ---- what is in them --------------------------------------------------------------------------


def raw(path, header, body=bytes(24)):
    data = header.encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data + body)
    return path


TENSOR = '"w": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}'


@pytest.mark.parametrize(
    ("header", "body", "words"),
    [
        (f'{{"__metadata__": {DEEP}, {TENSOR}}}', 24, "not a complete safetensors file"),
        (f'{{"__metadata__": {{"step": "{ENDLESS}"}}, {TENSOR}}}', 24, "expected a whole number"),
        (f'{{"__metadata__": {{"step": "{2**63}"}}, {TENSOR}}}', 24, "2^63 or more"),
        (f'{{"__metadata__": {{"step": "{"x" * 9999}"}}, {TENSOR}}}', 24, "whole number"),
        (
            f'{{"__metadata__": {{"sewa_mean_steps": "{2**63}"}}, {TENSOR}}}',
            24,
            "must be 1 or more",
        ),
        (
            '{"w": {"dtype": "F32", "shape": [0, 18446744073709551615], "data_offsets": [0, 0]}}',
            0,
            "w: cannot be read",
        ),
        (TENSOR.join("{}").replace("F32", "F" * 9999), 24, "unknown variant"),
    ],
)
def test_a_forged_header_is_one_short_line(tmp_path, sewa, header, body, words):
    path = raw(tmp_path / "a.safetensors", header, bytes(body))
    check_refused(sewa, tmp_path, words, "inspect", path)


@pytest.mark.parametrize(
    "state",
    [
        DEEP,
        '{"global_step": Infinity}',
        f'{{"global_step": {ENDLESS}}}',
        f'{{"global_step": {2**63}}}',
    ],
)
def test_a_trainer_state_without_sense_is_one_line(tmp_path, sewa, state):
    save(tmp_path / "checkpoint-1/model.safetensors")
    (tmp_path / "checkpoint-1/trainer_state.json").write_text(state)
    check_refused(sewa, tmp_path, "checkpoint-1", "inspect", tmp_path / "checkpoint-1")


def test_a_name_of_many_digits_is_no_step(tmp_path, sewa):
    path = save(tmp_path / f"step-{'9' * 200}.safetensors")
    check_refused(sewa, tmp_path, "its step is 2^63 or more", "inspect", path)


@pytest.mark.parametrize("name", ["\\u0000", "a\\ud800", "x" * 300])
def test_an_index_may_not_name_what_no_file_is_called(tmp_path, sewa, name):
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(f'{{"weight_map": {{"w": "{name}"}}}}')
    check_refused(sewa, tmp_path, "m.safetensors.index.json: ", "inspect", index)


def test_a_pytorch_file_with_a_tensor_that_safetensors_cannot_hold_is_refused(
    tmp_path, monkeypatch, sewa
):
    monkeypatch.chdir(tmp_path)
    for n in (1, 2):
        torch.save({"__metadata__": torch.ones(2), "w": torch.ones(2)}, f"step-{n}.pt")
    ended = sewa("average", "step-1.pt", "step-2.pt", "-o", "out.safetensors")
    assert ended.code == 3
    assert "step-1.pt: __metadata__: no safetensors file can hold it; rename it" in ended.error
    assert not Path("out.safetensors").exists()


# ---- files that would take minutes and all memory ------------------------------------------------


def test_json_of_endless_values_is_refused_before_they_are_parsed(tmp_path, sewa):
    many = "[" + "[]," * (files.MOST_VALUES // 2) + "[]]"
    with pytest.raises(ValueError, match="has more than"):
        files.parse_json(many)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(f'{{"weight_map": {many}}}')
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    save_file({"w": torch.zeros(1)}, folder / "model.safetensors")
    (folder / "trainer_state.json").write_text(f'{{"global_step": 1, "log_history": {many}}}')
    for target, name in ((index, index), (folder, folder / "trainer_state.json")):
        ended = sewa("inspect", target)
        assert ended.code == 3
        assert ended.error.startswith(f"{name}: has more than 4,000,000 values")


@pytest.mark.parametrize("command", [["inspect"], ["average", "-o", "out"]])
def test_a_safetensors_file_of_endless_tensors_is_refused(tmp_path, sewa, command):
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    tensors = {f"t{i}": empty for i in range(MOST_TENSORS + 1)}
    raw(tmp_path / "a-1.safetensors", json.dumps(tensors), b"")
    ended = sewa(*command, tmp_path / "a-1.safetensors")
    assert ended.code == 3
    assert "has 200,001 tensors; sewa reads at most 200,000" in ended.error
    raw(tmp_path / "a-1.safetensors", "{}".ljust(33 * 2**20), b"")
    for target in (tmp_path, tmp_path / "a-1.safetensors"):
        ended = sewa(*command, target)
        assert ended.code == 3
        assert "has a header larger than 32.0 MiB" in ended.error


def test_an_archive_whose_pickle_is_a_hole_is_not_read(tmp_path, sewa):
    path = tmp_path / "a-1.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", bytes(65 * 2**20))
        file.writestr("a/version", "3\n")
    ended = sewa("inspect", path)
    assert ended.code == 3
    assert "it holds plain values without end" in ended.error


@pytest.mark.parametrize(("a", "b"), [((2, 6), (6, 3)), ((6,), (6,)), ((), ())])
def test_an_adapter_whose_factors_have_no_product_is_refused(tmp_path, sewa, a, b):
    for step in (1, 2):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        factors = {"q.lora_A.weight": torch.ones(a), "q.lora_B.weight": torch.ones(b)}
        save_file(factors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    words = "q.lora_A.weight, F32"
    check_refused(sewa, tmp_path, words, "average", tmp_path / "run", "-o", tmp_path / "out")


@pytest.mark.parametrize("content", ['[{"path": ".."}]', '[{"path": "/etc"}]', "[{", DEEP])
def test_modules_of_another_folder_are_refused(tmp_path, sewa, content):
    for step in (1, 2):
        inside = save(tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors").parent
        (inside / "modules.json").write_text(content)
    check_refused(sewa, tmp_path, "modules.json", "inspect", tmp_path / "run")
