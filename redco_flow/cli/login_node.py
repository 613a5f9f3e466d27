"""Run a verb on a cluster's login node: `--ssh [USER@]HOST[:WORKSPACE]`, or a profile with `ssh:`.

A run's id is chosen and noted here before it is sent, so a command that is repeated after a broken
connection finds the run that it started, or starts it; there is one run in any case.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shlex
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from redco_flow import __version__
from redco_flow.cli.arguments import ON_LOGIN_NODE, SUBMITTING
from redco_flow.cli.run import next_steps, summary
from redco_flow.cli.status import DETACHED_EXIT_CODE, exit_code_of, status_text
from redco_flow.errors import ClusterUnreachable, RedcoFlowError, UsageError
from redco_flow.tracking.attempt import State

if TYPE_CHECKING:
    from redco_flow.cli.submission import RemoteCommand
    from redco_flow.launch.hosts.login import LoginSession, Place
    from redco_flow.spec.ssh import LoginNode


def find_login_node(options: argparse.Namespace) -> LoginNode | None:
    """Return the login node that `--ssh` or the profile means, or None: the verb runs here.

    Raises:
        UsageError: `--ssh` is not written as it must be, or the profile that is named for its
            login node has none.
        ConfigError: mistakes in a profile that has one, or that cannot be read.
    """
    from redco_flow.spec.profile import has_login_node, load_profile
    from redco_flow.spec.ssh import login_node

    profile, overrides = options.profile, getattr(options, "overrides", ())
    node = None
    if profile and has_login_node(profile, overrides):
        node = load_profile(profile, overrides, is_elsewhere=True).ssh
    if options.ssh is not None:
        return login_node(options.ssh, node)
    if node is None and not hasattr(options, "overrides"):  # -p names nothing else
        raise UsageError(f"profile {profile} has no `ssh:`, the login node where to look.")
    return node


def run_on_login_node(node: LoginNode, words: Sequence[str], options: argparse.Namespace) -> int:
    """Run the command line there; return its exit code.

    Args:
        words: the command line.
        options: what was read of it.

    Raises:
        UsageError: the verb cannot be used so.
        ConfigError: mistakes in the pipeline that show here.
        ClusterUnreachable: the login node does not answer, refuses, or the connection broke.
    """
    # What asyncio says of each write to a connection that broke: our own error says it once.
    logging.getLogger("asyncio").addHandler(logging.NullHandler())
    if getattr(options, "html", None) and words[0] != "report":
        raise UsageError(f"--html of {words[0]} is not written through --ssh.")
    if words[0] in SUBMITTING:
        from redco_flow.cli.submission import notes_folder, prepare

        submission = prepare(node, _passed_on(words, options), options, notes_folder())
        is_plan = getattr(options, "dry_run", True)
        return (_plan if is_plan else _run)(node, submission, options)
    if getattr(options, "workspace", None):
        raise UsageError("-w is for this machine: write --ssh [USER@]HOST:WORKSPACE.")
    return _until_detached(_read(node, _passed_on(words, options), options))


def _passed_on(words: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Return the command line without what is for this machine or set by the submission."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-p", "--profile")
    for name in ("--ssh", "--html"):
        parser.add_argument(name)
    if words[0] in SUBMITTING:
        for name in ("--send", "--set", "--run-id"):
            parser.add_argument(name)
        for flag in ("--detach", "--json"):
            parser.add_argument(flag, action="store_true")
    settings = getattr(options, "overrides", ())
    return [word for word in parser.parse_known_args(words)[1] if word not in settings]


def _until_detached(coroutine: Coroutine[Any, Any, int]) -> int:
    """Run it; Ctrl-C ends only what is shown here."""
    import asyncio  # most commands run on this machine

    try:
        return asyncio.run(coroutine)
    except KeyboardInterrupt:
        sys.stderr.write("\ndetached; what runs on the cluster continues.\n")
        return DETACHED_EXIT_CODE


async def _read(node: LoginNode, words: list[str], options: argparse.Namespace) -> int:
    async with _session(node) as session:
        if words[0] != "report":
            is_ours = words[0] != "logs" and not getattr(options, "json", False)
            output = _printing(sys.stdout, options if is_ours else None)
            return await session.stream(words, output, _printing(sys.stderr, options))
        code, text, errors = await session.call(words)
        sys.stderr.write(_with_way(errors, options))
        if code == 0:
            print(await _fetch_page(session, text.splitlines()[-1], options.html))
        return code


async def _fetch_page(session: LoginSession, page: str, given: Path | None) -> Path:
    """Copy a page here; return its path."""
    run = Path(page).parent.name
    target = given or Path(f"{run}-{Path(page).name}")
    if target.is_dir() or not target.parent.is_dir():
        raise UsageError(f"--html {target}: name a file in a folder that exists.")
    if target.exists() and run not in target.read_text(errors="replace"):
        raise UsageError(
            f"{target} exists and is not a report of {run}: name another file, by --html."
        )
    arriving = target.with_name(f".{target.name}.arriving")
    arriving.unlink(missing_ok=True)
    await session.get(page, arriving)
    return arriving.replace(target).absolute()


def _session(node: LoginNode) -> AbstractAsyncContextManager[LoginSession]:
    from redco_flow.launch.hosts.login import open_session

    return open_session(node, __version__)


def _printing(target: TextIO, options: argparse.Namespace | None) -> Callable[[bytes], None]:
    """Return a function that prints a line of the login node's, whose hints get the way there."""

    def take(line: bytes) -> None:
        text = line.decode("utf-8", "replace")
        target.write(text if options is None else _with_way(text, options))
        target.flush()

    return take


