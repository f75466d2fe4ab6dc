"""Files and folders appear whole or not at all, and what the dead have left is removed.

tests/faults kills whole commands at every step; here is what the writer itself promises.
"""

import errno
import os
import subprocess
import sys

import pytest

from sewa_cli import publish as publishing
from sewa_cli.publish import new_file, publish, sync, temporary

OURS = f".sewa-{publishing._HOST}-01234567"
ELSEWHERE = ".sewa-00000000-01234567"


@pytest.fixture
def lacks(monkeypatch):
    """Take from the system what not every system has."""

    def without(what):
        if what in ("exchange", "all"):
            monkeypatch.setattr(publishing, "_exchange", lambda *_: False)
        if what in ("locks", "all"):
            monkeypatch.setattr(publishing, "_lock", lambda *_, **__: False)

    return without


systems = pytest.mark.parametrize("lacking", ["nothing", "exchange", "locks", "all"])


def contents(folder):
    """Return all that is there, hidden or not."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def write(path, text, force=False):
    with new_file(path, force) as file:
        file.write(text)


def write_folder(path, text, force=False):
    with temporary(path.parent, is_folder=True) as made:
        (made / "inside").write_bytes(text)
        sync(made)
        publish(made, path, force)


@systems
def test_a_file_and_a_folder_appear_whole_and_replace_if_forced(tmp_path, lacks, lacking):
    lacks(lacking)
    for text in (b"old", b"new"):
        with new_file(tmp_path / "out", force=text == b"new") as file:
            file.write(text)
            assert text not in contents(tmp_path).values()
        write_folder(tmp_path / "folder", text, force=text == b"new")
        assert contents(tmp_path) == {"out": text, "folder": b"", "folder/inside": text}


@systems
def test_what_appears_meanwhile_is_not_replaced(tmp_path, lacks, lacking):
    lacks(lacking)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "inside").write_bytes(b"theirs")
    for writer in (write, write_folder):
        with pytest.raises(FileExistsError):
            writer(tmp_path / "out", b"ours")
    assert contents(tmp_path) == {"out": b"", "out/inside": b"theirs"}


def test_without_exchange_a_failing_rename_puts_the_old_folder_back(tmp_path, lacks, monkeypatch):
    lacks("exchange")
    write_folder(tmp_path / "out", b"old")
    real, calls = os.rename, iter(range(10))

    def rename(source, target):
        if next(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="Input/output"):
        write_folder(tmp_path / "out", b"new", force=True)
    assert contents(tmp_path) == {"out": b"", "out/inside": b"old"}


def test_the_bytes_are_on_the_disk_before_they_get_their_name(tmp_path, monkeypatch):
    path, real, synced = tmp_path / "out.bin", os.fsync, []

    def fsync(descriptor):
        synced.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size, path.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write(path, b"new")
    assert synced[0] == (path.stat().st_ino, 3, False)
    assert (tmp_path.stat().st_ino, tmp_path.stat().st_size, True) in synced


def test_an_output_has_the_permissions_that_any_new_file_has(tmp_path):
    """Temporary files of other tools are for their owner only; a colleague would find it shut."""
    (tmp_path / "usual").touch()
    (tmp_path / "usual-folder").mkdir()
    write(tmp_path / "out", b"new")
    write_folder(tmp_path / "folder", b"new")
    for ours, usual in (("out", "usual"), ("folder", "usual-folder"), ("folder/inside", "usual")):
        assert (tmp_path / ours).stat().st_mode == (tmp_path / usual).stat().st_mode


def test_what_a_killed_process_left_is_removed_but_not_what_is_being_written(tmp_path):
    program = (
        "import sys, time, pathlib\nfrom sewa_cli.publish import temporary\n"
        "place = pathlib.Path(sys.argv[1])\n"
        "with temporary(place) as file, temporary(place, True) as folder:\n"
        "    (folder / 'inside').write_text('half')\n"
        "    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        write(tmp_path / "out", b"new")
        assert len(contents(tmp_path)) == 4
        process.kill()
    write(tmp_path / "out", b"newer", force=True)
    assert contents(tmp_path) == {"out": b"newer"}


def test_what_another_host_writes_is_left_alone_for_a_day(tmp_path):
    """Its lock may not be seen here."""
    (tmp_path / ELSEWHERE).write_bytes(b"half")
    write(tmp_path / "out", b"new")
    assert contents(tmp_path).keys() == {"out", ELSEWHERE}
    os.utime(tmp_path / ELSEWHERE, (0, 0))
    write(tmp_path / "out", b"new", force=True)
    assert contents(tmp_path).keys() == {"out"}


def test_what_only_looks_like_a_leftover_is_left_alone(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(b"mine")
    (tmp_path / OURS).symlink_to(tmp_path / "elsewhere")
    (tmp_path / OURS[:-1]).mkdir()
    (tmp_path / ".sewa-notes").write_bytes(b"mine")
    before = contents(tmp_path)
    write(tmp_path / "out", b"new")
    assert contents(tmp_path) == before | {"out": b"new"}
