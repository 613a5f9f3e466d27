"""Answer `plan --fit` for one training, in a separate process, which imports JAX.

`python -m redco_flow.stages.train.fit` reads a `FitRequest` as JSON from standard input and writes
lines of JSON: any number of {"progress": …}, then {"fit": …}, as `fitting.fit` returns it, or
{"error": …}. What compilers print goes to standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from redco_flow.engine.errors import EngineError
from redco_flow.engine.step.links import Fabrics
from redco_flow.engine.targets import read_target
from redco_flow.errors import RedcoFlowError
from redco_flow.search_path import append_current_directory
from redco_flow.spec.stage_kind import find_stage_kind
from redco_flow.stages.train.config import Config

_MOST_CPU_SECONDS = 1800
_SECONDS_TO_END = 5
_KERNELS = "xla_gpu_kernel_cache_file"
_SIGNAL_AT_PARENTS_DEATH = 1  # linux/prctl.h


@dataclass(frozen=True)
class FitRequest:
    """One training to plan.

    Args:
        stage: its name, for overrides.
        config: of the train stage, as JSON.
        target: as of `engine.targets.read_target`.
        gpus_per_host: where the target's hosts have other than 8.
        fabrics: the arguments of `Fabrics`, where not all hosts share a network.
        preprocessing: (kind, Config as JSON) of the stage that makes the dataset; None: no stage.
        dataset: the directory of the published dataset, if there is one.
        inputs: names of the stage's inputs.
        share_of_gpu: of a GPU's memory, which the stage's process takes.
        described: facts about devices, as of `engine.devices.find_device`.
        measured: figures by what JAX calls a device.
        searches: also for the fastest mesh.
        kernels: a file of this planning alone, for kernels that are compiled for GPUs.
    """

    stage: str
    config: Mapping[str, Any]
    target: str
    gpus_per_host: int | None = None
    fabrics: Mapping[str, Any] | None = None
    preprocessing: tuple[str, Mapping[str, Any]] | None = None
    dataset: str | None = None
    inputs: Sequence[str] = ()
    share_of_gpu: float = 1.0
    described: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    measured: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    searches: bool = False
    kernels: str | None = None


def main() -> None:
    """Read a request and answer it."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(kind: str, value: Any) -> None:
        answers.write(json.dumps({kind: value}) + "\n")
        answers.flush()

    append_current_directory()
    try:
        _limit()
        write(
            "fit", _answer(FitRequest(**json.load(sys.stdin)), lambda text: write("progress", text))
        )
    except (RedcoFlowError, EngineError, OSError, ValueError) as error:
        write("error", " ".join(str(error).split()))
    except Exception as error:  # noqa: BLE001 (compilers raise their own)
        traceback.print_exc()
        write("error", f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")


def _answer(request: FitRequest, progress: Any) -> dict[str, Any]:
    target = read_target(
        request.target, gpus_per_host=request.gpus_per_host, described=request.described
    )
    for reported, figures in request.measured.items():
        if target.device.is_reported_as(reported):
            target = replace(target, device=replace(target.device, measured=figures))
    if request.fabrics is not None:
        target = replace(target, fabrics=Fabrics(**request.fabrics))
    target.set_environment()
    if target.device.platform == "cuda" and request.kernels is not None:
        _keep_kernels(request.kernels)
    progress("reading the model")
    from redco_flow.stages.train import fitting, planned_data

    config = Config.from_json(request.config)
    if request.dataset is not None:
        data = planned_data.of_dataset(Path(request.dataset), config, request.inputs)
    elif request.preprocessing is not None:
        kind, values = request.preprocessing
        preprocessing = find_stage_kind(kind).config_type.from_json(values)
        data = planned_data.of_settings(config, preprocessing, request.inputs)
    else:
        raise planned_data.CannotPlan("no stage makes the dataset")
    given = (request.stage, config, data, target, progress, request.share_of_gpu)
    return fitting.fit(*given, searches=request.searches)


def _keep_kernels(path: str) -> None:
    """Let XLA keep compiled kernels in a file: the steps that a search compares share many."""
    flags = os.environ.get("XLA_FLAGS", "").strip()
    # Spaces separate flags. What does not begin with a flag is the name of a file with flags.
    if _KERNELS not in flags and len(path.split()) == 1 and flags[:1] in ("", "-"):
        os.environ["XLA_FLAGS"] = f"{flags} --{_KERNELS}={path}".strip()


def _limit() -> None:
    """End this process with the one that asks, and after half an hour of CPU time."""
    ctypes.CDLL(None).prctl(_SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL, 0, 0, 0)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = _MOST_CPU_SECONDS
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard - _SECONDS_TO_END)  # before it is killed
    resource.setrlimit(resource.RLIMIT_CPU, (max(most, 1), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
