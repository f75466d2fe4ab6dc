"""A run on an object store, with moto's server in its place."""

import json
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from helpers.servers import Counted, Hub
from helpers.tiny import TASK
from safetensors.torch import load_file, save, save_file
from werkzeug.wrappers import Response

breadth = pytest.mark.breadth


@pytest.fixture
def large(store):
    """large/ with ten checkpoints of 2 MB, of which the headers are a small part; also local."""
    generator = torch.Generator().manual_seed(0)
    Path("large").mkdir()
    for step in range(10):
        tensors = {f"layer.{n}": torch.randn(250_000, generator=generator) for n in range(2)}
        tensors |= {f"bias.{n}": torch.randn(3, generator=generator) for n in range(5)}
        save_file(tensors, f"large/step-{step}.safetensors")
    store.put_folder(Path("large"), "large")
    store.server.reset()
    return store


def size_of(folder):
    return sum(path.stat().st_size for path in Path(folder).rglob("*"))


def scratch_is_empty():
    return not list(Path("scratch").glob(".sewa-*"))


def test_average_has_the_bytes_of_a_local_one_and_fetches_each_byte_once(sewa, store):
    assert sewa("average", "ckpts", "-o", "local.safetensors").code == 0
    ended = sewa("average", "s3://bucket/run/", "-o", "s3://bucket/best.safetensors")
    assert (ended.code, ended.out.split()[-1]) == (0, "s3://bucket/run/step-120.safetensors")
    assert store.server.gets(".safetensors") == 12
    assert store.get("best.safetensors") == Path("local.safetensors").read_bytes()
    assert scratch_is_empty()


@breadth
def test_what_fits_is_fetched_once_for_all_passes(sewa, large):
    listings = 40_000  # and headers are fetched twice where files are streamed
    assert sewa("inspect", "s3://bucket/large").code == 0
    assert large.server.sent < size_of("large") + listings
    assert large.server.gets(".safetensors") == 20  # a header and the rest
    large.server.reset()
    assert sewa("average", "s3://bucket/large", "--json", "-o", "out.safetensors").code == 0
    assert large.server.sent < size_of("large") + 10 * 2**16 + listings


@breadth
@pytest.mark.parametrize("command", ["average", "inspect"])
def test_headers_are_read_by_ranges(sewa, large, command):
    """Of ten checkpoints, the eight that take no part are not fetched."""
    assert sewa(command, "s3://bucket/large", "--last", "2").code == 0
    assert large.server.sent < 10 * 2**16 + 2 * 2_100_000 + 40_000


@breadth
def test_what_does_not_fit_is_streamed_within_the_cap(sewa, large, monkeypatch):
    sizes, over = [], threading.Event()

    def watch():
        while not over.wait(0.005):
            found = 0
            for path in Path("scratch").rglob("*"):
                with suppress(FileNotFoundError):
                    found += path.lstat().st_blocks * 512 if path.is_file() else 0
            sizes.append(found)

    watcher = threading.Thread(target=watch)
    watcher.start()
    monkeypatch.setattr("sewa_cli.remote.scratch.LEAST", 2**14)
    cap = 5_000_000
    options = ("--scratch", "scratch", "--scratch-size", cap)
    ended = sewa("average", "s3://bucket/large", "-o", "out.safetensors", *options)
    over.set()
    watcher.join()
    assert ended.code == 0
    sewa("average", "large", "-o", "local.safetensors")
    assert Path("out.safetensors").read_bytes() == Path("local.safetensors").read_bytes()
    assert large.server.sent < size_of("large") + 10 * 2**16 + 40_000
    assert 500_000 < max(sizes) < cap * 1.02  # folders have blocks, too
    assert scratch_is_empty()


@breadth
def test_select_learns_from_the_store_and_its_report_names_urls(sewa, store):
    Path("task.py").write_text(TASK)
    ended = sewa(
        *("select", "s3://bucket/run", "--task", "task.py", "--device", "cpu"),
        *("-o", "s3://bucket/out/best.safetensors"),
    )
    assert ended.code == 0
    report = json.loads(store.get("out/best.report.json"))
    assert report["output"] == "s3://bucket/out/best.safetensors"
    assert report["config"]["checkpoints"] == ["s3://bucket/run"]
    sources = [one["path"] for one in report["recipe"]["sources"]]
    assert sources
    assert all(source.startswith("s3://bucket/run/step-") for source in sources)
    assert "scratch" not in json.dumps(report).replace('"scratch', "")
    assert "SECRET" not in json.dumps(report)
    assert sewa("verify", "s3://bucket/out/best.safetensors").code == 0
    rebuilt = ("apply", "s3://bucket/out/best.report.json", "-o", "again.safetensors")
    assert sewa(*rebuilt).code == 0
    assert Path("again.safetensors").read_bytes() == store.get("out/best.safetensors")
    select = ("select", "ckpts", "--task", "task.py", "--device", "cpu", "-o", "local.safetensors")
    assert sewa(*select).code == 0
    assert load_file("local.safetensors").keys() == load_file("again.safetensors").keys()
    assert Path("local.safetensors").read_bytes() == Path("again.safetensors").read_bytes()


