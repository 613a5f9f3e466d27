"""Verbs around runs: doctor, clean, schema, profile, completion, drill, calibrate."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from redco_flow.cli.arguments import Verbs, add_json
from redco_flow.cli.loading import note_replaced
from redco_flow.cli.text import columns, duration, size
from redco_flow.launch.host_facts import CleanedHost

_LIST_RUNS = "ls redco-workspace/runs 2>/dev/null"  # the same words in every shell
_KEPT = """\
  `redco-flow resume RUN` fetches what only the host has; what is not wanted must be deleted there
  by hand."""

_VERDICTS = {True: "bitwise", False: "NO"}


def register(verbs: Verbs) -> None:
    """Declare the verbs."""
    doctor = verbs.add("doctor", _doctor)
    doctor.add_argument("-p", "--profile", default="local", metavar="PROFILE")
    add_json(doctor)
    clean = verbs.add("clean", _clean)
    clean.add_argument("-p", "--profile", default="hosts", metavar="PROFILE")
    clean.add_argument("--dry-run", action="store_true", help="only list it, with sizes")
    add_json(clean)
    schema = verbs.add("schema", _schema)
    schema.add_argument(
        "file", nargs="?", metavar="PIPELINE", help="include the settings of this pipeline's recipe"
    )
    profile = verbs.add("profile", _profile)
    profile.add_argument("profile", nargs="?", default="local", metavar="PROFILE")
    add_json(profile)
    completion = verbs.add("completion", _completion)
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    _add_drill(verbs)
    calibrate = verbs.add("calibrate", _calibrate)
    calibrate.add_argument("-p", "--profile", default="local", metavar="PROFILE")
    calibrate.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="settings of the stage, such as calibrate.resources.gpus_per_host=8",
    )
    add_json(calibrate)


def _doctor(options: argparse.Namespace) -> int:
    from redco_flow.orchestrate.doctor import examine
    from redco_flow.spec.profile import load_own_profile

    note_replaced(cluster_profiles=options.profile)
    findings = []
    for finding in examine(load_own_profile(options.profile)):
        findings.append(finding)
        if not options.json:
            print(f"{'ok  ' if finding.is_good else 'FAIL'}  {finding.check}: {finding.detail}")
            if not finding.is_good:
                print(f"      mend: {finding.remedy}")
            sys.stdout.flush()
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    return 0 if all(finding.is_good for finding in findings) else 1


def _clean(options: argparse.Namespace) -> int:
    from redco_flow.launch.executor import make_executor
    from redco_flow.spec.profile import load_own_profile

    note_replaced(cluster_profiles=options.profile)
    executor = make_executor(load_own_profile(options.profile), os.environ)
    hosts = executor.clean(dry_run=options.dry_run)
    if options.json:
        print(json.dumps(hosts))
    else:
        for host in hosts:
            print(_describe_cleaned(host, dry_run=options.dry_run))
    return 4 if any(host["problem"] for host in hosts) else 0


def _describe_cleaned(host: CleanedHost, *, dry_run: bool) -> str:
    """Return what one host deleted, or would delete, and what stays there for which reason."""
    if host["problem"]:
        return f"{host['label']}: {host['problem']}"
    gone = [one for one in host["items"] if not one["reason"]]
    kept = [one for one in host["items"] if one["reason"]]
    verb = "would be deleted" if dry_run else "deleted"
    parts = [f"{host['label']}: {_total_of(gone)} {verb}, {_total_of(kept)} kept"]
    if gone:
        parts.append(_table_of(gone, ("KIND", "SIZE", "PATH")))
    if kept:
        parts.append(_table_of(kept, ("KEPT", "SIZE", "PATH", "BECAUSE")))
    if any(one["kind"] == "run" for one in kept):
        parts.append(_KEPT)
    parts += [f"  could not be deleted whole: {path}" for path in host["stuck"]]
    return "\n".join(parts)


def _total_of(items: Sequence[dict[str, Any]]) -> str:
    return f"{size(sum(one['bytes'] for one in items))} ({len(items)} items)"


def _table_of(items: Sequence[dict[str, Any]], header: tuple[str, ...]) -> str:
    rows = [
        (one["kind"], size(one["bytes"]), one["path"], one["reason"])[: len(header)]
        for one in sorted(items, key=lambda one: -one["bytes"])
    ]
    return "\n".join(f"  {line}" for line in columns(rows, header).splitlines())


def _schema(options: argparse.Namespace) -> int:
    from redco_flow.spec.find import find_file
    from redco_flow.spec.schema import json_schema
    from redco_flow.spec.yaml import parse_file

    recipe = None
    if options.file:
        recipe = parse_file(find_file("pipelines", options.file))[0].get(("recipe",))
    print(json.dumps(json_schema(recipe), indent=2))
    return 0


def _profile(options: argparse.Namespace) -> int:
    from redco_flow.spec.profile import load_profile

    note_replaced(cluster_profiles=options.profile)
    settings = load_profile(options.profile, is_elsewhere=True).model_dump(mode="json")
    if options.json:
        print(json.dumps(settings))
        return 0
    for key, value in settings.items():
        print(f"{key}: {json.dumps(value)}")
    return 0


def _completion(options: argparse.Namespace) -> int:
    import shtab

    from redco_flow.cli.main import build_parser

    parser = build_parser()
    # Files and runs are looked for by the shell: no Python starts at the press of a key.
    completers: dict[str, Any] = {
        "file": shtab.FILE,
        **dict.fromkeys(("run", "first", "second"), shtab.cmd(_LIST_RUNS)),
        "workspace": shtab.DIRECTORY,
    }
    for action in _actions(parser):
        if action.dest in completers and not action.choices:
            action.complete = completers[action.dest]  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell=options.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from verb._actions


def _add_drill(verbs: Verbs) -> None:
    drill = verbs.add("drill", _drill)
    drill.add_argument("-p", "--profile", default="local", metavar="PROFILE")
    drill.add_argument(
        "--fault",
        dest="faults",
        action="append",
        metavar="FAULT",
        help="only this one: preempt, kill, stall or timeout; may be repeated",
    )
    drill.add_argument(
        "--num-hosts", type=int, default=1, metavar="N", help="hosts of each training (1)"
    )
    add_json(drill)


def _drill(options: argparse.Namespace) -> int:
    from redco_flow.cli.status import follow_run
    from redco_flow.launch.processes import FAULTS
    from redco_flow.orchestrate.drill import drill
    from redco_flow.spec.profile import load_own_profile

    profile = load_own_profile(options.profile)
    directory = Path(profile.workspace) / "drills" / time.strftime("%Y%m%d-%H%M%S")
    sys.stderr.write(f"the drill's runs: {directory}\n")
    survivals = drill(
        profile,
        options.profile,
        follow_run,
        faults=options.faults or FAULTS,
        num_hosts=options.num_hosts,
        directory=directory.absolute(),
    )
    if options.json:
        print(json.dumps([dataclasses.asdict(survival) for survival in survivals]))
    else:
        rows = [
            [
                survival.fault,
                _VERDICTS[survival.survived],
                duration(survival.seconds),
                survival.how,
            ]
            for survival in survivals
        ]
        print(columns(rows, ["FAULT", "SURVIVED", "TIME", "HOW"]))
    return 1 if any(not survival.survived for survival in survivals) else 0


def _calibrate(options: argparse.Namespace) -> int:
    from redco_flow.cli.run import follow_to_end
    from redco_flow.cli.status import DETACHED_EXIT_CODE
    from redco_flow.orchestrate.calibrate import calibrate
    from redco_flow.orchestrate.doctor import gpus_per_host
    from redco_flow.spec.profile import load_own_profile

    note_replaced(cluster_profiles=options.profile)
    profile = load_own_profile(options.profile, options.overrides)
    directory = Path(profile.workspace) / "calibrations" / time.strftime("%Y%m%d-%H%M%S")
    measured = calibrate(
        profile,
        options.profile,
        lambda run: follow_to_end(run) != DETACHED_EXIT_CODE,
        overrides=[
            f"calibrate.resources.gpus_per_host={gpus_per_host(profile)}",
            *options.overrides,
        ],
        directory=directory.absolute(),
    )
    if measured is None:
        sys.stderr.write("the same command follows the measurement again, and keeps its result\n")
        return DETACHED_EXIT_CODE
    found, kept = measured
    if options.json:
        print(json.dumps(found))
        return 0
    rows = [
        [one["operation"], one["figure"], f"{one['size']:,}", f"{one['value']:.4g}"]
        for one in found["speeds"]
    ]
    print(columns(rows, ["OPERATION", "FIGURE", "SIZE", "MEASURED"]))
    figures = ", ".join(f"{name} {value:.4g}" for name, value in found["figures"].items())
    print(f"{found['num_devices']} x {found['device_kind']}: {figures}\nkept in {kept}")
    return 0
