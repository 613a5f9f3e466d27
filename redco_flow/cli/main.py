"""The `redco-flow` command: reads the words, calls the verb, turns errors into exit codes.

argparse, because it starts in 30 ms and a help page must appear at once. A verb's module is
imported where the verb is asked for; what else it needs it imports when it runs.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from redco_flow import __version__
from redco_flow.cli.arguments import ON_LOGIN_NODE, SUBMITTING, Verbs
from redco_flow.errors import RedcoFlowError, UsageError, WorkspaceError
from redco_flow.records import explain_no_space
from redco_flow.search_path import append_current_directory
from redco_flow.terminal_text import VisibleStream

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

# In the order of the help page: each verb's module in `redco_flow.cli`, and its summary.
VERBS = {
    "init": ("init", "write a project: a pipeline for your own file, or an example"),
    "run": ("run", "run a pipeline"),
    "plan": ("run", "print what a run would do, and why"),
    "resume": ("run", "continue a run that was interrupted, failed or cancelled"),
    "retry": ("run", "start new attempts of a run's failed and cancelled stages"),
    "cancel": ("run", "stop a run; what its stages saved is kept"),
    "ls": ("status", "list the runs, newest first"),
    "status": ("status", "show one run: stages, progress, metrics"),
    "attach": ("status", "follow a run until it ends; Ctrl-C detaches again"),
    "logs": ("status", "print what a run's stages printed"),
    "artifacts": ("artifacts", "list the published artifacts, newest first"),
    "why": ("artifacts", "trace a metric or artifact back to its data"),
    "impact": ("artifacts", "list what was made from an artifact or a data file"),
    "verify": ("artifacts", "read all bytes of artifacts and compare their digests"),
    "du": ("disk", "show what uses the workspace's disk space"),
    "rm": ("disk", "delete the artifacts, work and logs of runs; their records stay"),
    "gc": ("disk", "delete what is not needed of old runs, or what no run refers to"),
    "export": ("export", "write a checkpoint in the format of transformers or PEFT"),
    "bundle": ("export", "write a run's or checkpoint's artifacts and lineage to a tar file"),
    "unbundle": ("export", "take a bundle's artifacts into this workspace"),
    "diff": ("compare", "compare two runs: settings, data, code, scores"),
    "compare": ("compare", "compare several runs: settings that differ, metrics"),
    "history": ("compare", "list the runs of one pipeline over time, oldest first"),
    "report": ("compare", "render the HTML report of a run or sweep again"),
    "ui": ("ui", "serve a page of all runs to your browser; --prefect: Prefect's UI"),
    "promote": ("promote", "point an alias such as production to a checkpoint, if it is better"),
    "rollback": ("promote", "point an alias back to its previous checkpoint"),
    "aliases": ("promote", "list the aliases of checkpoints"),
    "schedule": ("schedule", "run a pipeline repeatedly, on a schedule"),
    "serve": ("schedule", "run the process that starts scheduled runs"),
    "predict": ("predict", "predict with a checkpoint for the rows of a new file"),
    "chat": ("chat", "converse with a checkpoint on this machine"),
    "serve-model": ("chat", "answer OpenAI's API with a checkpoint, for trying it"),
    "doctor": ("doctor", "check that a profile can run, and suggest repairs"),
    "clean": ("doctor", "delete finished jobs and caches on a profile's SSH hosts"),
    "schema": ("doctor", "print the JSON Schema of a pipeline file, for editors"),
    "profile": ("doctor", "print a cluster profile, defaults included"),
    "completion": ("doctor", "print a shell's completion script"),
    "drill": ("doctor", "inject faults into small trainings and check their recovery"),
    "calibrate": ("doctor", "measure the speed of a profile's devices, for plan --fit"),
}
_MODULES = tuple(dict.fromkeys(module for module, _ in VERBS.values()))

_DESCRIPTION = """\
Launch, shard, track and chain JAX finetuning jobs. A pipeline is a YAML file.

  redco-flow run pipelines/quickstart.yaml           run it on this machine
  redco-flow run FILE -p PROFILE learning_rate=1e-4  elsewhere, with a setting changed
  redco-flow status                                  state and progress of the last run
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
        _say(f"{self.prog}: {message}\n  `{self.prog} --help` lists the options.")
        raise SystemExit(2)

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Print a page; argparse would be silent about a full disk."""
        (file or sys.stderr).write(message)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    return _parser(_MODULES)


def _parser(modules: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of these modules' verbs; without any, that of the help page."""
    parser = _Parser(
        prog="redco-flow",
        description=_DESCRIPTION,
        epilog=_EXIT_CODES,
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"redco-flow {__version__}")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    summaries = {verb: summary for verb, (_, summary) in VERBS.items()}
    verbs = Verbs(subparsers, summaries, over_ssh=(*SUBMITTING, *ON_LOGIN_NODE))
    for module in modules:
        import_module(f"redco_flow.cli.{module}").register(verbs)
    if not modules:
        verbs.list_all()
    return parser