@breadth
def test_a_report_of_what_is_replaced_is_removed(sewa, store):
    output = ("-o", "s3://bucket/out/best.safetensors")
    Path("task.py").write_text(TASK)
    store.put(Path("task.py"), "out/note.json")
    select = ("select", "s3://bucket/run", "--task", "task.py", "--device", "cpu", "--K", "3")
    assert sewa(*select, "--solver", "linear", *output).code == 0
    kept = {"out/best.safetensors", "out/note.json"}
    assert {key for key in store.listed() if key.startswith("out/")} == {
        *kept,
        "out/best.report.json",
    }
    assert sewa("average", "s3://bucket/run", *output, "--force").code == 0
    assert {key for key in store.listed() if key.startswith("out/")} == kept


@breadth
def test_a_folder_is_sent_with_its_index_and_report_last(sewa, store):
    for step in (1, 2):
        folder = Path(f"hf/checkpoint-{step}")
        folder.mkdir(parents=True)
        save_file({"a": torch.full((9000,), 1.0 * step), "b": torch.ones(9)}, folder / "x")
        (folder / "x").rename(folder / "model.safetensors")
        (folder / "config.json").write_text('{"model_type": "x"}')
        (folder / "optimizer.pt").write_bytes(b"0" * 300_000)
    store.put_folder(Path("hf"), "hf")
    store.server.reset()
    output = ("-o", "s3://bucket/best/", "--shard-size", "1KB")
    assert sewa("average", "s3://bucket/hf", *output).code == 0
    assert store.server.gets("optimizer.pt") == 0
    sent = [path.partition("/best/")[2] for method, path in store.server.asked if method == "PUT"]
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert sent == ["README.md", "config.json", *shards, "model.safetensors.index.json"]
    again = sewa("average", "s3://bucket/hf", *output)
    assert "s3://bucket/best: exists; use --force" in again.error
    output = (*output[:2], "--report", "report.json", "--force")
    assert sewa("average", "s3://bucket/hf", *output).code == 0
    kept = {key for key in store.listed() if key.startswith("best/")}
    assert kept == {"best/README.md", "best/config.json", "best/model.safetensors"}
    inside = sewa("average", "s3://bucket/hf", "-o", "s3://bucket/hf/checkpoint-1", "--force")
    assert inside.code == 3
    assert inside.error.startswith("s3://bucket/hf/checkpoint-1: ")


@breadth
def test_a_pickle_is_fetched_whole(sewa, store):
    Path("pt").mkdir()
    for step in (1, 2, 3):
        torch.save({"w": torch.full((70_000,), float(step))}, f"pt/step-{step}.pt")
    store.put_folder(Path("pt"), "pt")
    assert sewa("average", "s3://bucket/pt", "-o", "s3://bucket/best.pt").code == 0
    Path("best.pt").write_bytes(store.get("best.pt"))
    assert torch.load("best.pt")["w"][0] == 2
    few = sewa("average", "s3://bucket/pt", "-o", "x.pt", "--scratch-size", "500KB")
    assert (few.code, few.error.partition(":")[0]) == (3, "--scratch-size")


def busy(_):
    return Response("<Error><Code>SlowDown</Code></Error>", 503)


def denied(_):
    return Response("<Error><Code>InvalidAccessKeyId</Code></Error>", 403)


@breadth
@pytest.mark.parametrize(
    ("fail", "words"), [(busy, "SlowDown|503|reduce"), (denied, "check the credentials")]
)
@pytest.mark.parametrize("after", [0, 6, 15])
def test_a_server_that_refuses_is_one_line_and_nothing_is_written(
    sewa, large, monkeypatch, fail, words, after
):
    def failing(request):
        return fail(request) if len(large.server.asked) > after else None

    monkeypatch.setattr("s3fs.S3FileSystem.retries", 2)
    large.server.fail = failing
    ended = sewa("average", "s3://bucket/large", "-o", "out.safetensors")
    assert ended.code == 3
    assert ended.error.startswith("s3://bucket/large")
    assert any(word in ended.err for word in words.split("|")), ended.err
    assert "SECRET" not in ended.err
    assert not Path("out.safetensors").exists()
    assert scratch_is_empty()


@breadth
def test_requests_that_fail_now_and_then_are_repeated(sewa, large):
    large.server.fail = lambda request: busy(request) if len(large.server.asked) % 5 == 0 else None
    assert sewa("average", "s3://bucket/large", "-o", "out.safetensors").code == 0


@breadth
def test_a_server_that_dies_is_one_line(sewa, large, monkeypatch):
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 2)

    def dying(_):
        if len(large.server.asked) > 14:
            threading.Thread(target=large.server.die).start()
        return

    large.server.fail = dying
    ended = sewa("average", "s3://bucket/large", "-o", "out.safetensors")
    assert (ended.code, len(ended.err.splitlines())) == (3, 1)
    assert ended.error.startswith("s3://bucket/large")
    assert not Path("out.safetensors").exists()


