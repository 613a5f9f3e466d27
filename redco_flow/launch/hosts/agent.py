"""Remote agent on a host: one JSON request per line, one JSON response per line.

`python -P -m redco_flow.launch.hosts.agent`, over SSH, with our code shipped before. Requests come
on standard input, so nothing of them shows in the list of processes. Keeps nothing between two
requests but files.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from redco_flow.errors import RedcoFlowError
from redco_flow.launch.call import Call, call_from_json, write_call
from redco_flow.launch.host_facts import num_gpus, own_name_problem, package_versions
from redco_flow.launch.hosts import lease
from redco_flow.launch.hosts.bootstrap import REMOVAL_LOCK
from redco_flow.launch.hosts.file_sets import (
    FileSet,
    checkpoint_sets,
    forget_steps,
    put_in_place,
    wanted,
)
from redco_flow.launch.hosts.follow import follow
from redco_flow.launch.hosts.garbage_collection import delete, survey
from redco_flow.launch.hosts.inventory import take_inventory
from redco_flow.launch.hosts.ranks import RanksOrder, start, stop
from redco_flow.launch.node_disk import look_at_node_disk
from redco_flow.launch.rendezvous import own_addresses
from redco_flow.launch.shared_files import try_flock, write_files
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.results import forget_result, read_result
from redco_flow.tracking.workspace import Workspace

Answer = dict[str, Any]
Request = Mapping[str, Any]


def acquire(request: Request) -> Answer:
    """Take this host for an attempt; say who has it otherwise."""
    directory, uses = Path(request["directory"]), request.get("uses", ())
    return {"holder": lease.acquire(directory, request["owner"], uses)}


def release(request: Request) -> Answer:
    """Give this host back."""
    lease.release(Path(request["directory"]), request["owner"])
    return {}


def see(request: Request) -> Answer:
    """Say whether this host reads the same file as the launcher."""
    try:
        return {"sees": Path(request["path"]).read_text() == request["content"]}
    except OSError:
        return {"sees": False}


def want(request: Request) -> Answer:
    """Say which files of the sets must come, and how much of each is here."""
    workspace = Workspace.open(request["workspace"])
    arrivals, sets = Path(request["arrivals"]), _sets(request)
    # The lease names them: what is here now is not deleted any more.
    with exclusive(Path(request["directory"]) / REMOVAL_LOCK):
        missing = wanted(workspace, arrivals, sets)
        for arrived in (arrivals / digest for digest, size in missing.items() if size):
            with contextlib.suppress(FileNotFoundError):  # another launcher has put it in place
                os.utime(arrived)
    return {"wanted": missing}


def place(request: Request) -> Answer:
    """Put the sets whose files have arrived in place."""
    put_in_place(Workspace(Path(request["workspace"])), Path(request["arrivals"]), _sets(request))
    return {}


def begin(request: Request) -> Answer:
    """Write the call, where it is not here already, and start this host's ranks."""
    directory = Path(request["directory"])
    if taken := lease.acquire(directory, request["owner"], request["uses"]):
        return {"holder": taken}
    order = RanksOrder(**request["order"])
    attempt = AttemptDirectory(Path(order.attempt))
    if request["call"] is not None:
        _bring(attempt, call_from_json(request["call"]), request["kept_steps"])
    runners = start(order)
    lease.hand_to_runners(directory, request["owner"], runners)
    return {"holder": "", "runners": runners}


def end(request: Request) -> Answer:
    """Stop this host's ranks."""
    stop(AttemptDirectory(Path(request["attempt"])), at_once=request["at_once"])
    return {}


def offer(request: Request) -> Answer:
    """Describe the published result of a fingerprint, and its artifacts; null where it has none."""
    workspace = Workspace(Path(request["workspace"]))
    result = read_result(workspace, request["fingerprint"])
    if result is None:
        return {"result": None, "sets": []}
    store = ArtifactStore(workspace)
    manifests = [store.get(artifact_id).manifest for artifact_id in result.outputs.values()]
    sets = [FileSet.of_artifact(manifest).to_json() for manifest in manifests]
    return {"result": asdict(result), "sets": sets}


def clean(request: Request) -> Answer:
    """Delete what may go, or only look; describe all that is here and may ever go."""
    directory, jobs = Path(request["directory"]), request["jobs"]
    items = [
        asdict(one) | {"path": str(one.path), "bytes": num_bytes(one.path)}
        for one in survey(directory, jobs)
    ]
    stuck = [] if request["dry_run"] else delete(directory, jobs)
    return {"items": items, "stuck": [str(path) for path in stuck]}


def delete_jobs(request: Request) -> Answer:
    """Delete what may go of jobs."""
    delete(Path(request["directory"]), request["jobs"], with_copies=False)
    return {}


