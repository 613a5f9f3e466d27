"""Judge every answer to every prompt, by a rule or a program, and count how each judging ended."""

from __future__ import annotations

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
from redco_flow.records import write_json_lines
from redco_flow.spec.metric import AnswersMetric, Verdict, key_at
from redco_flow.stages.evaluate.config import JudgeSection
from redco_flow.stages.evaluate.extraction import Extraction, ExtractionTimedOut
from redco_flow.stages.evaluate.judge_program import Ended, JudgeProgram, ProgramEnd
from redco_flow.tracking.metrics_artifact import Prediction

JUDGED_FILE = "judged.jsonl"
_MOST_NAMED = 3
_EXTRACT_TIMED_OUT = "judge.extract took longer than judge.timeout_seconds"
# Thousands, Indian lakhs and crores too; "3,5" and "0,125" are not grouped.
_GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}([,_\s])(?:\d{2,3}\1)*\d{3}(?!\d)")
_NUMBER = re.compile(
    r"(?P<number>[-+]?(?:\d{1,50}(?:\.\d{0,50})?|\.\d{1,50})(?:[eE][-+]?\d{1,3})?)"
    r"(?:/(?P<divisor>0*[1-9]\d{0,50}))?"
)
_SIGNS_AROUND = re.compile("[$€£%]")
_SPACED_SIGN = re.compile(" ?([-+/]) ?")
_LONGEST_NUMBER = 300

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
        """The record that metrics read."""
        return Verdict(self.ended == "right", self.answer)


@dataclass(frozen=True)
class Judgement:
    """The verdicts on all answers.

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
        """Number of answers by outcome; None if nothing was judged."""
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
        judged = zip(lines, self.rows, strict=True)
        found = (
            {"row_id": line.row_id, "answers": [asdict(one) for one in row]} for line, row in judged
        )
        write_json_lines(path, found)


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
    _log(rows, section.timeout_seconds)
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
    asked = list(dict.fromkeys((row, text) for row, texts in enumerate(answers) for text in texts))
    found: dict[tuple[int, str], Judged] = {}
    is_plain = section.program is None and section.extract is None
    # A comparison alone is faster than a thread's turn; all else happens in other processes.
    workers = 1 if is_plain else section.num_workers or len(os.sched_getaffinity(0))
    pool = ThreadPoolExecutor(workers, thread_name_prefix="judge")
    with Extraction(section.extract, section.timeout_seconds) as extract:
        try:
            judge_one = _judge_of(section, extract)
            judged = pool.map(lambda one: judge_one(lines[one[0]], one[1]), asked)
            for question, one in zip(asked, judged, strict=True):
                found[question] = one
                on_progress(len(found), len(asked))
        finally:
            pool.shutdown(cancel_futures=True)
    return [[found[row, text] for text in texts] for row, texts in enumerate(answers)]


def _judge_of(section: JudgeSection, extract: Extraction) -> Callable[[Prediction, str], Judged]:
    """Return what judges one text; texts on which `extract` takes too long have no answer."""
    kind = _Rule if section.program is None else _Program
    judge_one = kind(section, extract)

    def judge_in_time(line: Prediction, text: str) -> Judged:
        try:
            return judge_one(line, text)
        except ExtractionTimedOut:
            return Judged("no_answer", None, _EXTRACT_TIMED_OUT)

    return judge_in_time


def _log(rows: Sequence[Sequence[Judged]], seconds: float) -> None:
    """Log how many answers ended how, and what a program wrote most often."""
    counts = Counter(one.ended for row in rows for one in row)
    ended = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.most_common())
    logger.info("judged %d answers: %s", counts.total(), ended)
    said = Counter(one.said for row in rows for one in row if one.said)
    if num_texts := said.pop(_EXTRACT_TIMED_OUT, 0):
        logger.warning(
            "judge.extract took more than %g s on %d texts, which count as having no answer: "
            "simplify the pattern, or raise judge.timeout_seconds.",
            seconds,
            num_texts,
        )
    for text, count in said.most_common(_MOST_NAMED):
        logger.info("  the judge wrote %d times: %s", count, text)


class _Rule:
    """Compare what a text answers with what the references answer."""

    def __init__(self, section: JudgeSection, extract: Extraction) -> None:
        self._extract = extract
        self._normal = normal_number if section.compare == "number" else normal_text
        self._has_warned = False

    def __call__(self, line: Prediction, text: str) -> Judged:
        answer = self._answer(text)
        if answer is None:
            return Judged("no_answer", None)
        wanted = [self._reference(str(reference)) for reference in line.references]
        if None in wanted and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the reference %r is no number: give judge.extract, or leave out "
                "'compare: number'.",
                line.references[wanted.index(None)],
            )
        return Judged("right" if answer in wanted else "wrong", answer)

    def _reference(self, text: str) -> str | None:
        """Return what a reference answers: it may be the bare answer, without a match."""
        try:
            found = self._answer(text)
        except ExtractionTimedOut:
            found = None
        return self._normal(text) if found is None else found

    def _answer(self, text: str) -> str | None:
        found = self._extract(text)
        return None if found is None else self._normal(found)


class _Program:
    """Run the user's judge program."""

    def __init__(self, section: JudgeSection, extract: Extraction) -> None:
        assert section.program is not None
        self._extract = extract
        self._program = JudgeProgram(
            Path(section.program), section.timeout_seconds, section.memory_mib
        )
        self._has_warned = False

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
        self._warn_of_missing_limits(end)
        return Judged(end.ended, normal_text(answer), "" if end.ended == "right" else end.said)

    def _warn_of_missing_limits(self, end: ProgramEnd) -> None:
        missing = [
            *([] if end.is_apart else ["namespaces (it sees other processes and their files)"]),
            *([] if end.is_confined else ["Landlock (it reads and writes all of your files)"]),
        ]
        if missing and not self._has_warned and end.ended != "killed":
            self._has_warned = True
            logger.warning(
                "this system offers the judge's programs no %s. Their limits of time and memory "
                "hold; judge the texts of models that you do not trust in a container.",
                " and no ".join(missing),
            )


def normal_text(text: str) -> str:
    """Return a text with single spaces, without outer ones."""
    return " ".join(text.split())


def normal_number(text: str) -> str | None:
    """Return a number in the one form that equal numbers have; None of what is no number.

    Known are decimals, with an exponent, too, and quotients of them, with signs of currency and
    percent around, and thousands grouped by a comma, a space or an underscore.
    """
    plain = _SIGNS_AROUND.sub("", text).replace("\N{MINUS SIGN}", "-").strip()
    if len(plain) > _LONGEST_NUMBER or "\n" in plain:
        return None
    plain = normal_text(plain).lstrip(" *").rstrip(" ,_.;:!*")  # as in a sentence
    plain = _SPACED_SIGN.sub(r"\1", plain)
    plain = _GROUPED.sub(lambda found: found[0].replace(found[1], ""), plain)
    found = _NUMBER.fullmatch(plain)
    if found is None:
        return None
    return str(Fraction(found["number"]) / int(found["divisor"] or 1))