@breadth
def test_a_file_that_changes_meanwhile_is_noticed(sewa, large):
    def change(_):
        if len(large.server.asked) == 20:
            large.server.fail = lambda _: None
            save_file({"layer.0": torch.ones(9)}, "other")
            large.put(Path("other"), "large/step-3.safetensors")

    large.server.fail = change
    ended = sewa("average", "s3://bucket/large", "-o", "out.safetensors")
    assert ended.code == 3
    assert "s3://bucket/large/step-3.safetensors: changed while it was being read" in ended.error
    assert not Path("out.safetensors").exists()


@breadth
def test_an_upload_that_fails_leaves_nothing_visible(sewa, store, monkeypatch):
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    before = store.listed()
    store.server.fail = lambda request: denied(request) if request.method == "PUT" else None
    ended = sewa("average", "s3://bucket/run", "-o", "s3://bucket/best.safetensors")
    assert ended.code == 3
    assert ended.error.startswith("s3://bucket/best.safetensors: ")
    assert store.listed() == before


@breadth
@pytest.mark.parametrize(
    "url",
    ["s3://key:SECRET@bucket/run", "https://host/a.safetensors?token=SECRET", "s3://bucket/../run"],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(sewa, store, url):
    for arguments in ((url,), ("ckpts", "-o", url), ("ckpts", "--report", url)):
        ended = sewa("average", *arguments)
        assert ended.code == 2
        assert "SECRET" not in ended.err
        assert not store.server.asked


@breadth
def test_copies_and_missing_places_are_found_as_on_a_disk(sewa, store):
    store.put(Path("ckpts/step-120.safetensors"), "run/step-130.safetensors")
    ended = sewa("average", "s3://bucket/run", "-o", "out.safetensors")
    assert "same bytes as step-120.safetensors" in ended.err
    assert sewa("average", "s3://bucket/nothing").error == (
        "s3://bucket/nothing: no such file or folder"
    )
    missing = sewa("average", "s3://bucket/run", "-o", "s3://nobody/x.safetensors")
    assert missing.error.startswith("s3://nobody: ")


@breadth
def test_files_are_named_one_by_one_and_a_set_by_its_index(sewa, store):
    urls = [f"s3://bucket/run/step-{step}.safetensors" for step in (10, 20)]
    assert sewa("average", *urls, "--weights", "0.25,0.75", "-o", "two.safetensors").code == 0
    expected = sum(
        weight * load_file(f"ckpts/step-{step}.safetensors")["0.bias"]
        for step, weight in ((10, 0.25), (20, 0.75))
    )
    assert torch.allclose(load_file("two.safetensors")["0.bias"], expected)
    weights = ",".join(["0"] * 11 + ["1"])  # of a folder, in the order of steps
    assert sewa("average", "s3://bucket/run", "--weights", weights, "-o", "last").code == 0
    newest = load_file("ckpts/step-120.safetensors")["0.bias"]
    assert torch.equal(load_file("last")["0.bias"], newest)
    for step in (1, 2):
        folder = Path(f"sets/step-{step}")
        folder.mkdir(parents=True)
        save_file({"a": torch.full((30_000,), 1.0 * step)}, folder / "model-1.safetensors")
        save_file({"b": torch.full((3,), 1.0 * step)}, folder / "model-2.safetensors")
        places = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": places}))
    store.put_folder(Path("sets"), "sets")
    indices = [f"s3://bucket/sets/step-{n}/model.safetensors.index.json" for n in (1, 2)]
    ended = sewa("average", *indices, "-o", "sets.safetensors", "--report", "sets.json")
    assert ended.code == 0, ended.err
    assert load_file("sets.safetensors")["a"][0] == 1.5
    assert sewa("apply", "sets.json", "-o", "again.safetensors").code == 0
    assert Path("again.safetensors").read_bytes() == Path("sets.safetensors").read_bytes()


@breadth
def test_a_library_that_is_missing_is_named(sewa, monkeypatch):
    from fsspec.registry import _registry

    monkeypatch.delitem(_registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    ended = sewa("average", "s3://bucket/run")
    assert (ended.code, ended.error) == (
        2,
        "s3:// needs another library: pip install 'sewa-cli[s3]'",
    )


@breadth
def test_files_are_read_from_a_web_server_by_ranges(sewa, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub = Hub()
    tensors = {"a": torch.arange(60_000.0), "b": torch.ones(3)}
    hub.files = {f"step{n}": {"x.safetensors": save(tensors)} for n in (1, 2)}
    server = Counted(hub)
    urls = [f"{server.url}/org/run/resolve/step{n}/x.safetensors" for n in (1, 2)]

    server.fail = lambda _: Response("", 503) if len(server.asked) % 4 == 3 else None
    ended = sewa("average", *urls, "-o", "out.safetensors")
    server.stop()
    assert ended.code == 0, ended.err
    assert load_file("out.safetensors")["a"][-1] == 59_999
    assert ended.out.split() == urls
