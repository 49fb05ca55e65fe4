"""Hubs on loopback for the real clients: the endpoints of Hugging Face and of ModelScope, with faults on demand."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

LFS = (".safetensors", ".bin", "tokenizer.json")
API = "api"
"""The name under which faults of listings are set."""

Files = dict[str, bytes]


@dataclass
class Fault:
    """What goes wrong with a file, `times` times (None: for ever). `at`: after how many bytes of the body."""

    kind: str
    at: int = 1000
    times: int | None = 1
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Seen:
    """One request: `file` is its path in the repository, "" for listings; `sent` bytes of its body went out."""

    path: str
    headers: dict[str, str]
    file: str = ""
    sent: int = 0


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    # More connections at once than this wait a second for their next try.
    request_queue_size = 128


class Server:
    """One origin. `log` has all its requests."""

    def __init__(self) -> None:
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.log: list[Seen] = []
        self.rate: float | None = None
        self._lock = threading.Lock()
        self._open = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                seen = Seen(self.path, {name.lower(): value for name, value in self.headers.items()})
                server.log.append(seen)
                self.close_connection = True
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    server.route(self, seen)

            do_HEAD = do_GET

            def log_message(self, *args: Any) -> None: ...

        self._http = _Http(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.004,), daemon=True).start()

    def close(self) -> None:
        self._open.set()
        self._http.shutdown()
        self._http.server_close()

    def gets(self, file: str) -> int:
        return sum(seen.file == file for seen in self.log)

    def sent(self, file: str) -> int:
        return sum(seen.sent for seen in self.log if seen.file == file)

    def route(self, handler: BaseHTTPRequestHandler, seen: Seen) -> None:
        raise NotImplementedError

    def fault(self, name: str) -> Fault | None:
        with self._lock:
            for fault in self.faults[name]:
                if fault.times is None:
                    return fault
                if fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def reply(
        self, handler: BaseHTTPRequestHandler, status: int, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        handler.send_response(status)
        given = {"Content-Length": str(len(body)), **(headers or {}), "Connection": "close"}
        for name, value in given.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    def json(self, handler: BaseHTTPRequestHandler, data: Any, headers: dict[str, str] | None = None) -> None:
        self.reply(handler, 200, json.dumps(data).encode(), {"Content-Type": "application/json", **(headers or {})})

    def listing_fault(self, handler: BaseHTTPRequestHandler) -> bool:
        fault = self.fault(API)
        if fault is None:
            return False
        if fault.kind == "stall":
            self._open.wait(30)
        self.reply(handler, int(fault.kind) if fault.kind.isdigit() else 500, b"{}", fault.headers)
        return True

    def metadata(self, file: str, data: bytes) -> dict[str, str]:
        """Headers that only the hub's own client looks at."""
        return {}

    def serve(self, handler: BaseHTTPRequestHandler, seen: Seen, file: str, data: bytes) -> None:
        """The bytes of a file, as far as its faults let them through."""
        seen.file = file
        fault = self.fault(file)
        kind = fault.kind if fault else ""
        if fault and kind.isdigit():
            return self.reply(handler, int(kind), b"no", fault.headers)
        match = re.fullmatch(r"bytes=(\d+)-", seen.headers.get("range", ""))
        start = int(match[1]) if match and kind != "ignore-range" else 0
        if match and (start >= len(data) or kind == "no-ranges"):
            return self.reply(handler, 416, b"", {"Content-Range": f"bytes */{len(data)}"})
        body = data[start:]
        headers = {"Content-Length": str(len(body)), **self.metadata(file, data)}
        status = 206 if match and kind != "ignore-range" else 200
        if status == 206:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if kind == "range-as-200":
            status = 200
        at = fault.at if fault else 0
        if fault and kind in ("truncate", "stall"):
            body = body[:at]
        elif kind == "flip":
            body = bytes([body[0] ^ 1]) + body[1:]
        elif kind == "empty":
            body, headers["Content-Length"] = b"", "0"
        elif kind == "short":
            body, headers["Content-Length"] = body[:at], str(min(at, len(body)))
        elif kind == "long":
            body += b"more"
            headers["Content-Length"] = str(len(body))
        elif kind == "endless":
            body += b"more"
            del headers["Content-Length"]
        elif kind == "other-range":
            headers["Content-Range"] = f"bytes {start + 7}-{len(data) - 1}/{len(data)}"
        handler.send_response(status)
        for name, value in {**headers, "Connection": "close"}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command == "HEAD":
            return None
        step = 1 if kind == "trickle" else 65536
        for offset in range(0, len(body), step):
            piece = body[offset : offset + step]
            handler.wfile.write(piece)
            seen.sent += len(piece)
            if kind == "trickle":
                time.sleep(0.05)
            if self.rate:
                time.sleep(len(piece) / self.rate)
        if kind == "stall":
            handler.wfile.flush()
            self._open.wait(30)
        if kind == "truncate":
            handler.connection.shutdown(socket.SHUT_RDWR)
        return None