_HINT = re.compile(rf"\bredco-flow ({'|'.join((*SUBMITTING, *ON_LOGIN_NODE))})\b(?!-)")


def _with_way(text: str, options: argparse.Namespace) -> str:
    """Return the text, in which commands that run over SSH have the options for that."""
    return _HINT.sub(lambda found: f"{found[0]} {_way(options)}", text)


def _way(options: argparse.Namespace) -> str:
    """Return the options with which other verbs find the run."""
    words = ["--ssh", options.ssh] if options.ssh else []
    words += ["-p", options.profile] if options.profile not in (None, "local") else []
    return shlex.join(words)


def _plan(node: LoginNode, submission: RemoteCommand, options: argparse.Namespace) -> int:
    async def show() -> int:
        async with _session(node) as session:
            place = await _ship(session, submission)
            words = [*submission.words, *_workspace(session), *["--json"] * options.json]
            output = _printing(sys.stdout, None if options.json else options)
            return await session.stream(words, output, _printing(sys.stderr, options), place)

    return _until_detached(show())


def _run(node: LoginNode, submission: RemoteCommand, options: argparse.Namespace) -> int:
    """Submit, and follow the run unless it is detached."""

    async def run() -> int:
        async with _session(node) as session:
            code, started = await _submit(session, submission, options)
            if code != 0:
                return code
            if started["run"] is not None and not options.detach:
                return await _follow(session, started["run"], options)
            if options.json:
                print(json.dumps(started))
            elif started["run"] is not None:  # None where --if-new started nothing
                print(started["run"])
            return 0

    import asyncio

    try:
        return asyncio.run(run())
    except (KeyboardInterrupt, ClusterUnreachable) as error:
        said = "" if isinstance(error, KeyboardInterrupt) else f"{error} "
        if submission.note.exists():
            sys.stderr.write(
                f"redco-flow: {said}It is not known whether run {submission.run_id} was started "
                f"there. The same command again finds it, or starts it; it never runs twice.\n"
            )
        elif said:
            raise
        return ClusterUnreachable.exit_code if said else DETACHED_EXIT_CODE


def _workspace(session: LoginSession) -> list[str]:
    return ["--set", f"profile.workspace={session.workspace}"]


async def _ship(session: LoginSession, submission: RemoteCommand) -> Place:
    """Copy the code there.

    Raises:
        UsageError: another version is installed there.
        ClusterUnreachable: the connection broke, or it cannot be written there.
    """
    if session.version != __version__:
        raise UsageError(
            f"{session.node.label} has redco-flow {session.version}, and this machine "
            f"{__version__}: install the same version on both."
        )
    return await session.ship(submission.snapshot, submission.own)


