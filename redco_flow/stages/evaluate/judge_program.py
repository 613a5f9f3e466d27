"""Ask a program of the user's whether an answer is right: a process of its own for each answer.

It gets a line of JSON on standard input and says by its exit code: 0 is right. How its process is
held back stands in `limits`; here is what it is given, and what its end means.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from redco_flow.stages.evaluate import limits

Ended = Literal["right", "wrong", "no_answer", "timed_out", "out_of_memory", "killed"]

_SECONDS_BEYOND = 30.0  # for starting, and for ending what a program left
_MAX_SAID = 200
_MEGABYTE = 1 << 20


@dataclass(frozen=True)
class ProgramEnd:
    """How a judge's process ended.

    Args:
        said: the last line of its standard error.
        is_apart: whether it had neither the network nor other processes before it.
    """

    ended: Ended
    said: str
    is_apart: bool


@dataclass(frozen=True)
class JudgeProgram:
    """A program and its limits.

    Args:
        path: a Python file (`.py`), or any other executable one.
        seconds: of wall time, and of each process's CPU time.
        memory_mib: of each process's address space.
    """

    path: Path
    seconds: float
    memory_mib: int

    def ask(self, question: Mapping[str, Any]) -> ProgramEnd:
        """Run the program in an empty directory, which is gone afterwards, and wait for its end."""
        with tempfile.TemporaryDirectory(
            prefix="redco-flow-judge-", ignore_cleanup_errors=True
        ) as folder:
            asked, errors = Path(folder) / "question.json", Path(folder) / "stderr"
            asked.write_text(json.dumps(question), "utf-8")
            work = Path(folder) / "work"
            work.mkdir()
            with asked.open("rb") as stdin, errors.open("wb") as stderr:
                report = self._run(work, stdin, stderr)
            return _ending(report, _last_line(errors))

    def _run(self, work: Path, stdin: Any, stderr: Any) -> dict[str, Any]:
        """Return what `limits` says; nothing where it was ended itself."""
        program = [str(self.path)]
        if self.path.suffix == ".py":
            program = [sys.executable, "-B", "-s", *program]
        bounds = [str(self.seconds), str(self.memory_mib * _MEGABYTE)]
        with subprocess.Popen(
            [sys.executable, "-I", "-S", limits.__file__, *bounds, *program],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=work,
            env=_environment(work),
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=self.seconds + _SECONDS_BEYOND)
            except subprocess.TimeoutExpired:
                return {}
            finally:
                process.kill()
        return dict(json.loads(said)) if process.returncode == 0 and said else {}


def _environment(work: Path) -> dict[str, str]:
    """Return what a program needs to start: none of ours, in which secrets may be."""
    # Libraries for linear algebra take memory and a thread for each core of the machine.
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(work),
        "TMPDIR": str(work),
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        **dict.fromkeys(threads, "1"),
    }


def _last_line(path: Path) -> str:
    lines = path.read_text("utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:_MAX_SAID]


def _ending(report: Mapping[str, Any], said: str) -> ProgramEnd:
    is_apart = bool(report.get("is_apart"))
    exit_code = report.get("exit_code", -int(signal.SIGKILL))
    if exit_code is None or exit_code == -int(signal.SIGXCPU):
        return ProgramEnd("timed_out", said, is_apart)
    if exit_code < 0:
        return ProgramEnd("killed", said, is_apart)
    if exit_code > 0 and said.startswith("MemoryError"):
        return ProgramEnd("out_of_memory", said, is_apart)
    return ProgramEnd("wrong" if exit_code else "right", said, is_apart)
