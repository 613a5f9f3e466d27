"""Run a verb on a cluster's login node: `--ssh [USER@]HOST[:WORKSPACE]`, or a profile with `ssh:`.

`run` and `plan` take the pipeline, the profile and the code along. A run's id is chosen and noted
here before anything is sent, so a command that is repeated after a broken connection finds the run
that it started, or starts it; there is one run in any case.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow import __version__
from redco_flow.cli.arguments import SUBMITTING
from redco_flow.cli.run import next_steps, summary
from redco_flow.cli.status import DETACHED_EXIT_CODE, exit_code_of, status_text
from redco_flow.errors import ClusterUnreachable, UsageError
from redco_flow.tracking.attempt import State

if TYPE_CHECKING:
    from redco_flow.launch.hosts.code_snapshot import CodeSnapshot, Source
    from redco_flow.launch.hosts.login import LoginSession, Place
    from redco_flow.spec.ssh import LoginNode

_FOLDER = ".submission"


def find_login_node(options: argparse.Namespace) -> LoginNode | None:
    """Return the login node that `--ssh` or the profile means, or None: the verb runs here.

    Raises:
        UsageError: `--ssh` is not written as it must be, or the profile that is named for its
            login node has none.
        ConfigError: mistakes in the profile.
    """
    from redco_flow.spec.profile import load_profile
    from redco_flow.spec.ssh import login_node

    profile, overrides = options.profile, getattr(options, "overrides", ())
    node = load_profile(profile, overrides, is_elsewhere=True).ssh if profile else None
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
    verb = words[0]
    if verb in SUBMITTING:
        return _follow_to_end(node, _Submission.of(node, words, options), options)
    if getattr(options, "html", None) and verb != "report":
        raise UsageError(f"--html of {verb} is not written through --ssh; run it there, or here.")
    return _interruptible(_read(node, _without_own_options(words), options))


def _interruptible(coroutine: Coroutine[Any, Any, int], advice: str = "") -> int:
    """Run it; Ctrl-C ends only what is shown here.

    Args:
        advice: what to say of the run then.
    """
    try:
        return asyncio.run(coroutine)
    except KeyboardInterrupt:
        sys.stderr.write(f"\ndetached; runs on the cluster continue. {advice}".rstrip() + "\n")
        return DETACHED_EXIT_CODE


async def _read(node: LoginNode, words: list[str], options: argparse.Namespace) -> int:
    async with _session(node) as session:
        if words[0] != "report":
            return await session.stream(words, _print, _print_error)
        code, output, errors = await session.call(words)
        sys.stderr.write(errors)
        if code == 0:
            print(await _fetch_page(session, output.splitlines()[-1], options.html))
        return code


async def _fetch_page(session: LoginSession, page: str, given: Path | None) -> Path:
    """Copy a page here; return its path."""
    target = given or Path(f"{Path(page).parent.name}-{Path(page).name}")
    arriving = target.with_name(f".{target.name}.arriving")
    arriving.unlink(missing_ok=True)
    await session.get(page, arriving)
    return arriving.replace(target).absolute()


def _session(node: LoginNode) -> AbstractAsyncContextManager[LoginSession]:
    from redco_flow.launch.hosts.login import open_session

    return open_session(node, __version__)


def _print(line: bytes) -> None:
    sys.stdout.write(line.decode("utf-8", "replace"))
    sys.stdout.flush()


def _print_error(line: bytes) -> None:
    sys.stderr.write(line.decode("utf-8", "replace"))
    sys.stderr.flush()


def _own_options() -> argparse.ArgumentParser:
    """Return a parser of the options that are not passed on as they are."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--ssh", "--html"):
        parser.add_argument(name)
    parser.add_argument("-p", "--profile")
    return parser


def _without_own_options(words: Sequence[str]) -> list[str]:
    return _own_options().parse_known_args(words)[1]


def _without_options_of_run(words: Sequence[str]) -> list[str]:
    """Return a command line of run or plan without what the submission gives itself."""
    parser = _own_options()
    parser.add_argument("--send", action="append")
    parser.add_argument("--set", action="append")
    parser.add_argument("--run-id")
    for flag in ("--detach", "--json"):
        parser.add_argument(flag, action="store_true")
    return [word for word in parser.parse_known_args(words)[1] if not word.startswith("profile.")]


