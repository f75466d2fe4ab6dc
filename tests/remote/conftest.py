"""A run of twelve small checkpoints on S3, and a way to look at it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from helpers.servers import Counted, s3_server
from helpers.tiny import train_tiny


class Store:
    """A bucket with a run, next to the same run in ckpts/."""

    def __init__(self, server: Counted) -> None:
        import boto3

        self.server = server
        self.client: Any = boto3.client("s3")
        self.client.create_bucket(Bucket="bucket")

    def put(self, file: Path, key: str) -> None:
        self.client.put_object(Bucket="bucket", Key=key, Body=file.read_bytes())

    def put_folder(self, folder: Path, key: str) -> None:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                self.put(file, f"{key}/{file.relative_to(folder).as_posix()}")

    def get(self, key: str) -> bytes:
        content: bytes = self.client.get_object(Bucket="bucket", Key=key)["Body"].read()
        return content

    def listed(self) -> set[str]:
        found = self.client.list_objects_v2(Bucket="bucket").get("Contents", ())
        return {one["Key"] for one in found}


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    import s3fs

    server = s3_server()
    urlopen(Request(f"{server.url}/moto-api/reset", method="POST")).close()  # of the tests before
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    s3fs.S3FileSystem.clear_instance_cache()
    yield server
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def store(aws: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.chdir(tmp_path)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    train_tiny(tmp_path / "ckpts")
    made = Store(aws)
    made.put_folder(tmp_path / "ckpts", "run")
    aws.reset()
    return made
