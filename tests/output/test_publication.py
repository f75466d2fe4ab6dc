"""Publishing: files and folders appear whole, together, or not at all; the dead are cleared away.

tests/faults kills whole commands at every step; here is what each part promises.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sewa_cli import system
from sewa_cli.errors import OutputError
from sewa_cli.output import journal as journals
from sewa_cli.output import publication as publishing
from sewa_cli.output.journal import recover
from sewa_cli.output.place import check_free
from sewa_cli.output.publication import Publication, Stage, write_file

Lacks = Callable[[str], None]


@pytest.fixture
def lacks(monkeypatch: pytest.MonkeyPatch) -> Lacks:
    """Take from the system what not every system has."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    def without(what: str) -> None:
        if what in ("unnamed files", "all"):
            monkeypatch.setattr(publishing, "unnamed_file", lambda _: None)
        if what in ("exchange", "all"):
            monkeypatch.setattr(system, "_rename_call", lambda: None)
        if what in ("locks", "all"):
            monkeypatch.setattr(system, "lock", lambda *_, **__: None)
            monkeypatch.setattr(journals, "lock", lambda *_, **__: None)
        if what in ("hard links", "all"):
            monkeypatch.setattr(os, "link", fails)

    return without


systems = pytest.mark.parametrize(
    "lacking", ["nothing", "unnamed files", "exchange", "hard links", "locks", "all"]
)


