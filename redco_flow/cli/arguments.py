"""Declare verbs, their common options and how they are called."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.errors import UsageError
from redco_flow.local_paths import expanded

if TYPE_CHECKING:
    from redco_flow.tracking.workspace import Workspace

SUBMITTING = ("run", "plan")
"""Verbs that take code along to a login node."""
ON_LOGIN_NODE = (
    *("resume", "retry", "cancel", "ls", "status", "attach", "logs", "artifacts", "why", "impact"),
    *("verify", "du", "diff", "compare", "history", "report", "aliases"),
)
"""Verbs that run on a login node as they are."""

VerbFunction = Callable[[argparse.Namespace], int]


class Verbs:
    """Verbs, each a subparser with its function.

    Args:
        subparsers: of the parser whose verbs they are.
        summaries: of each verb, its line in the help page; in its order.
        over_ssh: verbs that a login node can run.
    """

    def __init__(
        self, subparsers: Any, summaries: Mapping[str, str], *, over_ssh: Sequence[str] = ()
    ) -> None:
        self._subparsers = subparsers
        self._summaries = summaries
        self._over_ssh = over_ssh

    def add(self, name: str, function: VerbFunction) -> argparse.ArgumentParser:
        """Declare the verb `name`."""
        summary = self._summaries[name]
        parser: argparse.ArgumentParser = self._subparsers.add_parser(
            name, help=summary, description=summary, allow_abbrev=False
        )
        parser.set_defaults(verb=function)
        if name in self._over_ssh:
            _add_ssh(parser, name)
        return parser

    def list_all(self) -> None:
        """Have the help page name all verbs, none of which was added."""
        for name, summary in self._summaries.items():
            self._subparsers.add_parser(name, help=summary)


def _add_ssh(parser: argparse.ArgumentParser, name: str) -> None:
    """--ssh: run the verb on a cluster's login node."""
    parser.add_argument(
        "--ssh",
        metavar="[USER@]HOST[:WORKSPACE]",
        help="run this on a cluster's login node; default: that of the profile, if it has `ssh:`",
    )
    if name in SUBMITTING:
        parser.add_argument(
            "--send",
            action="append",
            default=[],
            metavar="PATH",
            help="with --ssh: a file or folder to take along besides the code, such as small data",
        )
    else:
        parser.add_argument("-p", "--profile", metavar="PROFILE", help="a profile with `ssh:`")


def add_json(parser: argparse.ArgumentParser) -> None:
    """--json: one JSON document on stdout instead of text for people."""
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")


def add_html(parser: argparse.ArgumentParser) -> None:
    """--html: a page in addition to the printed tables."""
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write an HTML page with charts that opens offline",
    )


def add_workspace(parser: argparse.ArgumentParser) -> None:
    """--workspace: where the runs and artifacts are."""
    parser.add_argument(
        "-w",
        "--workspace",
        type=Path,
        default=None,
        metavar="DIR",
        help="the workspace (default: $REDCO_FLOW_WORKSPACE, then ./redco-workspace)",
    )


def add_checkpoint(parser: argparse.ArgumentParser, *, or_published: bool = False) -> None:
    """CHECKPOINT: which one is meant; or a published model."""
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="artifact id or path, @ALIAS, last, RUN[/STAGE[/best/SCORE]], STAGE of the last run"
        + (", or the DIRECTORY of a Hugging Face model" if or_published else ""),
    )


def positive(text: str) -> int:
    """Read an option's whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def add_run(parser: argparse.ArgumentParser) -> None:
    """RUN: which run is meant."""
    parser.add_argument(
        "run",
        nargs="?",
        default="@last",
        metavar="RUN",
        help="run id or a prefix of it; default: last, the last run",
    )


def add_profile(parser: argparse.ArgumentParser) -> None:
    """-p, --set: where a pipeline runs, with what changed."""
    parser.add_argument(
        "-p",
        "--profile",
        default="local",
        metavar="PROFILE",
        help="cluster profile (default: local)",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting; KEY=VALUE without --set does the same",
    )


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """FILE, -p, key=value: which pipeline, where, with what changed."""
    parser.add_argument("file", metavar="FILE", help="the pipeline: a YAML file")
    add_profile(parser)
    parser.add_argument("--from", dest="from_stage", metavar="STAGE", help="start at this stage")
    parser.add_argument("--until", dest="until_stage", metavar="STAGE", help="end with this stage")
    parser.add_argument(
        "--force",
        dest="force",
        action="append",
        default=[],
        metavar="STAGE",
        help="run this stage even if it has a result",
    )


def workspace_path(options: argparse.Namespace) -> Path:
    """The path of the workspace that a read verb looks into, as it was given but for a `~`."""
    given: Path | None = options.workspace
    return expanded(given or os.environ.get("REDCO_FLOW_WORKSPACE", "redco-workspace"))


def workspace_of(options: argparse.Namespace) -> Workspace:
    """The workspace that a read verb looks into; it need not be there, and is not made."""
    from redco_flow.tracking.workspace import Workspace

    return Workspace(workspace_path(options).absolute())


def check_port(port: int) -> None:
    """Raise where a number is no port.

    Raises:
        UsageError: it is not.
    """
    if not 0 <= port < 1 << 16:
        raise UsageError(f"--port {port}: ports are 0 to 65535.")


def cannot_listen(host: str, port: int, error: OSError) -> UsageError:
    """Return the error of a server whose address is taken or not this machine's."""
    return UsageError(
        f"cannot listen at {host}, port {port} ({error.strerror or error}). "
        "Give another --port, or 0 for a free one."
    )