async def _submit(
    session: LoginSession, submission: RemoteCommand, options: argparse.Namespace
) -> tuple[int, Mapping[str, Any]]:
    """Start the run there, unless it was; return the exit code, and the record of `run --json`."""
    run_id, left = submission.run_id, submission.left
    found = await _find(session, submission) if left else {}
    if not found:
        try:
            place = await _ship(session, submission)
        except ClusterUnreachable as error:
            said = "" if left else " No run was started."
            raise ClusterUnreachable(f"{str(error).rstrip('.')}.{said}") from error
        submission.write_note()
        words = [*submission.words, *_workspace(session), "--run-id", run_id, "--detach", "--json"]
        code, output, errors = await session.call(words, place)
        # One that is still at work since a connection broke may have started it meanwhile.
        if code != 0 and left and f"there is a run {run_id} already" in errors:
            found = await _find(session, submission)
        if not found:
            sys.stderr.write(_with_way(errors, options))
            if code == 0 or not left:
                submission.note.unlink(missing_ok=True)
            return code, _last_record(output) if code == 0 else {}
    submission.note.unlink(missing_ok=True)
    return 0, found


def _last_record(output: str) -> dict[str, Any]:
    """Return the last record, before or after whatever a login's own start-up files print."""
    record: dict[str, Any] = json.loads(
        [line for line in output.splitlines() if line.startswith("{")][-1]
    )
    return record


async def _view(session: LoginSession, run_id: str) -> Mapping[str, Any]:
    """Return what `status --json` says of the run, or {} where there is none."""
    code, output, _ = await session.call(["status", run_id, "--json"])
    view = _last_record(output) if code == 0 else {}
    return view if view.get("run") == run_id else {}


async def _find(session: LoginSession, submission: RemoteCommand) -> Mapping[str, Any]:
    """Return the record of the run that a command started that was cut off, or {}."""
    run_id = submission.run_id
    if not (view := await _view(session, run_id)):
        return {}
    if _has_no_launcher(view):
        code, _, errors = await session.call(["resume", run_id, "--detach"])
        view = await _view(session, run_id)  # that may be refused because a process drives it now
        if code != 0 and _has_no_launcher(view):
            raise RedcoFlowError(
                f"run {run_id} of {submission.left['at']} was cut off while it was started, and "
                f"cannot be continued: {errors.strip()} Mend that and give the command again, or "
                f"delete {submission.note} to start another run."
            )
    is_same = submission.left["code"] == submission.snapshot.digest
    sys.stderr.write(
        f"{run_id} was started by the same command at {submission.left['at']}, whose answer did "
        f"not arrive: {view['state']}{'' if is_same else ', with other code than is here now'}. "
        f"The command starts a new run the next time.\n"
    )
    return {"run": run_id, "path": f"{session.workspace}/runs/{run_id}", "state": view["state"]}


def _has_no_launcher(view: Mapping[str, Any]) -> bool:
    return view["state"] in (State.PENDING, State.INTERRUPTED) and not view["queued"]


async def _follow(session: LoginSession, run_id: str, options: argparse.Namespace) -> int:
    """Show the run until it ends, then print how, as `run` does on the cluster."""
    from asyncio import CancelledError

    output: list[bytes] = []
    again = (
        f"{run_id} continues there; `redco-flow attach {_way(options)} {run_id}` follows it again."
    )
    try:
        words = ["status", run_id, "--watch", "--json"]
        code = await session.stream(words, output.append, _printing(sys.stderr, options))
    except ClusterUnreachable as error:
        raise ClusterUnreachable(f"{error} Run {again}") from error
    except CancelledError:
        sys.stderr.write(f"\ndetached; {again}\n")
        raise
    if code != 0:
        return code
    view = _last_record(b"".join(output).decode("utf-8", "replace"))
    code = exit_code_of(view)
    if options.json:
        print(json.dumps(summary(view, code)))
    else:
        print(status_text(view, with_parameters=True))
        print(_with_way(next_steps(view), options))
        if view["state"] == State.FAILED:
            print("retry runs the code of this submission; `run` again for changed code")
    return code