@dataclass(frozen=True)
class _Submission:
    """One command line of run or plan, and what it takes along.

    Args:
        words: of the command there, without the run's id.
        own: the current directory's folder in the snapshot.
        run_id: of the run; "" of a plan.
        note: the file with the run's id, which exists until the login node has answered.
    """

    words: list[str]
    snapshot: CodeSnapshot
    own: str
    run_id: str
    note: Path

    @classmethod
    def of(cls, node: LoginNode, words: Sequence[str], options: argparse.Namespace) -> _Submission:
        """Check everything that can be checked here; nothing is written or sent.

        Raises:
            UsageError, ConfigError: as of `run_on_login_node`.
        """
        from redco_flow.launch.hosts.code_snapshot import take_user_snapshot
        from redco_flow.orchestrate.prefect.server import home_directory
        from redco_flow.orchestrate.run.ingredients import SUBMITTED_CODE, CodeState
        from redco_flow.records import canonical_json, digest_json, read_json_if_present
        from redco_flow.spec.find import find_file
        from redco_flow.spec.load import PipelineFile, check_for_elsewhere
        from redco_flow.spec.overrides import for_pipeline, for_profile
        from redco_flow.spec.profile import load_profile, merged_layers
        from redco_flow.spec.yaml import write_yaml
        from redco_flow.tracking.run_directory import new_run_id

        if getattr(options, "sweep", None) or getattr(options, "points", None):
            raise UsageError("a sweep cannot be started through --ssh: start it on the cluster.")
        changes = for_profile(options.overrides)
        if any(one.startswith("workspace=") for one in changes):
            raise UsageError(
                "with --ssh the workspace is that of `ssh:`, or of --ssh [USER@]HOST:WORKSPACE; "
                "leave profile.workspace out."
            )
        profile = load_profile(options.profile, options.overrides, is_elsewhere=True)
        path = find_file("pipelines", options.file)
        name = check_for_elsewhere(PipelineFile.read(path), options.overrides, profile)
        file, more = _pipeline(path)
        profile_file = f"{_FOLDER}/cluster_profiles/{profile.name}.yaml"
        there = merged_layers(options.profile).without(("ssh",))
        more[profile_file] = write_yaml({"name": profile.name, **there.values}).encode()
        code = CodeState.read(Path.cwd())
        more[SUBMITTED_CODE] = canonical_json({"record": code.record, "patch": code.patch})
        snapshot, own = take_user_snapshot(more | dict(_sent(options.send)))
        kept = [f"profile.{one}" for one in changes if not one.startswith("ssh.")]
        settings = [*for_pipeline(options.overrides), *kept]
        rest = [one for one in _without_options_of_run(words) if one not in settings]
        rest[rest.index(options.file, 1)] = file
        rest += ["-p", profile_file, *(word for one in settings for word in ("--set", one))]
        target = node.model_dump(mode="json")
        identity = digest_json([target, snapshot.digest, rest, getattr(options, "run_id", "")])
        note = home_directory() / "submissions" / f"{identity[:16]}.json"
        noted = read_json_if_present(note) or {}
        run_id = getattr(options, "run_id", "") or noted.get("run") or new_run_id(name)
        return cls(rest, snapshot, own, "" if _starts_nothing(options) else run_id, note)


def _starts_nothing(options: argparse.Namespace) -> bool:
    return bool(getattr(options, "dry_run", True))


def _pipeline(path: Path) -> tuple[str, dict[str, Source]]:
    """Return a pipeline's path in the submission, and the file."""
    here, found = Path.cwd(), path.absolute()
    is_below = found.is_relative_to(here) and ".." not in found.parts
    name = found.relative_to(here).as_posix() if is_below else f"{_FOLDER}/pipelines/{found.name}"
    return name, {name: found}


