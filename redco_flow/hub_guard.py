"""Refuse what a Hugging Face hub, or a mirror of it, must not do: write outside of the cache.

huggingface_hub takes the ETag that a server sends as the name of a file. And what comes by plain
HTTP can be changed by any machine on the network path. Neither is accepted unchecked.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

INSECURE_VARIABLE = "REDCO_FLOW_INSECURE_HUB"
_NAMES_OF_FILES = ("ETag", "X-Linked-Etag", "X-Repo-Commit")
_ONE_NAME = re.compile(r"(?!\.+$)[^/\\\0]*")


class UnsafeHub(ValueError):
    """The hub's address or one of its answers is refused; the message says why."""


def guard_downloads(endpoint: str, environ: Mapping[str, str] = os.environ) -> None:
    """Check the hub's address, and have every answer to this process checked.

    Raises:
        UnsafeHub: answers would come by plain HTTP from another machine.
    """
    parts = urlsplit(endpoint)
    is_safe = parts.scheme == "https" or _is_loopback(parts.hostname or "")
    if not is_safe and environ.get(INSECURE_VARIABLE) != "1":
        raise UnsafeHub(
            f"HF_ENDPOINT is {endpoint}: with plain HTTP any machine on the network path can "
            "change what is downloaded and read the token. Use https://, or set "
            f"{INSECURE_VARIABLE}=1."
        )
    _check_answers()


def check_inside(folder: Path, *caches: Path) -> None:
    """Check that every file of a downloaded snapshot is in its repository's cache.

    A link that leads elsewhere is deleted.

    Args:
        caches: where files may be: the repository's cache, and the store that repositories share.

    Raises:
        UnsafeHub: one is not; names it and where it leads.
    """
    roots = [cache.resolve() for cache in caches]
    outside = [
        path
        for path in folder.rglob("*")
        if not any(path.resolve().is_relative_to(root) for root in roots)
    ]
    if not outside:
        return
    targets = ", ".join(sorted(str(path.resolve()) for path in outside))
    for path in outside:
        path.unlink(missing_ok=True)
    raise UnsafeHub(
        f"the hub had files written outside of its cache, which were not ours to write: {targets}. "
        "Delete them, and do not trust this server."
    )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@lru_cache(maxsize=1)
def _check_answers() -> None:
    import huggingface_hub
    from huggingface_hub.utils import _http

    def client() -> Any:
        made = _http.default_client_factory()
        hooks = made.event_hooks
        made.event_hooks = {**hooks, "response": [*hooks["response"], _check_answer]}
        return made

    huggingface_hub.set_client_factory(client)


def _check_answer(response: Any) -> None:
    """Refuse an answer whose header would become the name of a file elsewhere.

    Names are read from answers to HEAD alone; an API's own ETag is often Base64, which has slashes.
    """
    if response.request.method != "HEAD":
        return
    for header in _NAMES_OF_FILES:
        value = str(response.headers.get(header, ""))
        name = value.removeprefix("W/").strip('"')
        if _ONE_NAME.fullmatch(name) is None:
            raise UnsafeHub(
                f"{response.url.host} sent the header {header}: {name[:80]!r}, which would be the "
                "name of a file outside of the cache. Do not trust this server."
            )
