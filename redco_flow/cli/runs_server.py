"""The page of all runs of a workspace: an HTTP server on loopback, for one user.

The link that `redco-flow ui` prints has a secret, for which the browser gets a cookie; everything
else is refused, as are requests for another host (DNS rebinding) and changes that a page of
another site sends. The secret is a new one each time, and no file has it.
"""

from __future__ import annotations

import gzip
import hashlib
import hmac
import re
import secrets
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

from redco_flow.cli.listing import Listing, encode_json, file_identities
from redco_flow.cli.status import stage_line
from redco_flow.cli.sweep_view import read_sweep_page
from redco_flow.cli.view import read_run_view
from redco_flow.errors import DamagedRecord, RedcoFlowError
from redco_flow.orchestrate.http_server import LOOPBACK, BadRequest, HttpServer, RequestHandler
from redco_flow.orchestrate.prefect.api import login_url, ui_url
from redco_flow.orchestrate.prefect.server import external_url, own_api
from redco_flow.records import digest_json
from redco_flow.report.compared_run import ComparedRun
from redco_flow.report.comparison import comparison_page
from redco_flow.report.log_cache import LogCache
from redco_flow.report.numbers import duration, state_mark
from redco_flow.report.page import (
    figures_of,
    overlaid_losses,
    read_histories,
    read_page,
    render_page,
    trainings_of,
)
from redco_flow.report.rendering import asset, render
from redco_flow.report.run_time import system_sections
from redco_flow.report.runs_page import render_runs_page
from redco_flow.report.stage_facts import StageFacts, logging_attempts, read_stages
from redco_flow.tracking.attempt import State
from redco_flow.tracking.notes import RECORD as NOTES
from redco_flow.tracking.notes import NotesChanged, RunNotes, read_notes, write_notes
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.sweep_directory import SweepDirectory
from redco_flow.tracking.workspace import Workspace

_DIGITS = 16
_RUNNING = ("running", "waiting")

ADDRESS = "127.0.0.1"
_ASSETS = ("page.js", "served.js", "plotly-basic.min.js")
_DIRECTORY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_MAX_BODY_BYTES = 1 << 16
_MAX_LIVE_RUNS = 4
_MIN_COMPRESSED_BYTES = 1 << 14
_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'unsafe-inline'; img-src data: blob:; form-action 'none'; base-uri 'none'; "
    "frame-ancestors 'none'",
}


def served_run_page(run: RunDirectory, workspace: Workspace, *, has_prefect: bool) -> str:
    """Return a run's report as HTML with what a served page has in addition.

    Args:
        has_prefect: whether a Prefect server runs, to which the page links.
    """
    # Before the page is read: what changes meanwhile is fetched once more.
    revision = _page_revision(run, str(read_run_view(run)["state"]))
    try:
        notes = read_notes(run)
    except DamagedRecord:  # which the page's remarks have
        notes = RunNotes()
    served = {"notes": asdict(notes), "has_prefect": has_prefect, "page": revision}
    return render_page(read_page(run, workspace, utc_now()), served)


def read_live(
    run: RunDirectory, workspace: Workspace, known_charts: str, logs: LogCache
) -> dict[str, Any]:
    """Return what changes on a run's page while it runs.

    `page` identifies everything but the charts: the browser fetches the page again when it
    changes. The charts are left out while `charts`, which identifies their files, is what the
    browser knows.

    Args:
        known_charts: `charts` of the browser's last answer; empty before the first.
        logs: of this run, kept from one call to the next.
    """
    view = read_run_view(run)
    stages = list(read_stages(run, workspace, lambda remark: None).values())
    charts = digest_json(file_identities(_chart_files(stages)))[:_DIGITS]
    lines = [
        stage_line(name, stage)
        for name, stage in view["stages"].items()
        if stage["state"] in _RUNNING
    ]
    # It is not known when a run was interrupted.
    tooks = {
        State.RUNNING: f"{duration(view['seconds'])} so far",
        State.INTERRUPTED: duration(None),
    }
    answer = {
        "state": view["state"],
        "mark": state_mark(view["state"]),
        "took": tooks.get(view["state"], ""),
        "lines": lines,
        "page": _page_revision(run, view["state"]),
        "charts": charts,
    }
    return answer if charts == known_charts else answer | _charts(run, stages, logs)


def _page_revision(run: RunDirectory, state: str) -> str:
    files = (run.state_path, run.path / NOTES, run.path / "run.json")
    return digest_json([state, *file_identities(files)])[:_DIGITS]


def _charts(run: RunDirectory, stages: Sequence[StageFacts], logs: LogCache) -> dict[str, Any]:
    """The page's charts in its order, and the facts of each training."""
    histories = read_histories(stages, logs.metrics)
    trainings = trainings_of(run, stages, histories, logs.goodput)
    system = system_sections(stages, logs.system_metrics)
    figures = figures_of(overlaid_losses(histories), trainings, system)
    return {
        "titles": [figure.title for figure in figures],
        "plots": [figure.plot for figure in figures],
        "facts": [training.facts for training in trainings],
    }


