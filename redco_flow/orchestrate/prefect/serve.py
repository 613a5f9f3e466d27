"""Serve Prefect's API at a socket that listens already.

`python -P serve.py DESCRIPTOR`. The launcher binds the port and passes the open socket to this
process, so that the address cannot be taken meanwhile. It writes a byte to standard input once it
has recorded the server; without that the process ends.
"""

from __future__ import annotations

import argparse
import gc
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

_SECONDS_OF_IDLE_CONNECTION = 5
_COOKIE = "redco-flow-browser-"  # with the port; says only that this browser has been let in
_LOGIN_PATH = "/redco-flow/login"  # prefect_api.LOGIN_PATH; this file runs by itself
_PAGE_HEADERS = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; script-src 'unsafe-inline'"),
]
# The secret and a page's path stand behind `#`, which browsers send to no server. Prefect's pages
# look for the secret where its own login form puts it.
_LOGIN_PAGE = """<!doctype html>
<title>redco-flow</title>
<noscript>This page needs JavaScript.</noscript>
<script>
const [secret, page = "/"] = location.hash.slice(1).split("&");
localStorage.setItem("prefect-password", btoa(secret));
document.cookie = "COOKIE" + location.port + "=1; path=/; max-age=31536000; samesite=strict";
location.replace(/^[/](?![/\\\\])/.test(page) ? page : "/");
</script>
""".replace("COOKIE", _COOKIE)
_HINT_PAGE = """<!doctype html>
<title>redco-flow</title>
<p>This Prefect server is for its user alone. <code>redco-flow ui --prefect</code> prints a
link that lets a browser in, <code>redco-flow ui --prefect RUN</code> one to a run's page.</p>
"""

Application = Callable[[Any, Any, Any], Awaitable[None]]


def main(arguments: Sequence[str]) -> None:
    """Serve until told to end."""
    parser = argparse.ArgumentParser(prog="serve.py")
    parser.add_argument("descriptor", type=int)
    options = parser.parse_args(arguments)
    if not sys.stdin.buffer.read(1):
        sys.exit("the launcher ended before it recorded this server, which nothing would find.")
    gc.set_threshold(50_000)  # what the imports make stays
    import uvicorn

    config = uvicorn.Config(
        _create_app,
        factory=True,
        access_log=False,
        log_level="warning",
        timeout_keep_alive=_SECONDS_OF_IDLE_CONNECTION,
    )
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=options.descriptor)])


def _create_app() -> Application:
    """Return Prefect's application with the page that lets a browser in."""
    from prefect.server.api.server import create_app

    prefect: Application = create_app()

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == _LOGIN_PATH:
            page = _LOGIN_PAGE
        elif _is_page_of_unknown_browser(scope):
            page = _HINT_PAGE
        else:
            await prefect(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": _PAGE_HEADERS})
        await send({"type": "http.response.body", "body": page.encode()})

    return serve


def _is_page_of_unknown_browser(scope: Any) -> bool:
    """Whether a browser opens a page that would only say "Authentication failed" to it."""
    if scope["type"] != "http" or scope["method"] != "GET" or scope["path"].startswith("/api"):
        return False
    headers = dict(scope["headers"])
    cookie = f"{_COOKIE}{scope['server'][1]}=1".encode()
    return b"text/html" in headers.get(b"accept", b"") and cookie not in headers.get(b"cookie", b"")


if __name__ == "__main__":
    main(sys.argv[1:])
