"""Judge every answer to every prompt, by a rule or a program, and count how each judging ended."""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path

from redco_flow.errors import RedcoFlowError
from redco_flow.metrics.metric import AnswersMetric, Verdict, key_at
from redco_flow.stages.artifacts.predictions import Prediction
from redco_flow.stages.evaluate.config import JudgeSection
from redco_flow.stages.evaluate.judge_program import Ended, JudgeProgram, ProgramEnd

JUDGED_FILE = "judged.jsonl"
_MOST_NAMED = 3
_NUMBER = re.compile(
    r"(?P<number>[-+]?(?:\d{1,50}(?:\.\d{0,50})?|\.\d{1,50})(?:[eE][-+]?\d{1,3})?)"
    r"(?:/(?P<divisor>0*[1-9]\d{0,50}))?"
)
# What is written around a number without changing it.
_AROUND_NUMBERS = re.compile(r"[\s,$€£%_]|\.$")

OnProgress = Callable[[int, int], None]
"""(answers judged, answers in all); may raise, which ends the judging"""

logger = logging.getLogger(__name__)


class CannotJudge(RedcoFlowError):
    """There are fewer answers than are to be judged, or they are no texts."""


@dataclass(frozen=True)
class Judged:
    """One answer, judged.

    Args:
        answer: what was found in the text; None: nothing was.
        said: the last line that a program wrote to its standard error, where it found no right
            answer.
    """

    ended: Ended
    answer: str | None
    said: str = ""

    @property
    def verdict(self) -> Verdict:
        """What metrics read."""
        return Verdict(self.ended == "right", self.answer)


@dataclass(frozen=True)
class Judgement:
    """What a judge says of all answers.

    Args:
        scores: of the whole set, by key.
        per_example: by key, of each prompt.
        directions: which of two scores is better, by key.
        rows: of each prompt its answers, judged.
    """

    scores: Mapping[str, float] = field(default_factory=dict)
    per_example: Mapping[str, list[float]] = field(default_factory=dict)
    directions: Mapping[str, str] = field(default_factory=dict)
    rows: Sequence[Sequence[Judged]] = ()

    @property
    def counts(self) -> dict[str, int] | None:
        """How many answers' judging ended how; None where nothing was judged."""
        found = Counter(one.ended for row in self.rows for one in row)
        return dict(sorted(found.items())) or None

    def scores_of(self, indexes: Sequence[int]) -> dict[str, float]:
        """Return the scores of some of the prompts."""
        return {key: _mean([each[i] for i in indexes]) for key, each in self.per_example.items()}

    def add_to(self, scores: Sequence[dict[str, float]]) -> None:
        """Put each prompt's scores beside its other ones."""
        for key, each in self.per_example.items():
            for found, score in zip(scores, each, strict=True):
                found[key] = score

    def write(self, path: Path, lines: Sequence[Prediction]) -> None:
        """Write a line per prompt; no file where nothing was judged."""
        if not self.rows:
            return
        with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for line, row in zip(lines, self.rows, strict=True):
                said = {"row_id": line.row_id, "answers": [asdict(one) for one in row]}
                file.write(json.dumps(said, ensure_ascii=False) + "\n")


def judge(
    section: JudgeSection | None,
    metrics: Mapping[str, AnswersMetric],
    lines: Sequence[Prediction],
    on_progress: OnProgress,
) -> Judgement:
    """Judge all answers and score them.

    Raises:
        CannotJudge: a prompt has fewer answers than the largest k.
    """
    if section is None or not metrics:
        return Judgement()
    answers = [_answers(line, max(section.k)) for line in lines]
    rows = _ask(section, lines, answers, on_progress)
    _tell(rows)
    verdicts = [[one.verdict for one in row] for row in rows]
    asked = [
        (metric, key, k) for metric in metrics.values() for key in metric.KEYS for k in section.k
    ]
    per_example = {key_at(key, k): metric.of_answers(verdicts, k) for metric, key, k in asked}
    return Judgement(
        {key: _mean(each) for key, each in per_example.items()},
        per_example,
        {key_at(key, k): metric.KEYS[key] for metric, key, k in asked},
        rows,
    )


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)


def _answers(line: Prediction, k: int) -> list[str]:
    texts = [line.prediction] if line.predictions is None else line.predictions
    if not all(isinstance(text, str) for text in texts):
        raise CannotJudge(f"{line.row_id}: the predictions are no texts; a judge reads texts.")
    if len(texts) < k:
        raise CannotJudge(
            f"{line.row_id} has {len(texts)} answers, and judge.k asks for {k}: set "
            f"num_return_sequences: {k} (with do_sample: true) in the predict stage."
        )
    return list(texts)


