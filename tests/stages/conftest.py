"""Run stages by hand: real contexts in tmp_path, real published artifacts between them."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from redco_flow.runtime.context import InputArtifact, StageContext, StageOutputs
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.workspace import Workspace

PROJECT = Path(__file__).resolve().parents[2]

sys.path.append(str(Path(__file__).parent / "kinds"))  # metrics of a user's own


@dataclass
class Bench:
    """A workspace with stages run one after the other in this process."""

    root: Path
    num_runs: int = 0
    metrics_path: Path = field(default_factory=Path)

    def __post_init__(self) -> None:
        self.store = ArtifactStore(Workspace.open(self.root / "workspace"))

    def context(
        self,
        stage: str = "stage",
        inputs: Mapping[str, list[InputArtifact]] | None = None,
        *,
        work: str | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> StageContext:
        """A context with a new attempt; `work` names a work directory to come back to."""
        self.num_runs += 1
        work_dir = self.root / "work" / (work or f"{stage}-{self.num_runs}")
        attempt_dir = self.root / "attempts" / str(self.num_runs)
        for folder in (work_dir, attempt_dir):
            folder.mkdir(parents=True, exist_ok=True)
        attempt = AttemptDirectory(attempt_dir)
        self.metrics_path = attempt.metrics_path
        return StageContext(
            run="run",
            stage=stage,
            fingerprint="f" * 64,
            inputs={slot: tuple(artifacts) for slot, artifacts in (inputs or {}).items()},
            work_dir=work_dir,
            attempt_dir=attempt,
            provenance=dict(provenance or {}),
        )

    def publish(
        self, outputs: StageOutputs, inputs: Mapping[str, list[InputArtifact]] | None = None
    ) -> dict[str, InputArtifact]:
        """Publish what a stage returned, as the worker does."""
        parents = {slot: artifacts[0].id for slot, artifacts in (inputs or {}).items()}
        published = {}
        for name, output in outputs.outputs.items():
            artifact = self.store.publish(
                output.kind,
                output.path,
                metadata=output.metadata,
                parents=parents,
                produced_by={},
                digests=output.digests,
                identity=output.identity,
            )
            published[name] = InputArtifact(
                artifact.id, artifact.kind, artifact.path, artifact.manifest
            )
        return published

    def run(
        self,
        module: Any,
        settings: Mapping[str, Any],
        inputs: Mapping[str, list[InputArtifact]] | None = None,
        **context: Any,
    ) -> dict[str, InputArtifact]:
        """Run a stage and publish its outputs."""
        config = module.Config.from_json(settings)
        stage = module.__name__.rpartition(".")[2]
        outputs = module.run(self.context(stage, inputs, **context), config)
        return self.publish(outputs, inputs)

    def rewind(self, work: str, step: int) -> str:
        """Copy a training's work directory without its checkpoints after a step; return its name.

        A training that runs there resumes as after a kill.
        """
        name = f"{work}-from-{step}"
        checkpoints = self.root / "work" / name / "checkpoints"
        shutil.copytree(self.root / "work" / work / "checkpoints", checkpoints)
        steps = {int(path.name) for path in checkpoints.iterdir() if path.name.isdigit()}
        assert step in steps
        for later in steps:
            if later > step:
                shutil.rmtree(checkpoints / str(later))
        return name

    def records(self) -> list[dict[str, Any]]:
        """What the last context's stage wrote into metrics.jsonl."""
        return [json.loads(line) for line in self.metrics_path.read_text().splitlines()]

    def start_step(self) -> int:
        """The step that the last context's training resumed from."""
        return next(one["start_step"] for one in self.records() if one["kind"] == "start")


@pytest.fixture(scope="module", autouse=True)
def _compile_once(compile_cache: None) -> None:
    """A resumed training loads the programs of the interrupted one."""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture(scope="module")
def shared_bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """One for a whole file, where the stages before the tested one cost time."""
    return Bench(tmp_path_factory.mktemp("bench"))


@pytest.fixture
def run_over(bench: Bench, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run an example as a stage over model shards; return the numbers it told and its params."""
    from stage_kinds import script

    def run_over(name: str, num_shards: int, **arguments: Any) -> tuple[list[float], Any]:
        path = str(PROJECT / "examples" / name)
        arguments["num_model_shards"] = num_shards
        made = bench.run(script, {"path": path, "arguments": arguments, "outputs": ["params"]})
        numbers = re.findall(r"-?\d+\.\d+", capsys.readouterr().out)
        return [float(n) for n in numbers], dict(np.load(made["params"].path / "params.npz"))

    return run_over


def _write_rows(path: Path, rows: list[tuple[str, str]]) -> Path:
    lines = (json.dumps({"source": s, "target": t}, ensure_ascii=False) for s, t in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def write_rows() -> Callable[[Path, list[tuple[str, str]]], Path]:
    return _write_rows


class StopAtLook:
    """A request to stop that is there at the n-th look."""

    is_watched = True

    def __init__(self, number: int) -> None:
        self._num_left = number

    @property
    def requested(self) -> bool:
        self._num_left -= 1
        return self._num_left <= 0


@pytest.fixture(scope="session")
def stop_at_look() -> type[StopAtLook]:
    """Make requests to stop that come at a given look."""
    return StopAtLook
