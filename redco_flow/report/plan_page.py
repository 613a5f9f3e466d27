"""The figures of `plan --fit` in words and tables: for the command line, and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from redco_flow.records import moment
from redco_flow.report.numbers import THIN_SPACE, duration, gib, step_seconds
from redco_flow.report.runs_page import Cell, RunsPage, Section, Table

_GIB = "GiB"
_NUMBERS = (_GIB, "time on the link", "step", "all steps", "GPU-hours", "seconds", "share")
_PARTS = {
    "parameters": "parameters",
    "optimizer_state": "optimizer state",
    "batch": "batch",
    "temporaries": "temporaries",
    "other": "other",
}
_SMALLEST_OTHER = 2**20


def plan_page(
    pipeline: str,
    fits: Mapping[str | None, Mapping[str, Mapping[str, Any]]],
    compared: Mapping[str, Sequence[Mapping[str, Any]]],
    now: str,
) -> RunsPage:
    """Return the page of a plan.

    Args:
        pipeline: its name.
        fits: by target, then by stage, as of `cli.fit.find_fits`; None: the profile's devices.
        compared: of several targets, each training's devices, as of `compare_on_targets`.
        now: the time as `utc_now` gives it.
    """
    titled = [
        (_title(stage, target, fit), fit)
        for target, of_target in fits.items()
        for stage, fit in of_target.items()
    ]
    return RunsPage(
        of="plan",
        title=pipeline,
        facts=[(title, verdict_of(fit)) for title, fit in titled],
        sections=[
            *(
                Section(f"{stage} on each target", [devices_table(compared[stage])])
                for stage in compared
            ),
            *(_section(title, fit) for title, fit in titled),
        ],
        built_at=now,
    )


def _title(stage: str, target: str | None, fit: Mapping[str, Any]) -> str:
    if "error" in fit:
        return stage if target is None else f"{stage} on {target}"
    return title_of(stage, fit)


def _section(title: str, fit: Mapping[str, Any]) -> Section:
    if "error" in fit:
        return Section(title, text=fit["error"])
    memory, *others = tables_of(fit)
    step = [_step_table(fit["step_time"])] if fit["step_time"] else []
    facts = _table("Figures", ["figure", "value"], [list(fact) for fact in facts_of(fit)])
    return Section(title, [facts, memory, *step, *others])


def title_of(stage: str, fit: Mapping[str, Any]) -> str:
    """Name a training and its devices."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in fit["mesh"].items())
    title = f"{stage} on {fit['num_devices']} x {fit['device']}{f' ({mesh})' if mesh else ''}"
    if hosts := fit["hosts_of_fabrics"]:
        title += f", {' + '.join(map(str, hosts))} hosts in {len(hosts)} fabrics"
    return title


def verdict_of(fit: Mapping[str, Any]) -> str:
    """Say whether a training fits, and by how much."""
    if "error" in fit:
        return "not planned"
    verdict = "fits" if fit["fits"] else "does not fit"
    return f"{verdict}, {gib(fit['used_bytes'])} of {gib(fit['limit_bytes'])} GiB a device"


