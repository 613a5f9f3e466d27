"""Turn what a page shows into one HTML file that needs nothing else: styles, scripts, charts.

Every text of the user's is escaped, and a content security policy lets no script run but the two
of `assets/`, which it names by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import marshal
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import BytecodeCache, Environment, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket, bc_magic
from markupsafe import Markup

from redco_flow import __version__
from redco_flow.records import create_beside
from redco_flow.report import numbers

_FOLDER = Path(__file__).parent
_NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def render(template: str, name: str, served: Mapping[str, Any] | None = None, **values: Any) -> str:
    """Return a page as HTML.

    Args:
        template: a file of `templates/`.
        name: of the run or sweep, for a page that cannot be drawn.
        served: what a page of `redco-flow ui` has in addition; it loads its scripts from there.
            None: the page is a file that needs nothing else.
        values: what the template reads.
    """
    try:
        html = (
            _environment()
            .get_template(template)
            .render(version=__version__, served=served, **values)
        )
    except Exception as error:  # noqa: BLE001 (a report with the error is better than none)
        html = _page_without_pieces(name, error)
    # Half a character (a lone surrogate) cannot be written, control characters are no HTML.
    return _NO_TEXT.sub("\ufffd", html)


def render_table(table: Any) -> str:
    """Return a table of `runs_page` as HTML for a page that is served."""
    pieces: Any = _environment().get_template("pieces.html.jinja").make_module({"served": {}})
    return str(pieces.table(table))


@cache
def _environment() -> Environment:
    """Templates are compiled once in a process, or by an earlier one."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER / "templates"),
        bytecode_cache=_CompiledTemplates(),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=numbers.number,
        score=numbers.score,
        moment=numbers.moment,
        duration=numbers.duration,
        state_mark=numbers.state_mark,
    )
    environment.globals.update(script=asset, digest=_digest)
    compact = {"separators": (",", ":"), "allow_nan": False}
    environment.policies["json.dumps_kwargs"] = compact
    return environment


class _CompiledTemplates(BytecodeCache):
    """Compiled templates in `templates/__pycache__`, where Python would keep modules of theirs.

    A file begins with a digest of all that its code depends on. Where none can be written,
    templates are compiled in each process.
    """

    def load_bytecode(self, bucket: Bucket) -> None:
        """Read a template's code, if the file is of its current source."""
        with suppress(OSError, ValueError, EOFError, TypeError):
            content = self._path(bucket).read_bytes()
            digest = self._digest(bucket)
            if content.startswith(digest):
                code = content[len(digest) :]
                bucket.code = marshal.loads(code)  # noqa: S302 (ours, as are .pyc files)

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Write a template's code, unless Python is not to write any."""
        path = self._path(bucket)
        if sys.dont_write_bytecode:
            return
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = create_beside(path)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(self._digest(bucket) + marshal.dumps(bucket.code))
                temporary.replace(path)
            except OSError:
                temporary.unlink(missing_ok=True)

    @staticmethod
    def _path(bucket: Bucket) -> Path:
        return Path(cache_from_source(str(_FOLDER / "templates" / bucket.key)))

    @staticmethod
    def _digest(bucket: Bucket) -> bytes:
        own = Path(__file__).read_bytes()  # the environment's settings
        known = bc_magic + jinja2.__version__.encode() + own + bucket.checksum.encode()
        return hashlib.sha256(known).digest()

    def get_cache_key(self, name: str, filename: str | None = None) -> str:
        """Return a template's name: there is one folder of them."""
        return name


@cache
def asset(name: str) -> Markup:
    """Return a file of `assets/`, as the content of a `<script>`."""
    return Markup((_FOLDER / "assets" / name).read_text(encoding="utf-8"))  # noqa: S704 (our own)


@cache
def _digest(name: str) -> str:
    """The digest of a script for a content security policy."""
    digest = hashlib.sha256(asset(name).encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _page_without_pieces(name: str, error: Exception) -> str:
    return Markup(
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        "<h1>{name}</h1><p>The report could not be drawn: {error}</p>"
    ).format(name=name, error=f"{type(error).__name__}: {error}")