def _chart_files(stages: Sequence[StageFacts]) -> Iterator[Path]:
    for stage in stages:
        attempts = {one.path: one for one in (*stage.attempts, *logging_attempts(stage)[0])}
        for attempt in attempts.values():
            yield from (attempt.metrics_path, attempt.system_metrics_path)


class NotFound(Exception):
    """There is no such page; the message is for the reader."""


class RunsServer(HttpServer):
    """Serves the pages of one workspace from its creation on.

    Args:
        port: 0 is a free one.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int, workspace: Workspace) -> None:
        super().__init__((ADDRESS, port), _Handler)
        self.workspace, self.listing = workspace, Listing(workspace)
        self._logs: dict[str, tuple[threading.Lock, LogCache]] = {}
        self.secret = secrets.token_urlsafe(32)

    @property
    def cookie(self) -> str:
        """The cookie's name: browsers send it to every port of this host."""
        return f"redco-flow-{self.server_address[1]}"

    def read_live(self, run: RunDirectory, known_charts: str) -> dict[str, Any]:
        """Return what changes on a run's page; the logs of the last few runs are kept."""
        kept = self._logs.pop(run.id, None) or (threading.Lock(), LogCache())
        self._logs[run.id] = kept
        for name in list(self._logs)[:-_MAX_LIVE_RUNS]:
            self._logs.pop(name, None)
        lock, logs = kept
        with lock:
            return read_live(run, self.workspace, known_charts, logs)

    def front_page(self) -> str:
        """Return the page of all runs, which has no rows yet."""
        values = {"workspace": str(self.workspace.root), "has_prefect": _has_prefect()}
        return render("workspace.html.jinja", "runs", values, has_charts=False)

    def prepare(self) -> None:
        """Read what the front page and its rows need, so that the first answer is as fast."""
        self.listing.encoded()
        self.front_page()

    def link(self, page: str = "/") -> str:
        """Return the address of a page that lets a browser in."""
        return f"http://{ADDRESS}:{self.server_address[1]}{page}?token={self.secret}"