def facts_of(fit: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the (name, value) of what is known of a training."""
    trained, parameters = fit["num_trained"], fit["num_parameters"]
    yield (
        "parameters",
        f"{parameters:,}, {'all' if trained == parameters else f'{trained:,}'} trained",
    )
    if fit["model_flops_per_step"] is not None:
        yield "model FLOPs a step", f"{fit['model_flops_per_step']:.3g}"
    if fit["program_flops_per_device"] is not None:
        kernels = sum(fit["kernel_runs_per_device"].values())
        besides = f" and {kernels} runs of kernels" if kernels else ""
        yield "compiled for a device", f"{fit['program_flops_per_device']:.3g} FLOPs{besides}"
    steps = fit["num_steps"]
    yield "steps", "not known before preprocessing" if steps is None else f"{steps:,}"
    yield "checkpoint", f"{gib(fit['checkpoint_bytes'])} GiB"
    yield from _times(fit)
    facts = (
        f"{name} {one['value']:g} ({one['origin']})" for name, one in fit["device_facts"].items()
    )
    yield fit["device"], ", ".join(facts)
    if fit["recent_runs"]:
        yield "recent runs", fit["recent_runs"]
    if fit["measured"]:
        yield "the same program", f"{fit['measured']['stage']}: {fit['measured']['text']}"
    yield "planned in", f"{fit['planning_cpu_seconds']:.0f} s of CPU time"
    yield from (("note", note) for note in (*fit["notes"], *fit.get("search_notes", ())))


def _times(fit: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the predicted time of a step and what follows from it, or why it is not known."""
    if (time := fit["step_time"]) is None:
        yield "step time", f"not known: {fit['step_time_unknown']}"
        return
    least, most = (step_seconds(time[key]) for key in ("least_seconds", "most_seconds"))
    parts = ", ".join(f"{part} {step_seconds(seconds)}" for part, seconds in _longest_first(time))
    yield "step time", f"{step_seconds(time['seconds'])} ({least} to {most}): {parts}"
    per_second = time["tokens_per_second"] or time["rows_per_second"]
    yield "speed", f"{per_second:,.0f} {'tokens' if time['tokens_per_second'] else 'rows'}/s"
    if time["all_steps_seconds"] is not None:
        hours = f"{time['device_hours']:.4g} GPU-hours"
        yield "all steps", f"{_duration(time['all_steps_seconds'])}, {hours}"


def _longest_first(time: Mapping[str, Any]) -> list[tuple[str, float]]:
    return sorted(time["parts_seconds"].items(), key=lambda part: -part[1])


def tables_of(fit: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the memory by part, then what else is known: traffic, other meshes, other devices."""
    yield _memory_table(fit)
    if fit["step_time"] and fit["step_time"]["traffic"]:
        yield _traffic_table(fit["step_time"]["traffic"])
    candidates = fit.get("candidates", ())
    if candidates:
        yield _candidates_table(candidates)
    if "devices" in fit:
        yield devices_table(fit["devices"])
    if fit["suggestions"] and not any(one["fits"] for one in candidates):
        yield _suggestions_table(fit["suggestions"])


def _memory_table(fit: Mapping[str, Any]) -> Table:
    sizes = fit["parts_bytes"]
    parts = [
        (name, sizes[key])
        for key, name in _PARTS.items()
        if key in sizes and (key != "other" or sizes[key] >= _SMALLEST_OTHER)
    ]
    parts.append(("gradients, among temporaries", fit["gradients_bytes"]))
    if fit["host_bytes_per_device"]:
        parts.append(("offloaded to the host, a device", fit["host_bytes_per_device"]))
    rows = [[name, gib(size)] for name, size in parts]
    return _table("Memory of a device", ["part", _GIB], rows)


def _step_table(time: Mapping[str, Any]) -> Table:
    rows = [
        [part, f"{seconds:.3g}", f"{seconds / time['seconds']:.0%}"]
        for part, seconds in _longest_first(time)
    ]
    return _table("Time of a step", ["part", "seconds", "share"], rows)


def _traffic_table(traffic: Sequence[Mapping[str, Any]]) -> Table:
    """Return what is sent along each axis of the mesh, whether kernels hide its time or not."""
    header = ["sent along", "slowest link", _GIB, "time on the link"]
    rows = [
        [one["axes"], one["link"], gib(one["bytes_per_device"]), step_seconds(one["seconds"])]
        for one in traffic
    ]
    return _table("Sent by a device in a step", header, rows)


def _candidates_table(candidates: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        [
            " ".join(one["overrides"]) or "as it is",
            "" if one["used_bytes"] is None else gib(one["used_bytes"]),
            step_seconds(one["step_seconds"]) if one["fits"] else "",
            one["reason"],
        ]
        for one in candidates
    ]
    return _table("Candidates", ["best first", _GIB, "step", "why not"], rows)


def devices_table(devices: Sequence[Mapping[str, Any]]) -> Table:
    """Return a training's best mesh on each of several devices, the best first."""
    times = ["step", "all steps", "GPU-hours", "start", "end"]
    header = ["devices", "mesh", *times, "start by", "why not"]
    rows = [
        [
            one["target"],
            one["mesh"],
            step_seconds(one["step_seconds"]),
            _duration(one["all_steps_seconds"]),
            "" if one["device_hours"] is None else f"{one['device_hours']:.4g}",
            *(moment(one[key]) if one[key] else "" for key in ("expected_start", "expected_end")),
            one["start_source"],
            one["reason"],
        ]
        for one in devices
    ]
    return _table("Numbers of devices", header, rows).compact()


def _suggestions_table(suggestions: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        [" ".join(one["overrides"]), gib(one["used_bytes"]), step_seconds(one["step_seconds"])]
        for one in suggestions
    ]
    return _table("Settings that fit", ["fits with", _GIB, "step"], rows)


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds).replace(THIN_SPACE, " ")


def _table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table whose sizes and times are aligned."""
    are_numbers = [name in _NUMBERS for name in header]
    cells = [list(map(Cell, row, are_numbers)) for row in rows]
    return Table(caption, header, cells, names=(_GIB,))