class Cdn(Server):
    """The second origin to which a hub redirects; files by number, faults by path."""

    def __init__(self) -> None:
        super().__init__()
        self._files: list[tuple[str, bytes]] = []

    def signed(self, file: str, data: bytes) -> str:
        self._files.append((file, data))
        return f"{self.url}/{len(self._files) - 1}?X-Signature=signed-secret"

    def route(self, handler: BaseHTTPRequestHandler, seen: Seen) -> None:
        file, data = self._files[int(urlsplit(seen.path).path[1:])]
        self.serve(handler, seen, file, data)


class Hub(Server):
    """Repositories by name, then revision; `cdn` makes it redirect files there."""

    def __init__(self) -> None:
        super().__init__()
        self.repos: dict[str, dict[str, Files]] = defaultdict(dict)
        self.cdn: Cdn | None = None

    def bytes_of(self, handler: BaseHTTPRequestHandler, seen: Seen, file: str, data: bytes) -> None:
        if self.cdn is None:
            return self.serve(handler, seen, file, data)
        return self.reply(handler, 302, b"", {"Location": self.cdn.signed(file, data)})


class HuggingFaceHub(Hub):
    """`page`: entries of one page of a listing."""

    page = 1000

    def metadata(self, file: str, data: bytes) -> dict[str, str]:
        digest = hashlib.sha256(data).hexdigest() if file.endswith(LFS) else git_sha1(data)
        places = [(repo, revision) for repo, kept in self.repos.items() for revision in kept]
        commit = next((self.commit(*place) for place in places if data in self.repos[place[0]][place[1]].values()), "")
        return {"ETag": f'"{digest}"', "X-Repo-Commit": commit}

    def commit(self, repo: str, revision: str = "main") -> str:
        files = self.repos[repo][revision]
        return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()

    def route(self, handler: BaseHTTPRequestHandler, seen: Seen) -> None:
        url = urlsplit(seen.path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", url.path):
            if self.listing_fault(handler):
                return None
            repo, what, revision = match[1], match[2], unquote(match[3] or "main")
            files = self._files(handler, repo, revision)
            if files is None:
                return None
            if what == "tree":
                return self._tree(handler, url.path, parse_qs(url.query), files)
            sha = next(self.commit(repo, name) for name, held in self.repos[repo].items() if held is files)
            return self.json(handler, {"id": repo, "sha": sha, "siblings": []})
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", url.path):
            files = self._files(handler, match[1], unquote(match[2]))
            file = unquote(match[3])
            if files is None:
                return None
            if file in files:
                return self.bytes_of(handler, seen, file, files[file])
        return self.reply(handler, 404, b"", {"X-Error-Code": "EntryNotFound"})

    def _files(self, handler: BaseHTTPRequestHandler, repo: str, revision: str) -> Files | None:
        if repo not in self.repos:
            self.reply(handler, 404, b"", {"X-Error-Code": "RepoNotFound"})
            return None
        for name, files in self.repos[repo].items():
            if revision in (name, self.commit(repo, name)):
                return files
        self.reply(handler, 404, b"", {"X-Error-Code": "RevisionNotFound"})
        return None

    def _tree(self, handler: BaseHTTPRequestHandler, path: str, query: dict[str, list[str]], files: Files) -> None:
        entries = []
        for name, data in files.items():
            entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": git_sha1(data)}
            if name.endswith(LFS):
                entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            entries.append(entry)
        entries += [{"type": "directory", "path": "folder", "oid": "0" * 40}] if entries else []
        start = int(query.get("cursor", ["0"])[0])
        more = start + self.page < len(entries)
        link = f'<{self.url}{quote(path)}?recursive=true&cursor={start + self.page}>; rel="next"'
        self.json(handler, entries[start : start + self.page], {"Link": link} if more else {})


class ModelScopeHub(Hub):
    def route(self, handler: BaseHTTPRequestHandler, seen: Seen) -> None:
        url = urlsplit(seen.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        match = re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)/repo(/files)?", url.path)
        if match is None or match[1] not in self.repos:
            return self.reply(handler, 404, b'{"Code": 404, "Message": "not found"}')
        files = self.repos[match[1]].get(query["Revision"])
        if match[2]:
            if self.listing_fault(handler):
                return None
            listed = None if files is None else [self._entry(name, data) for name, data in files.items()]
            folder = [{"Path": "folder", "Name": "folder", "Type": "tree", "Size": 0, "Sha256": ""}] if listed else []
            return self.json(handler, {"Code": 200, "Success": True, "Data": {"Files": listed and listed + folder}})
        file = query["FilePath"]
        if files is None or file not in files:
            return self.reply(handler, 404, b"{}")
        return self.bytes_of(handler, seen, file, files[file])

    def _entry(self, name: str, data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        return {"Path": name, "Name": name.rpartition("/")[2], "Type": "blob", "Size": len(data), "Sha256": digest}