def steps(request: Request) -> Answer:
    """Describe the checkpoints of these steps."""
    workspace = Workspace(Path(request["workspace"]))
    sets = checkpoint_sets(workspace, request["work"], request["steps"])
    return {"sets": [one.to_json() for one in sets]}


def unfetched(request: Request) -> Answer:
    """Describe the checkpoints after a step."""
    workspace, work = Workspace(Path(request["workspace"])), request["work"]
    later = [one for one in workspace.committed_steps(work) if one > request["after"]]
    return {"sets": [one.to_json() for one in checkpoint_sets(workspace, work, later)]}


def left(request: Request) -> Answer:
    """Describe what these attempts left here."""
    workspace = Workspace(Path(request["workspace"]))
    found = {
        path: take_inventory(workspace, attempt, fingerprint)
        for path, fingerprint in request["attempts"].items()
        if (attempt := AttemptDirectory(Path(path))).path.is_dir()
    }
    return {"attempts": found}


def probe(request: Request) -> Answer:
    """Say what this host is: for `redco-flow doctor`."""
    environ = {**os.environ, **request["variables"]}
    disk = look_at_node_disk(request["node_directory"], environ)
    return {**look_around(Path(request["directory"])), "node_disk": disk}


def try_files(request: Request) -> Answer:
    """Write files into the shared workspace, and try a flock that the launcher holds there."""
    write_files(Path(request["folder"]), request["name"])
    return {"flock": try_flock(Path(request["lock"]))}


def knock(request: Request) -> Answer:
    """Say whether another host is reached at a port."""
    return {"unreached": knock_at(request["addresses"], request["port"])}


_VERBS: dict[str, Callable[[Request], Answer]] = {
    verb.__name__: verb
    for verb in (
        *(acquire, release, see, want, place, begin, end, offer),
        *(steps, unfetched, left, clean, delete_jobs, probe, try_files, knock),
    )
}


def main() -> int:
    """Answer one request; following takes until the job's end."""
    listener = io.FileIO(sys.stdin.fileno(), closefd=False)
    request = json.loads(listener.readline())
    try:
        if request["verb"] == "follow":
            follow(request, listener)
            return 0
        if request["verb"] == "listen":
            listen(listener)
            return 0
        answer = _VERBS[request["verb"]](request)
    except (RedcoFlowError, OSError) as error:
        answer = {"problem": str(error), "type": type(error).__name__}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


def _bring(attempt: AttemptDirectory, call: Call, kept_steps: list[int]) -> None:
    """Write the call, once, over what an earlier attempt has left here.

    The launcher's workspace holds the truth: a result or a checkpoint that it does not have, or
    has set aside, must not come back from here.
    """
    if attempt.call_path.exists():
        return
    workspace = Workspace(Path(call.workspace))
    forget_result(workspace, call.fingerprint)
    work = workspace.work_directory(call.fingerprint)
    if kept_steps:
        forget_steps(workspace, work.name, kept_steps)
    else:
        shutil.rmtree(work, ignore_errors=True)
    attempt.path.mkdir(parents=True, exist_ok=True)
    write_call(attempt, call)


def _sets(request: Request) -> list[FileSet]:
    return [FileSet.from_json(one) for one in request["sets"]]


def look_around(directory: Path) -> dict[str, Any]:
    """Return what was found.

    Args:
        directory: of this host.
    """
    return {
        "node": os.uname().nodename,
        "versions": package_versions(),
        "time": time.time(),
        "taken_gib": num_bytes(directory) / 2**30,
        "free_gib": shutil.disk_usage(directory).free / 2**30,
        "gpus": num_gpus(),
        "addresses": own_addresses(),
        "own_name": own_name_problem(),
        "holder": lease.holder(directory),
    }


def num_bytes(path: Path) -> int:
    """Return the size of a file or a folder; a file of several names counts by its share."""
    try:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode):
            return found.st_size // max(1, found.st_nlink)
        return sum(num_bytes(path / name) for name in os.listdir(path))
    except FileNotFoundError:
        return 0


def listen(until: io.RawIOBase) -> None:
    """Keep a free port open, and say which, until the one who asked has been served."""
    with socket.create_server(("", 0)) as listener:
        sys.stdout.write(json.dumps({"port": listener.getsockname()[1]}) + "\n")
        sys.stdout.flush()
        until.readline()


def knock_at(addresses: list[str], port: int) -> str:
    """Try to reach a port at any of the addresses; return "" or what went wrong."""
    problems = []
    for address in addresses:
        try:
            with socket.create_connection((address, port), timeout=5.0):
                return ""
        except OSError as error:
            problems.append(f"{address}: {error}")
    return "; ".join(problems)


if __name__ == "__main__":
    sys.exit(main())