class _Handler(RequestHandler):
    server: RunsServer

    def do_GET(self) -> None:  # noqa: N802 (of http.server)
        url = urlsplit(f"/{self.path.lstrip('/')}")
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        if not self._is_allowed(url.path, query):
            return
        try:
            self._answer(unquote(url.path), query)
        except NotFound as error:
            self._message(404, str(error))
        except (RedcoFlowError, OSError) as error:
            if not isinstance(error, ConnectionError | TimeoutError):
                self._message(500, _text(error))
        except Exception as error:  # noqa: BLE001 (the server goes on)
            traceback.print_exc()
            self._message(500, f"This page could not be made: {type(error).__name__}: {error}")

    def do_POST(self) -> None:  # noqa: N802 (of http.server)
        self.close_connection = True  # a body that is refused is not read
        if not self._is_allowed("", {}):
            return
        origin = self.headers.get("Origin", "")
        if origin != f"http://{self.headers.get('Host', '')}":
            self._json(403, {"error": f"the request is of a page of {origin or 'no origin'}"})
            return
        try:
            if self.path != "/api/notes":
                raise BadRequest(f"unknown path {self.path}")
            self._json(*self._write_notes(self.read_json(_MAX_BODY_BYTES)))
        except NotFound as error:
            self._json(404, {"error": str(error)})
        except (BadRequest, RedcoFlowError, OSError) as error:
            self._json(400, {"error": _text(error)})

    def _is_allowed(self, path: str, query: Mapping[str, str]) -> bool:
        """Whether the request may be answered; one that may not is answered here."""
        if self.host() not in LOOPBACK:
            self._message(403, f"This server is {' or '.join(LOOPBACK)}, not {self.host()}.")
            return False
        if self._is_secret(query.get("token", "")):
            cookie = f"{self.server.cookie}={self.server.secret}; Path=/; HttpOnly"
            others = urlencode({name: one for name, one in query.items() if name != "token"})
            location = f"{path}?{others}" if others else path
            # Not Strict: browsers leave such a cookie out where the link is in another page.
            headers = {"Location": location, "Set-Cookie": f"{cookie}; SameSite=Lax"}
            self.write(303, "text/plain", b"", headers)
            return False
        if self._is_secret(self._cookie()):
            return True
        self._message(
            401,
            "This page is for the user who started it. Open the link that `redco-flow ui` "
            "printed; it has a new secret after each start.",
        )
        return False

    def _is_secret(self, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.server.secret.encode())

    def _cookie(self) -> str:
        # Not SimpleCookie: it gives up at the first cookie that is unusual, of whatever program.
        for part in self.headers.get("Cookie", "").split(";"):
            name, _, value = part.strip().partition("=")
            if name == self.server.cookie:
                return value
        return ""

    def _answer(self, path: str, query: Mapping[str, str]) -> None:
        workspace = self.server.workspace
        if not path.isprintable():
            raise NotFound(f"There is no page {path!r}.")
        match path.split("/")[1:]:
            case [""]:
                self._html(self.server.front_page())
            case ["api", "runs"]:
                content = self.server.listing.encoded(is_fresh="fresh" in query)
                self._send(200, "application/json", content)
            case ["assets", name] if name in _ASSETS:
                self._send(200, "text/javascript; charset=utf-8", asset(name).encode())
            case ["run", name]:
                self._redirect(f"/run/{quote(self._run(name).id)}/")
            case ["run", name, ""]:
                has_prefect = _has_prefect()
                self._html(served_run_page(self._run(name), workspace, has_prefect=has_prefect))
            case ["run", name, "live"]:
                self._json(200, self.server.read_live(self._run(name), query.get("charts", "")))
            case ["run", name, *parts]:
                self._file(self._run(name).path / "/".join(parts))
            case ["sweep", name]:
                page = read_sweep_page(SweepDirectory(self._directory("sweeps", name)))
                self._html(render_runs_page(page, served={}))
            case ["compare"]:
                names = dict.fromkeys(query.get("runs", "").split(","))
                runs = [ComparedRun(self._run(name)) for name in names if name]
                if len(runs) < 2:
                    raise NotFound("Select two runs or more to compare them.")
                self._html(render_runs_page(comparison_page(runs, utc_now()), served={}))
            case ["prefect"]:
                self._redirect(self._prefect_page(query.get("run", "")))
            case _:
                raise NotFound(f"There is no page {path}.")

    def _run(self, name: str) -> RunDirectory:
        return RunDirectory(self._directory("runs", name))

    def _directory(self, folder: str, name: str) -> Path:
        path = self.server.workspace.root / folder / name
        if not _DIRECTORY_NAME.fullmatch(name) or not path.is_dir():
            what = folder.removesuffix("s")
            raise NotFound(
                f"There is no {what} {name} in {self.server.workspace.root}: its directory was "
                "deleted, or never existed."
            )
        return path

    def _file(self, path: Path) -> None:
        """Send a log of any run, to which reports link relative to their own run."""
        found = path.resolve()
        is_log = found.is_relative_to(self.server.workspace.runs.resolve()) and found.is_file()
        if not is_log or found.suffix != ".log":
            raise NotFound(f"Only logs of runs are shown here; {path} is none.")
        with found.open("rb") as file:
            # Exactly as much as was announced: the log of a running job grows meanwhile.
            length = found.stat().st_size
            headers = {**_HEADERS, "Content-Length": str(length)}
            self.write(200, "text/plain; charset=utf-8", b"", headers)
            while length and (chunk := file.read(min(length, 1 << 20))):
                self.wfile.write(chunk)
                length -= len(chunk)
            self.close_connection |= length > 0

    def _prefect_page(self, run: str) -> str:
        """The address of Prefect's page; its secret is in no page of ours."""
        url = self._run(run).read_state().get("prefect_url") if run else None
        page = urlsplit(str(url)).path if url else "/"
        if named := external_url():
            return f"{ui_url(named)}{page}"
        if (api := own_api()) is None:
            raise NotFound("No Prefect server runs; `redco-flow ui --prefect` starts one.")
        return login_url(api, page)

    def _write_notes(self, body: Mapping[str, object]) -> tuple[int, dict[str, object]]:
        match body:
            case {"run": str(name), "note": str(note), "labels": str(labels),
                  "edited_at": str(edited_at), **rest} if not rest:  # fmt: skip
                try:
                    made = write_notes(
                        self._run(name), note, labels.split(","), expected_edited_at=edited_at
                    )
                except NotesChanged as change:
                    return 409, {"error": str(change), "present": asdict(change.present)}
                return 200, {"edited_at": made.edited_at}
        raise BadRequest("the body must have run, note, labels and edited_at, each a text")

    def _html(self, text: str) -> None:
        self._send(200, "text/html; charset=utf-8", text.encode())

    def _message(self, status: int, text: str) -> None:
        if self.headers.get("Sec-Fetch-Dest", "document") != "document":
            self._json(status, {"error": text})
            return
        page = render("message.html.jinja", str(status), {}, message=text, has_charts=False)
        self._send(status, "text/html; charset=utf-8", page.encode())

    def _json(self, status: int, value: object) -> None:
        self._send(status, "application/json", encode_json(value))

    def _redirect(self, location: str) -> None:
        self.write(303, "text/plain", b"", {"Location": location, "Cache-Control": "no-store"})

    def _send(self, status: int, kind: str, content: bytes) -> None:
        """Send a response, or only that it is what the browser has already."""
        etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        if status == 200 and self.headers.get("If-None-Match") == etag:
            self.write(304, kind, b"", {"ETag": etag, **_HEADERS})
            return
        headers = {"ETag": etag, **_HEADERS}
        accepted = self.headers.get("Accept-Encoding", "")
        if len(content) > _MIN_COMPRESSED_BYTES and "gzip" in accepted:
            content = gzip.compress(content, compresslevel=1)
            headers |= {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
        self.write(status, kind, content, headers)


def _has_prefect() -> bool:
    return bool(external_url()) or own_api() is not None


def _text(error: Exception) -> str:
    """An error in one line, with the path of one of the operating system's."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)
