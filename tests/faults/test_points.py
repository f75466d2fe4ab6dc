"""No call that changes the output folder escapes the injection: strace sees the same ones."""

import re
import shutil
from pathlib import Path

import pytest

from faults.cases import Case
from faults.driver import Driver

CHANGING = (
    "open,openat,creat,mkdir,mkdirat,rmdir,unlink,unlinkat,link,linkat,symlink,symlinkat,rename,"
    "renameat,renameat2,truncate,ftruncate,fallocate,chmod,fchmod,fchmodat,utimensat,write,pwrite64,"
    "writev,pwritev,fsync,fdatasync,flock,sendfile,copy_file_range,mknod,mknodat"
)
# what Python's functions call, where the name is another
CALLS = {
    "openat": "open",
    "mkdirat": "mkdir",
    "unlinkat": "unlink",
    "renameat": "rename",
    "replace": "rename",
    "remove": "unlink",
    "pwrite64": "pwrite",
    "symlinkat": "symlink",
}


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace")
@pytest.mark.parametrize(
    "case",
    [
        Case("average", "file", "file"),
        Case("average", "shards", "three shards"),
        Case("apply", "folder", "folder", "none"),
        Case("init", "file", "file", "none"),
    ],
    ids=str,
)
def test_every_system_call_that_changes_the_folder_is_a_point(stage, tmp_path, case):
    before = stage.prepare(case)
    log = tmp_path / "calls"
    traced = ["strace", "-f", "-y", "-qq", "-o", str(log), f"--trace={CHANGING}"]
    with Driver(traced) as driver:
        ended = driver.run(stage.asked(case.argv(force=case.over is not None)))
    stage.clear(before)
    if "ptrace" in log.read_text() or ended.code != 0:
        pytest.skip("strace may not trace here")
    found = system_calls(log.read_text(), stage.out)
    points = [point.split()[0] for point in ended.points]
    assert found == [CALLS.get(point, point) for point in points]


def system_calls(log, folder):
    """Those on the folder, in their order, by the names that Python has for them."""
    found = []
    for name, rest in re.findall(r"^\d+ +(\w+)\((.*)$", log, re.MULTILINE):
        if name in ("open", "openat") and not re.search("O_CREAT|O_TRUNC", rest):
            continue
        if any(place.is_relative_to(folder) for place in places(name, rest, folder)):
            found.append("rmdir" if "AT_REMOVEDIR" in rest else CALLS.get(name, name))
    return found


def places(name, arguments, folder):
    """What a call is about; strace shows the path of a descriptor, so also of a folder's."""
    if descriptor := re.match(r"\d+<([^>]*)>(?!, \")", arguments):
        return [Path(descriptor[1])]
    if name.startswith(("write", "pwrite")):
        return [Path(re.split("[<>]", arguments)[1])]
    if name.endswith(("at", "at2")):
        return [
            Path(*pair) for pair in re.findall(r'<([^>]*)>(?:\(deleted\))?, "([^"]*)"', arguments)
        ]
    return [folder / path for path in re.findall(r'"([^"]*)"', arguments)]
