"""A Prefect API by its address: whether somebody answers there, and where its pages are.

Does not import Prefect: a health check is one HTTP request.
"""

from __future__ import annotations

import http.client
import os
import urllib.parse
from dataclasses import dataclass


@dataclass(frozen=True)
class PrefectApi:
    """The API that a run reports to.

    Args:
        is_ours: redco-flow's own server on this host, or a short-lived one.
        is_short_lived: it ends with the run's own process, and has no pages.
    """

    url: str
    is_ours: bool
    is_short_lived: bool = False

    @property
    def database(self) -> str:
        """Which database stands behind it: our server's port may change, its database stays."""
        return f"local@{os.uname().nodename}" if self.is_ours else self.url


def is_healthy(api_url: str, *, timeout_seconds: float = 2.0) -> bool:
    """Ask the API's health page once; any answer below 500 means that somebody is there.

    An API with a password answers 401, which is alive.
    """
    parts = urllib.parse.urlsplit(api_url)
    connection_type = (
        http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    )
    try:
        connection = connection_type(parts.netloc, timeout=timeout_seconds)
        try:
            connection.request("GET", f"{parts.path.rstrip('/')}/health")
            return connection.getresponse().status < 500
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError):
        return False


def ui_url(api_url: str) -> str:
    """Return the address of the pages that belong to an API's address."""
    return api_url.rstrip("/").removesuffix("/api")
