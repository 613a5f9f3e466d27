"""A small HTTP server in front of a checkpoint, for trying a model: one answer at a time.

On a loopback address it takes requests that name this machine as their host, so that a page of
another site cannot ask it through a browser; with a token, requests that have it.
"""

from __future__ import annotations

import hmac
import json
import select
import socket
import threading
from contextlib import closing
from itertools import chain
from typing import Any
from urllib.parse import unquote

from redco_flow.orchestrate.checkpoints.chat import CannotConverse, ProcessDied
from redco_flow.orchestrate.checkpoints.completions import (
    CHAT_PATH,
    TEXT_PATH,
    Completions,
    Events,
)
from redco_flow.orchestrate.http_server import LOOPBACK, BadRequest, HttpServer, RequestHandler

_PATHS = (CHAT_PATH, TEXT_PATH, "/v1/models")
MAX_BODY_BYTES = 16 << 20
_OF_EVENTS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "Connection": "close",
}


class ModelServer(HttpServer):
    """Listens from its creation on; answers once `completions` is set.

    Args:
        host, port: of the address; port 0 is a free one.
        token: that requests must have; empty: none.

    Attributes:
        died: the error that ended the process with the model.

    Raises:
        OSError: it cannot listen at this address.
    """

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


class _Handler(RequestHandler):
    server: ModelServer

    def do_GET(self) -> None:  # noqa: N802 (of http.server)
        if not self._is_allowed():
            return
        assert self.server.completions is not None
        models, _, name = self.path.partition("/v1/models")
        found = None
        if not models and (not name or name.startswith("/")):
            found = self.server.completions.models(unquote(name.removeprefix("/")))
        if found is not None:
            self._send(200, found)
        else:
            self._refuse(404, f"unknown path {self.path}; known: {', '.join(_PATHS)}")

    def do_POST(self) -> None:  # noqa: N802 (of http.server)
        if not self._is_allowed():
            return
        if self.path not in (CHAT_PATH, TEXT_PATH):
            self._refuse(404, f"unknown path {self.path}; known: {', '.join(_PATHS)}")
            return
        try:
            body = self.read_json(MAX_BODY_BYTES)
        except BadRequest as error:
            self._refuse(400, str(error))
            return
        assert self.server.completions is not None
        try:
            with self.server.turn:
                if self._has_gone():
                    return
                answer = self.server.completions.answer(self.path, body)
                if not isinstance(answer, dict):
                    self._send_events(answer)
                    return
        except (BadRequest, CannotConverse) as error:
            self._end_if_died(error)
            self._refuse(_status(error), str(error))
            return
        self._send(200, answer)

    def _end_if_died(self, error: Exception) -> None:
        """End the server where the process with the model has ended."""
        if isinstance(error, ProcessDied):
            self.server.died = error
            threading.Thread(target=self.server.shutdown).start()

    def _has_gone(self) -> bool:
        """Whether the client has closed its connection, as after its timeout."""
        is_readable, _, _ = select.select([self.connection], [], [], 0)
        if not is_readable:
            return False
        self.close_connection = True
        return not self.connection.recv(1, socket.MSG_PEEK)

    def _is_allowed(self) -> bool:
        """Whether the request may be answered; one that may not is refused here."""
        token, host = self.server.token, self.host()
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            self._refuse(401, "the header `Authorization: Bearer TOKEN` is missing or wrong")
            return False
        if not token and host not in LOOPBACK:
            self._refuse(403, f"the request is for host {host}, not for {' or '.join(LOOPBACK)}")
            return False
        return True

    def _refuse(self, status: int, message: str) -> None:
        self.close_connection = True  # what is left of the body is not read
        self._send(status, _problem(status, message))

    def _send(self, status: int, value: dict[str, Any]) -> None:
        self.write(status, "application/json", json.dumps(value).encode())

    def _send_events(self, events: Events) -> None:
        """Write events as they come; a client that has gone ends them.

        Raises:
            CannotConverse: there is no first one, and nothing was written.
        """
        with closing(events):
            first = next(events)
            self.close_connection = True  # which ends the body: its length is not known
            self.send_response(200)
            for name, value in _OF_EVENTS.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                for event in chain([first], events):
                    if self._has_gone():
                        return
                    self._write_event(json.dumps(event))
                self._write_event("[DONE]")
            except CannotConverse as error:
                self._end_if_died(error)
                self._write_event(json.dumps(_problem(_status(error), str(error))))

    def _write_event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())


def _status(error: Exception) -> int:
    return 500 if isinstance(error, ProcessDied) else 400


def _problem(status: int, message: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "code": None}}