def contents(folder: Path) -> dict[str, bytes]:
    """All that is there, hidden or not."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    } | {f"{p.relative_to(folder)}/": b"" for p in folder.rglob("*") if p.is_dir()}


def staged(publication: Publication, path: Path, text: bytes) -> Stage:
    stage = publication.file(path)
    stage.file.write(text)
    return stage


def staged_folder(publication: Publication, path: Path, text: bytes) -> Stage:
    stage = publication.folder(path)
    with stage.file("inside") as file:
        file.write(text)
    return stage


def write(path: Path, text: bytes, force: bool = False) -> None:
    write_file(path, lambda file: file.write(text), force)


# ---- one file ----------------------------------------------------------------------------------


@systems
def test_a_file_appears_whole(tmp_path: Path, lacks: Lacks, lacking: str) -> None:
    lacks(lacking)
    with Publication() as publication:
        stage = staged(publication, tmp_path / "out", b"new")
        stage.seal()
        assert not (tmp_path / "out").exists()
        publication.publish([stage])
    assert contents(tmp_path) == {"out": b"new"}


@systems
def test_force_replaces_a_file(tmp_path: Path, lacks: Lacks, lacking: str) -> None:
    lacks(lacking)
    (tmp_path / "out").write_bytes(b"old")
    write(tmp_path / "out", b"new", force=True)
    assert contents(tmp_path) == {"out": b"new"}


@systems
def test_a_file_that_appears_meanwhile_is_not_overwritten(
    tmp_path: Path, lacks: Lacks, lacking: str
) -> None:
    lacks(lacking)
    with Publication() as publication:
        stage = staged(publication, tmp_path / "out", b"ours")
        (tmp_path / "out").write_bytes(b"theirs")
        with pytest.raises(OutputError, match="out: appeared while sewa was working; use --force"):
            publication.publish([stage])
    assert contents(tmp_path) == {"out": b"theirs"}


@systems
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_an_exception_in_mid_write_leaves_nothing_and_keeps_what_was_there(
    tmp_path: Path, lacks: Lacks, lacking: str, kind: type[BaseException]
) -> None:
    lacks(lacking)
    (tmp_path / "out").write_bytes(b"old")

    def half(publication: Publication) -> None:
        staged(publication, tmp_path / "out", b"half")
        staged_folder(publication, tmp_path / "folder", b"half")
        raise kind

    with pytest.raises(kind), Publication(force=True) as publication:
        half(publication)
    assert contents(tmp_path) == {"out": b"old"}


def test_while_it_is_written_there_is_nothing_that_a_kill_could_leave(tmp_path: Path) -> None:
    if (file := system.unnamed_file(tmp_path)) is None:
        pytest.skip("no unnamed files here")
    file.close()
    with Publication() as publication:
        staged(publication, tmp_path / "out", b"half")
        assert contents(tmp_path) == {}


def test_the_bytes_are_on_the_disk_before_they_get_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, synced = tmp_path / "out.bin", os.fsync, []

    def fsync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size, path.exists()))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write(path, b"new")
    assert synced[0] == (path.stat().st_ino, 3, False)
    assert (tmp_path.stat().st_ino, tmp_path.stat().st_size, True) in synced


@systems
def test_an_output_has_the_permissions_that_any_new_file_has(
    tmp_path: Path, lacks: Lacks, lacking: str
) -> None:
    """Temporary files of other tools are for their owner only; a colleague would find it shut."""
    lacks(lacking)
    (tmp_path / "usual").touch()
    (tmp_path / "usual-folder").mkdir()
    write(tmp_path / "out", b"new")
    with Publication() as publication:
        publication.publish([staged_folder(publication, tmp_path / "folder", b"new")])
    for ours, usual in (("out", "usual"), ("folder", "usual-folder"), ("folder/inside", "usual")):
        assert (tmp_path / ours).stat().st_mode == (tmp_path / usual).stat().st_mode


def test_a_folder_that_is_gone_by_the_time_of_writing_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"out\.bin: cannot be written: No such file"),
        Publication() as publication,
    ):
        publication.file(tmp_path / "gone" / "out.bin")


@systems
@pytest.mark.parametrize("force", [False, True])
def test_the_longest_name_that_a_file_can_have_will_do(
    tmp_path: Path, lacks: Lacks, lacking: str, force: bool
) -> None:
    lacks(lacking)
    name = "a" * 255
    if force:
        (tmp_path / name).write_bytes(b"old")
    check_free(tmp_path / name, force)
    write(tmp_path / name, b"new", force)
    assert contents(tmp_path) == {name: b"new"}


def open_files() -> int:
    place = Path("/proc/self/fd")
    return len(list(place.iterdir())) if place.is_dir() else 0


def test_hundreds_of_files_do_not_need_hundreds_of_descriptors(tmp_path: Path) -> None:
    before = open_files()
    with Publication() as publication:
        stages = []
        for n in range(200):
            stages.append(staged(publication, tmp_path / f"{n}", b"%d" % n))
            stages[-1].seal()
        if before:
            assert open_files() < before + 80
        publication.publish(stages)
    assert contents(tmp_path) == {f"{n}": b"%d" % n for n in range(200)}


@systems
def test_a_folder_that_appears_meanwhile_is_left_alone(
    tmp_path: Path, lacks: Lacks, lacking: str
) -> None:
    lacks(lacking)
    with Publication() as publication:
        stage = staged_folder(publication, tmp_path / "out", b"ours")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "inside").write_bytes(b"theirs")
        with pytest.raises(OutputError, match="out: appeared while sewa was working"):
            publication.publish([stage])
    assert contents(tmp_path) == {"out/": b"", "out/inside": b"theirs"}


# ---- several -----------------------------------------------------------------------------------


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, nth: int) -> Iterator[list[str]]:
    """The n-th change of a name fails."""
    calls: list[str] = []

    def counted(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            calls.append(name)
            if len(calls) == nth:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # the disk of a test machine is slow
        for name in ("rename", "link", "replace", "mkdir", "fsync"):
            patch.setattr(os, name, counted(name, getattr(os, name)))
        patch.setattr(system, "exchange", counted("exchange", system.exchange))
        yield calls


def a_set(folder: Path, text: bytes, publication: Publication) -> None:
    """Two shards, an index and a report; over an older set of three shards."""
    names = ("shard-1", "shard-2", "index")
    stages = [staged(publication, folder / name, text) for name in names]
    report = staged(publication, folder / "report", text)
    gone = [p for n in ("report", "index", "shard-3") if (p := folder / n).exists()]
    with publication.locked(folder / "index"):
        publication.publish(stages, [report], gone)


OLD_SET = dict.fromkeys(("index", "report", "shard-1", "shard-2", "shard-3"), b"old")
NEW_SET = dict.fromkeys(("index", "report", "shard-1", "shard-2"), b"new")


@systems
def test_wherever_publishing_fails_all_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: Lacks, lacking: str
) -> None:
    lacks(lacking)
    for n in range(1, 200):
        folder = tmp_path / str(n)
        folder.mkdir()
        for name, text in OLD_SET.items():
            (folder / name).write_bytes(text)
        failed = False
        with failing(monkeypatch, n) as calls:
            try:
                with Publication(force=True) as publication:
                    a_set(folder, b"new", publication)
            except OutputError as error:
                failed = "Input/output error; nothing was changed" in str(error)
        if len(calls) < n:
            assert contents(folder) == NEW_SET
            assert n > 10
            return
        assert contents(folder) == (OLD_SET if failed else NEW_SET), (n, calls)
    pytest.fail("no end")


def test_what_cannot_be_taken_back_now_is_put_back_by_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first name on, the disk fails for good."""
    for name, text in OLD_SET.items():
        (tmp_path / name).write_bytes(text)
    with monkeypatch.context() as patch, Publication(force=True) as publication:

        def broken(*_: object, **__: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def take_out(_: journals.Journal, name: str) -> None:
            real(_, name)
            for call in ("link", "rename", "replace"):
                patch.setattr(os, call, broken)

        real = journals.Journal.take_out
        patch.setattr(journals.Journal, "take_out", take_out)
        words = r"index: cannot be written: .*what was there before is in \.sewa-\w+, and the next"
        with pytest.raises(OutputError, match=words):
            a_set(tmp_path, b"new", publication)
    assert whole(contents(tmp_path)) == "old"
    recover(tmp_path)
    assert contents(tmp_path) == OLD_SET


@systems
def test_a_folder_takes_the_place_of_a_folder_and_its_report(
    tmp_path: Path, lacks: Lacks, lacking: str
) -> None:
    lacks(lacking)
    for text in (b"old", b"new"):
        with Publication(force=True) as publication:
            folder = staged_folder(publication, tmp_path / "out", text)
            report = staged(publication, tmp_path / "report", text)
            gone = [p for p in [tmp_path / "report"] if p.exists()]
            publication.publish([folder], [report], gone)
        assert contents(tmp_path) == {"out/": b"", "out/inside": text, "report": text}


@systems
def test_a_report_that_cannot_get_its_place_takes_the_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: Lacks, lacking: str
) -> None:
    lacks(lacking)
    with Publication() as publication:
        publication.publish([staged_folder(publication, tmp_path / "out", b"old")])
    before = contents(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    real = journals.Journal.begin

    def begin(journal: journals.Journal, plan: journals.Plan) -> None:
        real(journal, plan)
        (elsewhere / "report").write_bytes(b"theirs")

    monkeypatch.setattr(journals.Journal, "begin", begin)
    with Publication(force=True) as publication:
        folder = staged_folder(publication, tmp_path / "out", b"new")
        report = staged(publication, elsewhere / "report", b"new")
        with pytest.raises(OutputError, match="report: appeared"):
            publication.publish([folder], [report])
    assert contents(tmp_path) == before | {"elsewhere/": b"", "elsewhere/report": b"theirs"}


# ---- what the dead have left -------------------------------------------------------------------


def publish_and_die(nth: int, folder: Path, lacking: str) -> None:
    """In a process of its own, which is killed at the n-th call that changes something."""
    calls = 0

    def counted(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            if calls == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    patch = pytest.MonkeyPatch()
    if lacking == "exchange":
        patch.setattr(system, "_rename_call", lambda: None)
    if lacking == "unnamed files":
        patch.setattr(publishing, "unnamed_file", lambda _: None)
    patch.setattr(os, "fsync", lambda _: None)
    for name in ("rename", "link", "replace", "mkdir", "fsync", "unlink", "rmdir"):
        patch.setattr(os, name, counted(getattr(os, name)))
    for module in (system, journals):
        patch.setattr(module, "exchange", counted(system.exchange))
    with Publication(force=True) as publication:
        a_set(folder, b"new", publication)


def whole(found: dict[str, bytes]) -> str:
    """What a loader finds, who goes by the index; a report must describe it."""
    index, report = found.get("index"), found.get("report")
    if index is None:
        assert report is None, found
        return "absent"
    shards = {b"old": ("1", "2", "3"), b"new": ("1", "2")}[index]
    assert {found.get(f"shard-{n}") for n in shards} == {index}, found
    assert report in (None, index), found
    return index.decode()


@pytest.mark.parametrize("lacking", ["nothing", "unnamed files", "exchange"])
def test_killed_anywhere_a_reader_finds_no_mixture_and_the_next_run_clears_up(
    tmp_path: Path, lacking: str
) -> None:
    seen: dict[str, set[str]] = {"before": set(), "after": set()}
    for n in range(1, 300):
        folder = tmp_path / str(n)
        folder.mkdir()
        for name, text in OLD_SET.items():
            (folder / name).write_bytes(text)
        child = os.fork()
        if child == 0:
            try:
                publish_and_die(n, folder, lacking)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        seen["before"].add(whole(contents(folder)))
        recover(folder)
        found = contents(folder)
        seen["after"].add(whole(found))
        assert found in (OLD_SET, NEW_SET), (n, found)
        if not os.WIFSIGNALED(status):
            assert found == NEW_SET
            assert n > 20
            break
    assert seen == {"before": {"old", "absent", "new"}, "after": {"old", "new"}}


def test_what_a_live_run_has_is_left_alone(tmp_path: Path) -> None:
    with Publication() as publication:
        stage = staged_folder(publication, tmp_path / "out", b"new")
        recover(tmp_path)
        publication.publish([stage])
    assert contents(tmp_path) == {"out/": b"", "out/inside": b"new"}


def journal_of(folder: Path, plan: object) -> Path:
    journal = folder / ".sewa-0123456789abcdef"
    for part in ("new", "old", "made"):
        (journal / part).mkdir(parents=True)
    (journal / "plan.json").write_text(json.dumps(plan))
    return journal


def test_a_strangers_journal_can_neither_bring_nor_take_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    known = {"sewa.yaml": 1, "mine": 2, "m": 3}
    plan = {"new": known, "old": known, "gone": ["mine"], "main": "m"}
    journal = journal_of(tmp_path, plan)
    for part in ("new", "old"):
        (journal / part / "sewa.yaml").write_text("task: evil.py")
        (journal / part / "mine").write_bytes(b"theirs")
    before, told = contents(tmp_path), list[str]()
    recover(tmp_path, told.append)
    assert contents(tmp_path) == before
    assert "does not fit what is there" in told[0]


def killed_between(folder: Path) -> Path:
    """The old index and report are out, one shard is the new one, the other still the old."""
    for name, text in OLD_SET.items():
        (folder / name).write_bytes(text)
    for nth in range(1, 100):
        child = os.fork()
        if child == 0:
            try:
                publish_and_die(nth, folder, "nothing")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        if {(folder / f"shard-{n}").read_bytes() for n in (1, 2)} == {b"old", b"new"}:
            (journal,) = folder.glob(".sewa-*")
            return journal
        recover(folder)
    raise AssertionError("no such moment")


def test_what_a_killed_run_replaced_is_not_cleared_away_in_a_copy(tmp_path: Path) -> None:
    """On another disk the files have other numbers: nobody knows any more which is which."""
    (tmp_path / "one").mkdir()
    journal = killed_between(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    before = contents(tmp_path / "two")
    recover(tmp_path / "two")
    write(tmp_path / "two" / "other", b"new")
    assert contents(tmp_path / "two") == before | {"other": b"new"}
    assert (tmp_path / "two" / journal.name / "old" / "index").read_bytes() == b"old"
    recover(tmp_path / "one")
    assert contents(tmp_path / "one") == OLD_SET


def test_what_a_killed_run_replaced_does_not_come_back_beside_what_came_after(
    tmp_path: Path,
) -> None:
    killed_between(tmp_path)
    for name in ("index", "shard-1"):  # of somebody who knows nothing of journals
        (tmp_path / "theirs").write_bytes(b"theirs")
        (tmp_path / "theirs").replace(tmp_path / name)
    before = contents(tmp_path)
    recover(tmp_path)
    assert contents(tmp_path) == before


def test_a_run_that_was_killed_while_another_worked_is_settled_before_that_one_publishes(
    tmp_path: Path,
) -> None:
    with Publication(force=True) as publication:
        stage = staged(publication, tmp_path / "other", b"new")
        killed_between(tmp_path)
        with publication.locked(stage.path):
            assert contents(tmp_path) == OLD_SET
            publication.publish([stage])
    assert contents(tmp_path) == OLD_SET | {"other": b"new"}


def test_a_journal_of_another_host_is_left_alone_for_a_day(tmp_path: Path) -> None:
    """Its lock may not be seen here."""
    left = tmp_path / ".sewa-0123456789abcdef" / "made" / "1"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    (left.parents[1] / "host").write_text("elsewhere")
    before = contents(tmp_path)
    recover(tmp_path)
    assert contents(tmp_path) == before
    for path in (left / "model.safetensors", left, left.parents[1]):
        os.utime(path, (0, 0))
    recover(tmp_path)
    assert contents(tmp_path) == {}


def test_a_strangers_journal_of_any_depth_is_no_reason_to_fail(tmp_path: Path) -> None:
    deep = tmp_path / ".sewa-0123456789abcdef" / "made"
    deep.mkdir(parents=True)
    here = os.open(deep, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    recover(tmp_path)
    write(tmp_path / "out", b"new")
    assert (tmp_path / "out").read_bytes() == b"new"
    subprocess.run(["rm", "-rf", deep.parent], check=True)  # pytest cannot either


@pytest.mark.parametrize(
    "plan",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"new": {"../outside": 1}, "old": {}, "gone": [], "main": "m"}',
        b'{"new": {}, "old": {}, "gone": [".."], "main": "m"}',
        b'{"new": {"a": [1]}, "old": {}, "gone": [], "main": "m"}',
        b'{"new": {"a": 1e999}, "old": {}, "gone": [], "main": "m"}',
        b'{"new": {"a": true}, "old": {}, "gone": [], "main": "m"}',
        b'{"new": {"a\\u0000": 1}, "old": {}, "gone": [], "main": 3}',
        b'{"new": {"\\ud800": 1}, "old": {}, "gone": [], "main": "\\ud800"}',
        b'{"new": {}, "old": {}, "gone": 5, "main": "m"}',
    ],
)
def test_a_plan_that_is_none_moves_nothing(tmp_path: Path, plan: bytes) -> None:
    journal = tmp_path / ".sewa-0123456789abcdef"
    (journal / "old").mkdir(parents=True)
    (journal / "old" / "a").write_bytes(b"all that is left")
    (journal / "plan.json").write_bytes(plan)
    before = contents(tmp_path)
    recover(tmp_path)
    assert contents(tmp_path) == before


def test_what_only_looks_like_a_journal_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(b"mine")
    (tmp_path / ".sewa-0123456789abcdef").symlink_to(tmp_path / "elsewhere")
    (tmp_path / ".sewa-0123456789abcde").mkdir()
    (tmp_path / ".sewa-fedcba9876543210").write_bytes(b"a file")
    before = contents(tmp_path)
    recover(tmp_path)
    recover(tmp_path / "nowhere")
    assert contents(tmp_path) == before


# ---- one at a time, and without interruption ---------------------------------------------------


def test_the_second_waits_until_the_first_has_published(tmp_path: Path) -> None:
    told: list[str] = []
    order: list[str] = []
    begun = threading.Event()

    def second() -> None:
        begun.set()
        with system.locked([tmp_path], told.append):
            order.append("second")

    with system.locked([tmp_path]):
        other = threading.Thread(target=second)
        other.start()
        begun.wait()
        while not told:
            other.join(0.01)
        order.append("first")
    other.join(10)
    assert order == ["first", "second"]
    assert told == [f"waiting for another process that writes into {tmp_path.resolve()}"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_waits_for_a_lock_can_be_interrupted(tmp_path: Path, number: int) -> None:
    (tmp_path / ".sewa-0123456789abcdef").mkdir()  # a folder output, and something to clear away
    program = (
        "import sys, pathlib, signal\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "from sewa_cli.output.journal import recover\n"
        "from sewa_cli.output.publication import Publication\n"
        "place = pathlib.Path(sys.argv[1])\n"
        "try:\n    recover(place, lambda _: print('waiting', flush=True))\n"
        "except KeyboardInterrupt:\n    print('interrupted', flush=True)\n"
        "with Publication(tell=lambda _: print('waiting', flush=True)) as p:\n"
        "    p.folder(place / 'out')\n"
    )
    with (
        system.locked([tmp_path]),
        subprocess.Popen(
            [sys.executable, "-c", program, tmp_path],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        for expected in ("waiting", "interrupted"):
            assert process.stdout.readline().strip() == expected
            process.send_signal(number) if expected == "waiting" else None
        assert process.stdout.readline().strip() == "waiting"
        process.send_signal(number)
        assert process.wait(20) != 0
    recover(tmp_path)
    assert contents(tmp_path) == {}


def test_two_folders_are_locked_in_the_same_order_whoever_names_them_how(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()

    def often(folders: list[Path]) -> None:
        for _ in range(200):
            with system.locked(folders):
                pass

    others = [threading.Thread(target=often, args=[order]) for order in ([one, two], [two, one])]
    for other in others:
        other.start()
    for other in others:
        other.join(30)
        assert not other.is_alive()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_is_answered_when_the_names_are_right(name: str) -> None:
    came: list[str] = []
    number = signal.Signals[name]
    before = signal.signal(number, lambda *_: came.append("answered"))
    try:
        with system.held_off():
            signal.raise_signal(number)
            came.append("done")
    finally:
        signal.signal(number, before)
    assert came == ["done", "answered"]


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with system.held_off():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_publishing_in_another_thread_will_do(tmp_path: Path) -> None:
    other = threading.Thread(target=write, args=[tmp_path / "out", b"new"])
    other.start()
    other.join(30)
    assert contents(tmp_path) == {"out": b"new"}


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    program = (
        "import sys, time, pathlib\nfrom sewa_cli.output.publication import Publication\n"
        "with Publication() as p:\n"
        "    p.folder(pathlib.Path(sys.argv[1]) / 'out')\n"
        "    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        recover(tmp_path)
        assert contents(tmp_path)
        process.kill()
    recover(tmp_path)
    assert contents(tmp_path) == {}
