"""Checkpoints and their evaluations as stages publish them, without a training."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from redco_flow.records import digest_json
from redco_flow.runtime.context import InputArtifact, StageContext
from redco_flow.stages.artifacts.predictions import PredictionsSummary, write_predictions
from redco_flow.stages.evaluate.config import Config
from redco_flow.stages.evaluate.run import run as evaluate
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.metrics_artifact import (
    HARNESS_FILE,
    LINES_FILE,
    SUMMARY_FILE,
    MetricsSummary,
    Prediction,
)
from redco_flow.tracking.results import StageResult, publish_result
from redco_flow.tracking.workspace import Workspace

NUM_ROWS = 200
CODE = {"redco_flow.metrics.exact_match": "1" * 64}


@dataclass
class Shop:
    """A workspace in which checkpoints are made and evaluated by hand."""

    folder: Path
    counter: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.workspace = Workspace.open(self.folder / "workspace")
        self.store = ArtifactStore(self.workspace)
        self.data = self.dataset(NUM_ROWS)

    def dataset(self, num_rows: int, content: str = "rows") -> Artifact:
        """A dataset whose test split has so many rows."""
        path = self._file("dataset.json", content)
        return self.store.publish(
            "dataset", path, metadata={"splits": {"test": {"rows": num_rows}}}
        )

    def checkpoint(
        self, content: str, pipeline: str = "demo", validation: dict[str, float] | None = None
    ) -> Artifact:
        """A checkpoint of a pipeline's stage train, with the scores of its own validation."""
        path = self._file("weights.bin", content)
        known = {"metrics": validation or {}}
        return self._published("checkpoint", path, known, pipeline, "train", {"content": content})

    def evaluation(
        self,
        checkpoint: Artifact,
        right: Sequence[bool],
        *,
        data: Artifact | None = None,
        code: dict[str, str] | None = None,
        metrics: Sequence[str] = ("exact_match",),
        num_beams: int = 1,
        loss: float | None = None,
    ) -> Artifact:
        """Evaluate a checkpoint that says the right thing for these rows, and else nonsense.

        Args:
            loss: of each target, of one token, where it was measured.
        """
        folder = self._folder()
        likelihood = {} if loss is None else {"loss": loss, "num_tokens": 1}
        lines = [
            Prediction(
                f"test:{row}",
                f"question {row}",
                f"{row}" if is_right else "?",
                [f"{row}"],
                **likelihood,
            )
            for row, is_right in enumerate(right)
        ]
        data = data or self.data
        summary = PredictionsSummary(
            split="test",
            num_examples=len(lines),
            generation={"num_beams": num_beams},
            checkpoint=checkpoint.id,
            step=7,
            data=data.id,
            config="e" * 64,
            most_frequent_target={"text": "0", "count": 1, "among": NUM_ROWS},
        )
        write_predictions(folder / "predictions", lines, summary)
        predictions = self.store.publish(
            "predictions", folder / "predictions", metadata=summary.to_json()
        )
        attempt = AttemptDirectory(folder)
        given = InputArtifact(predictions.id, "predictions", predictions.path, {})
        context = StageContext(
            "demo-run", "evaluate", "f" * 64, {"predictions": (given,)}, folder, attempt
        )
        made = evaluate(context, Config(metrics=list(metrics))).outputs["metrics"]
        ingredients = {"code": code or CODE, "inputs": {"predictions": [predictions.id]}}
        return self._published(
            "metrics", made.path, dict(made.metadata), "demo", "evaluate", ingredients
        )

    def of_tasks(
        self,
        checkpoint: Artifact,
        right: Sequence[bool],
        num_examples: int | None = None,
        data: str = "1" * 64,
    ) -> Artifact:
        """What the harness publishes of two tasks; of `easy` all rows are right.

        Args:
            num_examples: at most, of each task.
            data: digest of the file of `hard`.
        """
        lines = [
            {"row_id": f"{task}/{row}", "scores": {f"{task}/acc": float(one)}, "statistics": {}}
            for task, rows in {"easy": [True] * 20, "hard": right}.items()
            for row, one in enumerate(rows)
        ]
        rows = digest_json([line["row_id"] for line in lines])
        summary = MetricsSummary(
            metrics={"easy/acc": 1.0, "hard/acc": float(np.mean(right))},
            directions={"easy/acc": "max", "hard/acc": "max"},
            modules=[],
            baselines={},
            num_examples=len(lines),
            split="test",
            step=7,
            predictions="",
            checkpoint=checkpoint.id,
            data=rows,
            config="e" * 64,
            examples_digest=rows,
        ).to_json()
        folder = self._folder()
        (folder / SUMMARY_FILE).write_text(json.dumps(summary))
        (folder / LINES_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        counts = {
            task: {"original": size, "effective": min(size, num_examples or size)}
            for task, size in {"easy": 20, "hard": len(right)}.items()
        }
        (folder / HARNESS_FILE).write_text(json.dumps({"n-samples": counts}))
        ingredients = {"code": CODE, "settings": {"num_examples": num_examples}}
        ingredients["data"] = {"hard.yaml": data}
        ingredients["inputs"] = {"checkpoint": [checkpoint.id]}
        return self._published("metrics", folder, summary, "demo", "harness", ingredients)

    def _published(self, kind, path, metadata, pipeline, stage, ingredients) -> Artifact:
        fingerprint = digest_json([kind, ingredients])
        produced_by = {"fingerprint": fingerprint, "run": f"{pipeline}-abc123", "stage": stage}
        made = self.store.publish(kind, path, metadata=metadata, produced_by=produced_by)
        publish_result(
            self.workspace,
            StageResult(
                fingerprint=fingerprint,
                pipeline=pipeline,
                stage=stage,
                kind=stage,
                ingredients={"kind": stage, **ingredients},
                outputs={kind: made.id},
                run=f"{pipeline}-abc123",
                attempt=1,
            ),
        )
        return made

    def _folder(self) -> Path:
        self.counter.append(0)
        folder = self.folder / f"made-{len(self.counter)}"
        folder.mkdir()
        return folder

    def _file(self, name: str, content: str) -> Path:
        path = self._folder() / name
        path.write_text(json.dumps(content))
        return path


def right(num_right: int, num_rows: int = NUM_ROWS) -> list[bool]:
    """The first rows right, the others wrong."""
    return [row < num_right for row in range(num_rows)]


def shuffled(num_right: int, seed: int) -> list[bool]:
    """As many rows right, drawn at random: two such checkpoints differ by chance alone."""
    chosen = np.random.default_rng(seed).permutation(NUM_ROWS)[:num_right]
    return [row in set(chosen.tolist()) for row in range(NUM_ROWS)]