def _sent(given: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield the files that `--send` names, by their path below the current directory."""
    here = Path.cwd()
    for text in given:
        path = (here / text).resolve()
        if not path.exists() or not path.is_relative_to(here.resolve()):
            raise UsageError(f"--send {text}: there is no such file or folder below {here}.")
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.is_file() and not file.is_symlink():
                yield file.relative_to(here.resolve()).as_posix(), file


def _follow_to_end(node: LoginNode, submission: _Submission, options: argparse.Namespace) -> int:
    """Submit, and follow the run unless it is detached."""
    if not submission.run_id:
        return _interruptible(_show_plan(node, submission, options))
    try:
        code, started = asyncio.run(_submit(node, submission, options))
    except (KeyboardInterrupt, ClusterUnreachable) as error:
        return _say_unknown(submission, error)
    submission.note.unlink(missing_ok=True)
    if started is None or code != 0:
        return code
    if options.detach:
        print(json.dumps(started) if options.json else started["run"])
        return 0
    again = f"`redco-flow attach {started['run']} {_how(options)}` follows it again"
    return _interruptible(_follow(node, started["run"], options, again), f"{again}.")


def _say_unknown(submission: _Submission, error: BaseException) -> int:
    """Report that the login node's answer did not arrive."""
    if not submission.note.exists():  # nothing was sent
        raise error
    said = "" if isinstance(error, KeyboardInterrupt) else f"{_sentence(error)} "
    sys.stderr.write(
        f"redco-flow: {said}It is not known whether run {submission.run_id} was started there. "
        f"The same command again finds it, or starts it; it is never started twice.\n"
    )
    return DETACHED_EXIT_CODE if not said else ClusterUnreachable.exit_code


async def _show_plan(node: LoginNode, submission: _Submission, options: argparse.Namespace) -> int:
    async with _session(node) as session:
        place = await _ship(session, submission)
        words = [*submission.words, *(["--json"] if options.json else [])]
        workspace = ["--set", f"profile.workspace={session.workspace}"]
        return await session.stream([*words, *workspace], _print, _print_error, place)


async def _ship(session: LoginSession, submission: _Submission) -> Place:
    """Copy the code there.

    Raises:
        UsageError: another version is installed there.
    """
    from redco_flow.orchestrate.prefect.server import home_directory
    from redco_flow.tracking.workspace import user_name

    if session.version != __version__:
        raise UsageError(
            f"{session.node.label} has redco-flow {session.version}, and this machine "
            f"{__version__}: install the same version on both."
        )
    user = session.node.user or user_name()
    cache = home_directory() / "submissions"
    return await session.ship(submission.snapshot, submission.own, user, cache)


async def _submit(
    node: LoginNode, submission: _Submission, options: argparse.Namespace
) -> tuple[int, Mapping[str, Any] | None]:
    """Start the run there, unless it was; return the exit code, and its record if it is there."""
    from redco_flow.records import write_json

    run_id = submission.run_id
    async with _session(node) as session:
        is_repeated = submission.note.exists()
        try:
            place = await _ship(session, submission)
        except ClusterUnreachable as error:
            said = "" if is_repeated else "No run was started; the same command again starts it."
            raise ClusterUnreachable(f"{_sentence(error)} {said}".strip()) from error
        submission.note.parent.mkdir(parents=True, exist_ok=True)
        write_json(submission.note, {"run": run_id, "login_node": node.label})
        if is_repeated and (found := await _find(session, run_id)) is not None:
            return 0, found
        words = [*submission.words, "--run-id", run_id, "--detach", "--json"]
        words += ["--set", f"profile.workspace={session.workspace}"]
        code, output, errors = await session.call(words, place)
        # One that is still at work since a connection broke may have started it meanwhile.
        if code != 0 and (found := await _find(session, run_id)) is not None:
            return 0, found
        sys.stderr.write(errors)
        started = _last_record(output) if code == 0 else None
        if started is not None and started["run"] is None:  # --if-new
            print(json.dumps(started)) if options.json else None
            started = None
        return code, started


def _last_record(output: str) -> dict[str, Any]:
    """Return the last line's record, after whatever a login's own start-up files print."""
    record: dict[str, Any] = json.loads(output.splitlines()[-1])
    return record


async def _find(session: LoginSession, run_id: str) -> Mapping[str, Any] | None:
    """Return the record of a run that was started there, if it was; continue one that was cut off.

    Args:
        run_id: the whole id.
    """
    code, output, _ = await session.call(["status", run_id, "--json"])
    view = _last_record(output) if code == 0 else {}
    if view.get("run") != run_id:
        return None
    sys.stderr.write(f"{run_id} was started there: {view['state']}\n")
    # Its start may have been cut off.
    if view["state"] in (State.PENDING, State.INTERRUPTED) and not view["queued"]:
        await session.call(["resume", run_id, "--detach"])  # refused where a launcher is at work
    return {"run": run_id, "path": f"{session.workspace}/runs/{run_id}", "state": view["state"]}


async def _follow(node: LoginNode, run_id: str, options: argparse.Namespace, again: str) -> int:
    """Show the run until it ends, then print how, as `run` does on the cluster."""
    output: list[bytes] = []
    try:
        async with _session(node) as session:
            words = ["status", run_id, "--watch", "--json"]
            code = await session.stream(words, output.append, _print_error)
    except ClusterUnreachable as error:
        said = f"{_sentence(error)} Run {run_id} continues there; {again}."
        raise ClusterUnreachable(said) from error
    if code != 0:
        return code
    view = _last_record(b"".join(output).decode("utf-8", "replace"))
    code = exit_code_of(view)
    if options.json:
        print(json.dumps(summary(view, code)))
    else:
        print(status_text(view, with_parameters=True))
        print(f"{next_steps(view)}, each with {_how(options)}")
    return code


def _sentence(error: BaseException) -> str:
    return f"{str(error).rstrip('.')}."


def _how(options: argparse.Namespace) -> str:
    """Return the options with which other verbs find the run."""
    target = f"--ssh {options.ssh}" if options.ssh else ""
    profile = f"-p {options.profile}" if options.profile != "local" else ""
    return f"{target} {profile}".strip()
