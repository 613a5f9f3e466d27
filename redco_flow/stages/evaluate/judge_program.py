"""Run a judge program: one process per answer, which must print a proof that it reached its end.

The program gets a line of JSON on standard input. Exit code 0 alone does not make an answer right:
`os._exit(0)` in an answer gives it too. The last line of standard output must be the question's
`proof`, a new random word. `limits` confines the process; this module starts it and interprets
how it ended.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from redco_flow import search_path
from redco_flow.launch.processes import kill_processes_with
from redco_flow.stages.evaluate import limits
from redco_flow.stages.evaluate.own_process import PACKAGE_PARENT, command

Ended = Literal["right", "wrong", "no_answer", "timed_out", "out_of_memory", "killed"]

PROOF = "proof"
"""The question's key; its value is to be the program's last line on standard output."""

_NO_PROOF = "it ended with exit code 0 and did not print the question's proof as its last line"
_SECONDS_BEYOND = 30.0  # for starting, and for ending what a program left
_SECONDS_TO_KILL = 5.0
_MAX_SAID = 200
_MAX_TAIL_BYTES = 1 << 14
_MAX_REPORT_BYTES = 1 << 16
_MEGABYTE = 1 << 20
_MARK_VARIABLE = "REDCO_FLOW_JUDGED"
_SYSTEM = ("/bin", "/sbin", "/usr", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/nix/store")
_NEXT_TO_PROGRAMS = ("lib", "lib64", "libexec", "share")


@dataclass(frozen=True)
class ProgramEnd:
    """The end of a judge's process.

    Args:
        said: the last line of its standard error, or why exit code 0 was not enough.
        is_apart: whether it had its own namespaces: it saw no other process and no other's files
            in memory.
        is_confined: whether Landlock let it read the interpreter and its own folder alone, and
            write only in its working directory.
    """

    ended: Ended
    said: str
    is_apart: bool = False
    is_confined: bool = False


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
        """Run the program in an empty directory, which is then deleted, and wait for its end."""
        proof = secrets.token_hex(16)
        # Files without names, which no process can open by a path.
        with (
            tempfile.TemporaryDirectory(
                prefix="redco-flow-judge-", ignore_cleanup_errors=True
            ) as folder,
            tempfile.TemporaryFile() as stdin,
            tempfile.TemporaryFile() as stdout,
            tempfile.TemporaryFile() as stderr,
        ):
            stdin.write(json.dumps({**question, PROOF: proof}).encode() + b"\n")
            stdin.seek(0)
            report = self._run(folder, stdin, stdout, stderr)
            is_proven = _last_line(stdout).strip() == proof
            return _ending(report, _last_line(stderr)[:_MAX_SAID], is_proven=is_proven)

    def _run(
        self, folder: str, stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes]
    ) -> dict[str, Any]:
        """Return what `limits` reports; nothing where that process was ended itself."""
        word, mark = secrets.token_hex(16), secrets.token_hex(16)
        report, to_us = os.pipe()
        bounds = [str(to_us), str(self.seconds), str(self.memory_mib * _MEGABYTE), folder]
        own = {
            limits.WORD_VARIABLE: word,
            limits.READABLE_VARIABLE: os.pathsep.join(_readable(self.path)),
        }
        try:
            process = subprocess.Popen(
                [*command(limits.__name__, has_site_packages=False), *bounds, *self._words()],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=_environment(folder) | {_MARK_VARIABLE: mark} | own,
                pass_fds=(to_us,),
                start_new_session=True,
            )
        finally:
            os.close(to_us)
        with process, open(report, "rb") as file:
            try:
                process.wait(timeout=self.seconds + _SECONDS_BEYOND)
            except subprocess.TimeoutExpired:
                pass
            finally:
                process.kill()
            os.set_blocking(report, False)
            found = _report(file.read(_MAX_REPORT_BYTES) or b"", word)
        if not found:
            _kill_all_with(mark)
        return found

    def _words(self) -> list[str]:
        path = str(self.path.absolute())
        return [sys.executable, "-B", "-s", path] if self.path.suffix == ".py" else [path]


def _report(said: bytes, word: str) -> dict[str, Any]:
    """Return the report that has the word; what a program wrote in its place is ignored."""
    for line in said.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            report = json.loads(line)
            if isinstance(report, dict) and report.get("word") == word:
                return report
    return {}


def _kill_all_with(mark: str) -> None:
    """Kill what a program left that killed its parents; it is known by its environment."""
    limit = time.monotonic() + _SECONDS_TO_KILL
    while kill_processes_with(_MARK_VARIABLE, mark) and time.monotonic() < limit:
        time.sleep(0.01)


def _readable(program: Path) -> list[str]:
    """Return what a program may read: the system's programs, the interpreter, its own folder."""
    interpreter = Path(sys.executable)
    folders = [
        *map(Path, (*_SYSTEM, sys.prefix, sys.base_prefix)),
        *(interpreter.parent, interpreter.resolve().parent),
        *(Path(path) for path in sys.path if path and path != str(Path.cwd())),
        *_folders_of_loaded_libraries(),
        *(Path(PACKAGE_PARENT), program.absolute().parent, program.resolve()),
    ]
    for text in os.environ.get("PATH", os.defpath).split(os.pathsep):
        if (folder := Path(text)).is_absolute():
            folders += [folder, *(folder.parent / name for name in _NEXT_TO_PROGRAMS)]
    return list(dict.fromkeys(map(str, folders)))


@functools.cache
def _folders_of_loaded_libraries() -> tuple[Path, ...]:
    """Return where this process, which runs the same interpreter, found its libraries."""
    lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    paths = {Path(words[5]) for line in lines if len(words := line.split(maxsplit=5)) == 6}
    return tuple(sorted({path.parent for path in paths if ".so" in path.name}))


def _environment(folder: str) -> dict[str, str]:
    """Return what a program needs to start: none of our variables, which may hold secrets."""
    # Libraries for linear algebra take memory and a thread for each core of the machine.
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    # A package that is not installed, as on hosts, is found by this variable.
    is_on_path = PACKAGE_PARENT in search_path.first_folders()
    libraries = os.environ.get("LD_LIBRARY_PATH")
    return {
        **({"PYTHONPATH": PACKAGE_PARENT} if is_on_path else {}),
        **({"LD_LIBRARY_PATH": libraries} if libraries else {}),
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        **dict.fromkeys(threads, "1"),
    }


def _last_line(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _MAX_TAIL_BYTES))
    lines = file.read(_MAX_TAIL_BYTES).decode("utf-8", errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _ending(report: Mapping[str, Any], said: str, *, is_proven: bool) -> ProgramEnd:
    ended, said = _outcome(report.get("exit_code", -int(signal.SIGKILL)), said, is_proven=is_proven)
    return ProgramEnd(ended, said, bool(report.get("is_apart")), bool(report.get("is_confined")))


def _outcome(exit_code: int | None, said: str, *, is_proven: bool) -> tuple[Ended, str]:
    if exit_code is None or exit_code == -int(signal.SIGXCPU):
        return "timed_out", said
    if exit_code < 0:
        return "killed", said
    if exit_code > 0 and said.startswith("MemoryError"):
        return "out_of_memory", said
    if exit_code > 0:
        return "wrong", said
    return ("right", said) if is_proven else ("wrong", _NO_PROOF)