def _ask(
    section: JudgeSection,
    lines: Sequence[Prediction],
    answers: Sequence[Sequence[str]],
    on_progress: OnProgress,
) -> list[list[Judged]]:
    """Judge each different answer to a prompt once."""
    judge_one = _Rule(section) if section.program is None else _Program(section)
    # A rule is faster than a thread's turn.
    workers = 1 if section.program is None else section.num_workers or _num_cores()
    asked = list(dict.fromkeys((row, text) for row, texts in enumerate(answers) for text in texts))
    found: dict[tuple[int, str], Judged] = {}
    pool = ThreadPoolExecutor(workers, thread_name_prefix="judge")
    try:
        judged = pool.map(lambda one: judge_one(lines[one[0]], one[1]), asked)
        for question, one in zip(asked, judged, strict=True):
            found[question] = one
            on_progress(len(found), len(asked))
    finally:
        pool.shutdown(cancel_futures=True)
    return [[found[row, text] for text in texts] for row, texts in enumerate(answers)]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _tell(rows: Sequence[Sequence[Judged]]) -> None:
    """Say in the log how many answers were judged how, and what a program said most often."""
    counts = Counter(one.ended for row in rows for one in row)
    told = ", ".join(f"{count} {ended.replace('_', ' ')}" for ended, count in counts.most_common())
    logger.info("judged %d answers: %s", counts.total(), told)
    said = Counter(one.said for row in rows for one in row if one.said)
    for text, count in said.most_common(_MOST_NAMED):
        logger.info("  the judge said %d times: %s", count, text)


class _Extraction:
    """Find what a text answers.

    Args:
        pattern: its last match counts: the first group, or all of it where there is none.
    """

    def __init__(self, pattern: str | None) -> None:
        self._pattern = None if pattern is None else re.compile(pattern)

    def __call__(self, text: str) -> str | None:
        if self._pattern is None:
            return text
        found = list(self._pattern.finditer(text))
        return found[-1].group(min(1, self._pattern.groups)) if found else None


class _Rule:
    """Compare what a text answers with what the references answer."""

    def __init__(self, section: JudgeSection) -> None:
        self._extract = _Extraction(section.extract)
        self._normal = normal_number if section.compare == "number" else normal_text

    def __call__(self, line: Prediction, text: str) -> Judged:
        answer = self._answer(text)
        if answer is None:
            return Judged("no_answer", None)
        # A reference may be the bare answer, without what a model writes around it.
        wanted = {
            self._normal(reference) if (found := self._answer(reference)) is None else found
            for reference in map(str, line.references)
        }
        return Judged("right" if answer in wanted else "wrong", answer)

    def _answer(self, text: str) -> str | None:
        found = self._extract(text)
        return None if found is None else self._normal(found)


class _Program:
    """Ask a program of the user's."""

    def __init__(self, section: JudgeSection) -> None:
        assert section.program is not None
        self._extract = _Extraction(section.extract)
        self._program = JudgeProgram(
            Path(section.program), section.timeout_seconds, section.memory_mib
        )
        self._was_told = False

    def __call__(self, line: Prediction, text: str) -> Judged:
        answer = self._extract(text)
        if answer is None:
            return Judged("no_answer", None)
        question = {
            "prompt": line.source,
            "answer": answer,
            "text": text,
            "references": line.references,
            "row": line.row or {},
        }
        end = self._program.ask(question)
        self._tell_of_network(end)
        return Judged(end.ended, normal_text(answer), "" if end.ended == "right" else end.said)

    def _tell_of_network(self, end: ProgramEnd) -> None:
        if not end.is_apart and not self._was_told:
            self._was_told = True
            logger.warning(
                "the judge's processes can reach the network and see other processes: this system "
                "lets no user make namespaces. Their limits of time and memory hold."
            )


def normal_text(text: str) -> str:
    """Return a text with single spaces, without outer ones."""
    return " ".join(text.split())


def normal_number(text: str) -> str | None:
    """Return a number in the one form that equal numbers have; None of what is no number.

    Known are decimals, with an exponent, too, and quotients of them, with signs of currency,
    percent and thousands around.
    """
    found = _NUMBER.fullmatch(_AROUND_NUMBERS.sub("", text.strip()))
    if found is None:
        return None
    return str(Fraction(found["number"]) / int(found["divisor"] or 1))
