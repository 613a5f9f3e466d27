"""A Hugging Face hub on 127.0.0.1: what huggingface_hub, datasets and transformers ask of one.

Repositories are commits of files in memory. It answers as the real one does: commits of branches
and tags, listings, files with ETag, X-Repo-Commit and byte ranges, the codes of its errors, and
uploads by who has the token hf_write: small files in a commit, large ones before it (Git LFS).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/([a-z-]+)(?:/([^/]+)(?:/(.+))?)?)?")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
LFS = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch")
STORED = re.compile(r"/lfs/([0-9a-f]{64})")


@dataclass
class Repository:
    """Commits by hash, and the commit of each branch and tag."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    is_gated: bool = False

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Let a branch be a new commit of these files, and return it."""
        seed = json.dumps([len(self.commits), id(self)]).encode() + b"".join(files.values())
        sha = hashlib.sha1(seed, usedforsecurity=False).hexdigest()
        self.commits[sha] = dict(files)
        self.refs[branch] = sha
        return sha


@dataclass
class LocalHub:
    """The repositories, and what was asked of them.

    Args:
        requests: method and path of each, in order; of a file also the range asked for.
        breaks: by path of a file, after how many bytes each of its downloads is cut off.
        is_down: it takes requests and hangs up.
        on_file: called with the path of a file that is downloaded, before it is sent.
        large_files: contents that were uploaded apart from their commit, by SHA-256.
        refuses_large_files: it answers their uploads with an error.
        etags: by path of a file, a header that takes the place of its own.
        answers: by name of a repository, a body that takes the place of what it says of it.
    """

    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    breaks: dict[str, int] = field(default_factory=dict)
    on_file: Callable[[str], None] | None = None
    is_down: bool = False
    large_files: dict[str, bytes] = field(default_factory=dict)
    refuses_large_files: bool = False
    etags: dict[str, str] = field(default_factory=dict)
    answers: dict[str, bytes] = field(default_factory=dict)
    server: ThreadingHTTPServer = field(init=False)

    def __post_init__(self) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def asked(self) -> list[str]:
        """The paths of what was asked of repositories; a client asks for more now and then."""
        return [path for _, path, _ in self.requests if "tester/" in path]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def repository(self, kind: str, name: str) -> Repository:
        """The repository, made where there is none."""
        return self.repositories.setdefault((kind, name), Repository())

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def _handler(hub: LocalHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def do_PUT(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = urlsplit(self.path).path
            length = int(self.headers.get("Content-Length") or 0)
            self.body = self.rfile.read(length)
            hub.requests.append((self.command, unquote(path), self.headers.get("Range") or ""))
            if hub.is_down:
                self.close_connection = True
            elif path == "/api/validate-yaml":
                self._json({"errors": [], "warnings": []})
            elif path == "/api/repos/create":
                self._create()
            elif match := LFS.fullmatch(path):
                self._offer_uploads()
            elif match := STORED.fullmatch(path):
                self._store(match[1])
            elif match := API.fullmatch(path):
                self._api(*match.groups())
            elif match := FILE.fullmatch(path):
                self._file(*match.groups())
            else:
                self._error(404, "", "not found")

        def _repository(self, kind: str, name: str) -> Repository | None:
            found = hub.repositories.get((kind, name))
            if found is None:
                # The real one tells strangers no more of what is not there than of what is private.
                self._error(401, "RepoNotFound", "Invalid username or password.")
            return found

        def _commit(self, repository: Repository, revision: str) -> str | None:
            revision = unquote(revision)
            sha = repository.refs.get(revision, revision)
            if sha in repository.commits:
                return sha
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None

        def _may_read(self, repository: Repository) -> bool:
            if repository.is_gated and self.headers.get("Authorization") != "Bearer hf_granted":
                status = 403 if self.headers.get("Authorization") else 401
                self._error(status, "GatedRepo", "Access to this repository is restricted.")
                return False
            return True

        def _may_write(self) -> bool:
            if self.headers.get("Authorization") == "Bearer hf_write":
                return True
            self._error(403, "", "Forbidden: you must use a write token.")
            return False

        def _create(self) -> None:
            asked = json.loads(self.body)
            name = f"{asked['organization']}/{asked['name']}"
            if not self._may_write():
                return
            found = {"url": f"{hub.address}/{name}", "name": name}
            if ("models", name) in hub.repositories:
                self._json(found | {"error": "You already created this model repo"}, status=409)
                return
            hub.repository("models", name).commit({})
            self._json(found)

        def _offer_uploads(self) -> None:
            wanted = json.loads(self.body)["objects"]
            missing = [one for one in wanted if one["oid"] not in hub.large_files]
            for one in missing:
                one["actions"] = {"upload": {"href": f"{hub.address}/lfs/{one['oid']}"}}
            self._json({"transfer": "basic", "objects": wanted})

        def _store(self, digest: str) -> None:
            if hub.refuses_large_files or hashlib.sha256(self.body).hexdigest() != digest:
                self._error(400, "", "cannot be stored")
                return
            hub.large_files[digest] = self.body
            self._json({})

        def _take(self, name: str, verb: str, repository: Repository) -> None:
            if not self._may_write():
                return
            if verb == "preupload":
                modes = {True: "lfs", False: "regular"}
                files = [
                    {"path": path, "uploadMode": modes[path.endswith(".safetensors")]}
                    | {"shouldIgnore": False}
                    for path in (one["path"] for one in json.loads(self.body)["files"])
                ]
                self._json({"files": files})
                return
            files = dict(repository.commits[repository.refs["main"]])
            for line in map(json.loads, self.body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = hub.large_files[value["oid"]]
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
            sha = repository.commit(files)
            self._json({"commitOid": sha, "commitUrl": f"{hub.address}/{name}/commit/{sha}"})

        def _api(
            self, kind: str, name: str, verb: str | None, revision: str | None, folder: str | None
        ) -> None:
            repository = self._repository(kind, unquote(name))
            if repository is None:
                return
            if verb == "auth-check":
                if self._may_read(repository):
                    self._json({})
                return
            if verb in ("preupload", "commit"):
                self._take(name, verb, repository)
                return
            sha = self._commit(repository, revision or "main")
            if sha is None:
                return
            files = repository.commits[sha]
            if verb in (None, "revision") and name in hub.answers:
                self._body(hub.answers[name], 200)
            elif verb in (None, "revision"):
                siblings = [{"rfilename": path} for path in sorted(files)]
                gated = "manual" if repository.is_gated else False
                self._json(
                    {"id": name, "sha": sha, "siblings": siblings, "gated": gated, "tags": []}
                    | {"private": False, "downloads": 0, "likes": 0, "config": _config(files)}
                    | {"cardData": _card(files)}
                )
            elif verb == "tree":
                self._json(_listing(files, unquote(folder or ""), self._is_recursive()))
            elif verb == "paths-info":
                asked = self._asked_paths()
                everything = _listing(files, "", recursive=True)
                self._json([entry for entry in everything if entry["path"] in asked])
            else:
                self._error(404, "", "not found")

        def _is_recursive(self) -> bool:
            query = parse_qs(urlsplit(self.path).query)
            return query.get("recursive", ["false"])[0].lower() in ("true", "1")

        def _asked_paths(self) -> list[str]:
            text = self.body.decode()
            paths = json.loads(text)["paths"] if text.startswith("{") else parse_qs(text)["paths"]
            return [paths] if isinstance(paths, str) else list(paths)

        def _file(self, datasets: str | None, name: str, revision: str, path: str) -> None:
            repository = self._repository("datasets" if datasets else "models", unquote(name))
            if repository is None or not self._may_read(repository):
                return
            sha, path = self._commit(repository, revision), unquote(path)
            if sha is None:
                return
            content = repository.commits[sha].get(path)
            if content is None:
                self._error(404, "EntryNotFound", "Entry not found", commit=sha)
                return
            if self.command == "GET" and hub.on_file is not None:
                hub.on_file(path)
            self._send(path, content, sha)

        def _send(self, path: str, content: bytes, sha: str) -> None:
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            start = int(asked[1]) if asked else 0
            end = min(int(asked[2]) + 1, len(content)) if asked and asked[2] else len(content)
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(end - start))
            self.send_header("ETag", hub.etags.get(path, f'"{_blob_id(content)}"'))
            self.send_header("X-Repo-Commit", sha)
            self.end_headers()
            if self.command == "HEAD":
                return
            part = content[start:end]
            if path in hub.breaks:
                self.wfile.write(part[: hub.breaks[path]])
                self.wfile.flush()
                self.close_connection = True
                return
            self.wfile.write(part)

        def _json(self, value: Any, status: int = 200) -> None:
            self._body(json.dumps(value).encode(), status)

        def _body(self, body: bytes, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _error(self, status: int, code: str, message: str, commit: str = "") -> None:
            body = b"" if self.command == "HEAD" else json.dumps({"error": message}).encode()
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            if commit:
                self.send_header("X-Repo-Commit", commit)
            self.send_header("X-Error-Message", message)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def _card(files: Mapping[str, bytes]) -> Any:
    """What stands at the top of README.md between two lines of three dashes."""
    _, _, rest = files.get("README.md", b"").decode().partition("---\n")
    return yaml.safe_load(rest.partition("\n---")[0]) or {}


def _config(files: dict[str, bytes]) -> dict[str, Any]:
    """What the hub tells of a model's config.json beside the names of its files."""
    try:
        values = json.loads(files.get("config.json", b""))
    except ValueError:
        return {}
    return {
        key: values[key]
        for key in ("architectures", "model_type", "quantization_config")
        if key in values
    }


def _listing(files: Mapping[str, bytes], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """The files, and the folders, below a folder."""
    prefix = f"{folder}/" if folder else ""
    entries: dict[str, dict[str, Any]] = {}
    for path, content in sorted(files.items()):
        if not path.startswith(prefix):
            continue
        parts = path.removeprefix(prefix).split("/")
        for depth in range(1, len(parts)):
            if recursive or depth == 1:
                name = prefix + "/".join(parts[:depth])
                entries[name] = {"type": "directory", "path": name, "oid": "0" * 40, "size": 0}
        if recursive or len(parts) == 1:
            entries[path] = {
                "type": "file",
                "path": path,
                "size": len(content),
                "oid": _blob_id(content),
            }
    return list(entries.values())


def _blob_id(content: bytes) -> str:
    """Git's name of a file's content, as the hub's ETag is."""
    return hashlib.sha1(
        f"blob {len(content)}\0".encode() + content, usedforsecurity=False
    ).hexdigest()
