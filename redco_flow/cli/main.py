"""The `redco-flow` command: reads the words, calls the verb, turns errors into exit codes.

argparse, because it starts in 30 ms and a help page must appear at once. Every verb's module
is light; what a verb needs it imports when it runs.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from redco_flow import __version__
from redco_flow.cli import (
    artifacts,
    chat,
    compare,
    diff,
    doctor,
    drill,
    export,
    history,
    init,
    promote,
    run,
    schedule,
    status,
)
from redco_flow.cli.arguments import Verbs
from redco_flow.errors import RedcoFlowError, WorkspaceError
from redco_flow.search_path import append_current_directory
from redco_flow.terminal_text import VisibleStream

_DESCRIPTION = """\
Launch, shard, track and chain JAX finetuning jobs. A pipeline is a YAML file.

  redco-flow run pipelines/quickstart.yaml           run it on this machine
  redco-flow run FILE -p PROFILE learning_rate=1e-4  elsewhere, with a setting changed
  redco-flow status                                  how the last run is doing
  redco-flow why rougeL                              where a number came from
"""
_EXIT_CODES = """\
exit codes: 0 ok, 1 the run failed, 2 usage or configuration, 3 does not fit,
4 cluster unreachable, 5 cancelled, 130 detached
"""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps our line breaks, and every verb on its summary's line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=16)


class _Parser(argparse.ArgumentParser):
    """argparse that suggests the nearest verb or option."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {message}\n  {self.prog} --help lists what it takes.\n")
        raise SystemExit(2)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = _Parser(
        prog="redco-flow",
        description=_DESCRIPTION,
        epilog=_EXIT_CODES,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"redco-flow {__version__}")
    verbs = Verbs(parser.add_subparsers(title="verbs", metavar="VERB", required=True))
    groups = (
        *(init, run, status, artifacts, diff, compare, history),
        *(promote, schedule, export, chat, doctor, drill),
    )
    for group in groups:
        group.register(verbs)
    parser.set_defaults(whole_parser=parser)  # for the shells' completion
    return parser


def _refuse_unknown_verb(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    verb = next((word for word in words if not word.startswith("-")), None)
    known = Verbs.names(parser)
    if verb is not None and verb == words[0] and verb not in known:
        near = difflib.get_close_matches(verb, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        parser.error(f"there is no verb {verb!r}{hint} Verbs: {', '.join(known)}.")


def _take_overrides(parser: argparse.ArgumentParser, extras: list[str]) -> list[str]:
    """The words argparse left over: settings, or a mistake."""
    unknown = [word for word in extras if word.startswith("-") or not _is_setting(word)]
    if unknown:
        parser.error(f"unknown argument {unknown[0]!r}; a setting is written key=value")
    return extras


def _is_setting(word: str) -> bool:
    return "=" in word or word.startswith("~")


def run_command(words: Sequence[str]) -> int:
    """Run one command line.

    Returns:
        The exit code.
    """
    parser = build_parser()
    if not words:
        parser.print_help()
        return 0
    _refuse_unknown_verb(parser, words)
    options, extras = parser.parse_known_args(words)
    if extras and not hasattr(options, "overrides"):
        parser.error(f"unknown argument {extras[0]!r}")
    if hasattr(options, "overrides"):
        options.overrides = [*options.overrides, *_take_overrides(parser, extras)]
    # Recipes, stage kinds, executors … of the user's are importable from where the command runs.
    append_current_directory()
    try:
        code: int = options.verb(options)
    except RedcoFlowError as error:
        sys.stderr.write(f"redco-flow: {error}\n")
        return error.exit_code
    except OSError as error:
        # A file of the workspace's that cannot be read or written; without a name it is our fault.
        if error.filename is None:
            raise
        sys.stderr.write(f"redco-flow: {error.filename}: {error.strerror}.\n")
        return WorkspaceError.exit_code
    return code


def main() -> None:
    """Entry point of the console script."""
    # Names, messages and log lines hold what their writers chose: none of it acts on a terminal.
    sys.stdout, sys.stderr = VisibleStream(sys.stdout), VisibleStream(sys.stderr)
    try:
        code = run_command(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output (head, less) went away: that is no error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except KeyboardInterrupt:
        code = 130
    raise SystemExit(code)


if __name__ == "__main__":
    main()
