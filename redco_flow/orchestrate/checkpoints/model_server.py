"""A small HTTP server in front of a checkpoint, for trying a model: one answer at a time.

On a loopback address it takes requests that name this machine as their host, so that a page of
another site cannot ask it through a browser; with a token, requests that have it.
"""

from __future__ import annotations

import hmac
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from redco_flow.orchestrate.checkpoints.chat import CannotConverse, ProcessDied
from redco_flow.orchestrate.checkpoints.completions import (
    CHAT_PATH,
    TEXT_PATH,
    BadRequest,
    Completions,
)

LOOPBACK = ("127.0.0.1", "localhost")
MAX_BODY_BYTES = 16 << 20
_SECONDS_FOR_A_CLIENT = 60


class ModelServer(ThreadingHTTPServer):
    """Listens from its creation on; answers once `completions` is set.

    Args:
        host, port: of the address; port 0 is a free one.
        token: that requests must have; empty: none.

    Attributes:
        died: the error that ended the process with the model.

    Raises:
        OSError: the address cannot be had.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, port: int, token: str = "") -> None:
        super().__init__((host, port), _Handler)
        self.host, self.token = host, token
        self.completions: Completions | None = None
        self.died: ProcessDied | None = None
        self.turn = threading.Lock()

    @property
    def url(self) -> str:
        """The base of the API."""
        return f"http://{self.host}:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what went wrong, unless the client has gone."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: ModelServer
    protocol_version = "HTTP/1.1"
    timeout = _SECONDS_FOR_A_CLIENT

    def do_GET(self) -> None:
        if not self._is_let_in():
            return
        assert self.server.completions is not None
        if self.path == "/v1/models":
            self._send(200, self.server.completions.models())
        else:
            self._refuse(404, f"there is no {self.path}; {CHAT_PATH} and {TEXT_PATH} take POST")

    def do_POST(self) -> None:
        if not self._is_let_in():
            return
        if self.path not in (CHAT_PATH, TEXT_PATH):
            self._refuse(404, f"there is no {self.path}; {CHAT_PATH} and {TEXT_PATH} are")
            return
        try:
            body = self._body()
        except BadRequest as error:
            self._refuse(400, str(error))
            return
        assert self.server.completions is not None
        try:
            with self.server.turn:
                answer = self.server.completions.answer(self.path, body)
        except (BadRequest, CannotConverse) as error:
            if isinstance(error, ProcessDied):
                self.server.died = error
                threading.Thread(target=self.server.shutdown).start()
            self._refuse(500 if isinstance(error, ProcessDied) else 400, str(error))
            return
        if isinstance(answer, dict):
            self._send(200, answer)
        else:
            self._send_events(answer)

    def _is_let_in(self) -> bool:
        """Whether the request may be answered; one that may not gets its refusal."""
        token, host = self.server.token, urlsplit(f"//{self.headers.get('Host', '')}").hostname
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            self._refuse(401, "the header `Authorization: Bearer TOKEN` is missing or wrong")
            return False
        if not token and host not in LOOPBACK:
            self._refuse(403, f"the request is for host {host}, not for {' or '.join(LOOPBACK)}")
            return False
        return True

    def _body(self) -> dict[str, Any]:
        """Raise BadRequest where the body is not a JSON object of a bearable size."""
        if self.headers.get_content_type() != "application/json":
            raise BadRequest("the header `Content-Type` must be application/json")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            raise BadRequest(f"the body must have a Content-Length of at most {MAX_BODY_BYTES}")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except ValueError as error:
            raise BadRequest(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        return body

    def _refuse(self, status: int, message: str) -> None:
        kind = "server_error" if status >= 500 else "invalid_request_error"
        self.close_connection = True  # what is left of the body is not read
        self._send(status, {"error": {"message": message, "type": kind, "code": None}})

    def _send(self, status: int, value: dict[str, Any]) -> None:
        self._write(status, "application/json", json.dumps(value).encode())

    def _send_events(self, events: list[dict[str, Any]]) -> None:
        lines = [*map(json.dumps, events), "[DONE]"]
        text = "".join(f"data: {line}\n\n" for line in lines)
        self._write(200, "text/event-stream", text.encode())

    def _write(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for each request."""