def _modules_for(words: Sequence[str]) -> Sequence[str]:
    """Return the modules whose verbs a command line may need: importing them all takes a while."""
    if words[0] in VERBS:
        return [VERBS[words[0]][0]]
    if words[0] in ("-h", "--help", "--version"):
        return []
    return _MODULES


def _refuse_unknown_verb(parser: argparse.ArgumentParser, word: str) -> None:
    if not word.startswith("-") and word not in VERBS:
        near = difflib.get_close_matches(word, VERBS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        parser.error(f"there is no verb {word!r}{hint} Verbs: {', '.join(VERBS)}.")


def _refuse_unprintable_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """No file, record or name here can hold a NUL or bytes that are not UTF-8."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            parser.error(f"{word!r} is not UTF-8")
        if "\0" in word:
            parser.error(f"{word!r} has a NUL character")


def _refuse_unprintable_directory() -> None:
    with suppress(FileNotFoundError):  # a directory that was removed has no name
        folder = str(Path.cwd())
        try:
            folder.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"the current directory, {folder!r}, is not UTF-8: change to another one."
            ) from None


def _take_overrides(parser: argparse.ArgumentParser, extras: list[str]) -> list[str]:
    """The words argparse left over: settings, or a mistake."""
    unknown = [word for word in extras if word.startswith("-") or not _is_setting(word)]
    if unknown and unknown[0].partition("=")[0] in ("-w", "--workspace"):
        parser.error("the workspace is the profile's: write profile.workspace=DIR")
    if unknown:
        parser.error(f"unknown argument {unknown[0]!r}; a setting is written key=value, without --")
    return extras


def _is_setting(word: str) -> bool:
    return "=" in word or word.startswith("~")


def run_command(words: Sequence[str]) -> int:
    """Run one command line.

    Returns:
        The exit code.
    """
    try:
        return _run_verb(words or ["--help"])
    except BrokenPipeError:
        # The reader of our output (head, less) went away: that is no error of ours.
        return 0
    except RedcoFlowError as error:
        _say(f"redco-flow: {error}")
        return error.exit_code
    except OSError as error:
        # A file of the workspace's that cannot be read or written; without a name it is our fault.
        if error.filename is None:
            raise
        if error.filename in ("/dev/stdout", "/dev/stderr"):
            _say(f"redco-flow: {_words_of(error)} A run that this command started goes on.")
            _drop_unwritable_output()
        else:
            _say(f"redco-flow: {_words_of(error)} {explain_no_space(error)}".rstrip())
        return WorkspaceError.exit_code


def _run_verb(words: Sequence[str]) -> int:
    """Parse a command line and run its verb."""
    parser = _parser(_modules_for(words))
    _refuse_unprintable_words(parser, words)
    _refuse_unknown_verb(parser, words[0])
    options, extras = parser.parse_known_args(words)
    parser.prog = f"redco-flow {words[0]}"
    if "--ssh" in extras:
        here = ", ".join((*SUBMITTING, *ON_LOGIN_NODE))
        parser.error(f"{words[0]} does not run over SSH; these do: {here}")
    if extras and not hasattr(options, "overrides"):
        parser.error(f"unknown argument {extras[0]!r}")
    if hasattr(options, "overrides"):
        options.overrides = [*options.overrides, *_take_overrides(parser, extras)]
    _refuse_unprintable_directory()
    # Recipes, stage kinds, executors … of the user's are importable from where the command runs.
    append_current_directory()
    return _run_here_or_there(options, words)


def _run_here_or_there(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Run the verb, here or on a cluster's login node."""
    # Imported where a node may be meant: all other commands start faster.
    if hasattr(options, "ssh") and (options.ssh or options.profile):
        from redco_flow.cli.login_node import find_login_node, run_on_login_node

        if (node := find_login_node(options)) is not None:
            return run_on_login_node(node, words, options)
    if getattr(options, "send", None):
        raise UsageError("--send is for --ssh: on this machine nothing is copied.")
    code: int = options.verb(options)
    return code


def _words_of(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}."


def _say(message: str) -> None:
    """Write a message; where none can be written, the exit code still holds."""
    with suppress(OSError):
        sys.stderr.write(f"{message}\n")


def _end_output(code: Any) -> Any:
    """Write out what is buffered; return the exit code, which is not 0 where a disk is full."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError as error:
        _say(f"redco-flow: {_words_of(error)}")
        code = code or WorkspaceError.exit_code
    _drop_unwritable_output()
    return code


def _drop_unwritable_output() -> None:
    """Drop what cannot be written, which was reported or has no reader: Python would try again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main() -> None:
    """Entry point of the console script."""
    # What the imports make stays: searching it for garbage is a tenth of their time.
    gc.set_threshold(50_000)
    # Names, messages and log lines hold what their writers chose: none of it acts on a terminal.
    for name in ("stdout", "stderr"):
        # A closed one (>&-) would leave its descriptor to the next file that is opened.
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115 (until the end)
        setattr(sys, name, VisibleStream(stream))
    code: Any = None
    try:
        code = run_command(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    except SystemExit as end:  # argparse's: a page of help, or a mistake
        code = end.code
    finally:
        code = _end_output(code)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
