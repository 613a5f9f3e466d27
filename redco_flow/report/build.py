"""Write a run's page: one HTML file that needs nothing but itself, to be kept and sent around."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from redco_flow import __version__
from redco_flow.records import write_text
from redco_flow.report import number_format
from redco_flow.report.page import Page, read_page
from redco_flow.tracking.clock import Clock, utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.workspace import Workspace

_TEMPLATES = Path(__file__).parent / "templates"
_NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


def build_report(run: RunDirectory, workspace: Workspace, *, clock: Clock = utc_now) -> Path:
    """Write the run's report.html anew and return its path; may be called at any time.

    What is missing or damaged in the run's files is said in the page.

    Args:
        run: the run, in whatever state.
        workspace: where its artifacts and results are.
        clock: the time of day, for people.

    Raises:
        OSError: the page cannot be written: the disk is full or read-only; names the path.
    """
    write_text(run.report_path, render(read_page(run, workspace, clock())))
    return run.report_path


def render(page: Page) -> str:
    """Return the page as HTML; every text of the user's is escaped."""
    try:
        html = _environment().get_template("page.html.jinja").render(page=page, version=__version__)
    except Exception as error:  # noqa: BLE001 (a report that says so is better than none)
        html = _page_without_pieces(page, error)
    # Half a character (a lone surrogate) cannot be written, control characters are no HTML.
    return _NO_TEXT.sub("\ufffd", html)


@cache
def _environment() -> Environment:
    """Templates are compiled once in a process."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        number=number_format.number, score=number_format.score, moment=number_format.moment
    )
    return environment


def _page_without_pieces(page: Page, error: Exception) -> str:
    return Markup(
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>{run}</title>'
        "<h1>{run}</h1><p>The report could not be drawn: {error}</p>"
    ).format(run=page.run, error=f"{type(error).__name__}: {error}")
