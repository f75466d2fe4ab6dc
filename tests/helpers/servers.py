"""Servers on loopback that count what they are asked for: S3 by moto, and the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from threading import Thread
from typing import Any

from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wrappers import Request, Response

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class _Quiet(WSGIRequestHandler):
    def log(self, *_: object) -> None: ...


class Counted:
    """A WSGI app on a free port; `fail(request)` may answer in its place."""

    def __init__(self, app: App, handler: type[WSGIRequestHandler] = _Quiet) -> None:
        self.asked: list[tuple[str, str]] = []  # method and path
        self.sent = 0  # bytes of bodies
        self.fail: Callable[[Request], Response | None] = lambda _: None
        self._app = app
        self._server = make_server("127.0.0.1", 0, self, threaded=True, request_handler=handler)
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        request = Request(environ)
        self.asked.append((request.method, request.full_path.rstrip("?")))
        return self._count((self.fail(request) or self._app)(environ, start))

    def _count(self, body: Iterable[bytes]) -> Iterator[bytes]:
        for part in body:
            self.sent += len(part)
            yield part

    def gets(self, ending: str) -> int:
        """Return how many files whose names end so were asked for."""
        return sum(m == "GET" and p.partition("?")[0].endswith(ending) for m, p in self.asked)

    def reset(self) -> None:
        self.asked, self.sent = [], 0

    def die(self) -> None:
        """Accept no further connection, as a server that was killed."""
        self.fail = lambda request: request.environ["werkzeug.socket"].close()
        self._server.socket.close()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def s3_server() -> Counted:
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )

    class Handler(_Quiet, MotoRequestHandler): ...

    return Counted(DomainDispatcherApplication(create_backend_app), Handler)


class Hub:
    """The part of the hub's protocol that its client uses to list and to download."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}  # revision → path → content
        self.token: str | None = None

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        request = Request(environ)
        return self._answer(request)(environ, start)

    def _answer(self, request: Request) -> Response:
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return Response("no", 401, {"X-Error-Message": "Invalid username or password."})
        path = request.path
        if path == "/api/models/org/run/refs":
            refs = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit_of(name)}
                for name in self.files
            ]
            return _json({"branches": refs, "converts": [], "tags": []})
        if found := re.fullmatch(r"/api/models/org/run(?:/revision/([^/]+))?", path):
            name = found[1] or "main"
            if name not in self.files:
                return Response("no", 404, {"X-Error-Code": "RevisionNotFound"})
            siblings = [{"rfilename": file} for file in self.files[name]]
            return _json({"id": "org/run", "sha": commit_of(name), "siblings": siblings})
        if found := re.fullmatch(r"/api/models/org/run/tree/([^/]+)(?:/.*)?", path):
            return _json([_entry(file, data) for file, data in self._at(found[1]).items()])
        if found := re.fullmatch(r"/org/run/resolve/([^/]+)/(.+)", path):
            return self._file(request, found[1], self._at(found[1]).get(found[2]))
        return Response("no", 404, {"X-Error-Code": "RepoNotFound"})

    def _at(self, revision: str) -> dict[str, bytes]:
        names = [name for name in self.files if revision in (name, commit_of(name))]
        return self.files[names[0]] if names else {}

    def _file(self, request: Request, revision: str, data: bytes | None) -> Response:
        if data is None:
            return Response("no", 404, {"X-Error-Code": "EntryNotFound"})
        names = [name for name in self.files if revision in (name, commit_of(name))]
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": commit_of(names[0]),
            "Accept-Ranges": "bytes",
        }
        part, status = data, 200
        if span := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", "")):
            end = int(span[2]) + 1 if span[2] else len(data)
            part, status = data[int(span[1]) : end], 206
            headers["Content-Range"] = f"bytes {span[1]}-{end - 1}/{len(data)}"
        return Response(part, status, headers)


def commit_of(revision: str) -> str:
    return hashlib.sha1(revision.encode()).hexdigest()


def _entry(path: str, data: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    entry = {"type": "file", "path": path, "size": len(data), "oid": digest[:40]}
    if path.endswith(".safetensors"):
        entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
    return entry


def _json(content: object) -> Response:
    return Response(json.dumps(content), content_type="application/json")
