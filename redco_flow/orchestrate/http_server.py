"""Parts of this project's small HTTP servers: they listen on one address and answer JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost")
_SECONDS_FOR_A_CLIENT = 60


class BadRequest(ValueError):
    """A request that cannot be answered; says what is wrong."""


class HttpServer(ThreadingHTTPServer):
    """A thread for each connection; they end with the process."""

    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what went wrong, unless the client has gone."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class RequestHandler(BaseHTTPRequestHandler):
    """Reads and writes one connection's requests; prints nothing for each of them."""

    protocol_version = "HTTP/1.1"
    timeout = _SECONDS_FOR_A_CLIENT

    def host(self) -> str | None:
        """Return the host that the request names, without its port."""
        try:
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            return None

    def read_json(self, max_bytes: int) -> dict[str, Any]:
        """Return the request's body.

        Raises:
            BadRequest: it is not a JSON object, or too long.
        """
        if self.headers.get_content_type() != "application/json":
            raise BadRequest("the header `Content-Type` must be application/json")
        length = self.headers.get("Content-Length", "")
        is_number = length.isdecimal() and len(length) <= len(str(max_bytes))
        if not is_number or int(length) > max_bytes:
            raise BadRequest(f"the body must have a Content-Length of at most {max_bytes}")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        return body

    def write(
        self, status: int, kind: str, content: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a response.

        Args:
            kind: its Content-Type.
            headers: further ones; a Content-Length where the caller sends the content.
        """
        self.send_response(status)
        all_headers = {"Content-Type": kind, "Content-Length": str(len(content)), **(headers or {})}
        for name, value in all_headers.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for each request."""
