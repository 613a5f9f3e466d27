"""Call a function of this package in a child process with limits of time, memory and answer size.

For what other people's files may make a process compute: recurrence rules, chat templates. The
child is this file, run by `python -I`: no module of the user takes a library's place, it gets no
secret from the environment, and it imports nothing but the standard library before the function's
own module, whose `prepare_child`, if there is one, runs before the limits hold. Arguments and
answers are JSON. Also: a limit on the time of an exchange over a network.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

_PASSED_VARIABLES = ("PATH", "HOME", "TMPDIR", "TZ", "LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH")
_PACKAGE = "redco_flow"
_INSTALLED = ("site-packages", "dist-packages")
_MODULE = f"{_PACKAGE}.bounded"  # as the child, this file is __main__
_NOT_STARTED = f"it did not start; is {__file__} still there?"
_SECONDS_TO_START = 120.0
_SECONDS_TO_SEARCH = 2.0
_WALL_SECONDS_PER_CPU_SECOND = 60.0  # a busy machine gives a process little of its time
_CHUNK_BYTES = 1 << 16
_MIB = 1 << 20

Result = TypeVar("Result")


class BoundedError(ValueError):
    """The function raised an error; the message is that error's."""


class LimitExceeded(BoundedError):
    """The function needed more time, memory or characters than it may."""


class _ChildEnded(LimitExceeded):
    """The child ended while it computed the answer."""


class BoundedProcess:
    """A child process that calls one function as often as it is asked, and starts when needed.

    A child that exceeds a limit is replaced by a new one at the next question. Threads may share
    it, and a forked process starts its own child. After an interruption (Ctrl-C) the child is
    replaced, too.

    Args:
        function: `redco_flow.module:name`; takes keyword arguments and returns JSON.
        seconds: of CPU time for one call; of wall time sixty times that.
        memory_mib: address space that calls may use beyond what the imports need.
        most_characters: of one answer, as JSON.
    """

    def __init__(
        self,
        function: str,
        *,
        seconds: float,
        memory_mib: int = 512,
        most_characters: int = 64 * _MIB,
    ) -> None:
        self._limits = [function, repr(seconds), str(memory_mib), str(most_characters)]
        self._seconds = seconds
        # By process: a thread may hold the lock while another one forks.
        self._locks: dict[int, threading.RLock] = {}
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._end: Callable[[], object] = lambda: None
        _all.add(self)

    def ask(self, **arguments: Any) -> Any:
        """Return what the function returns.

        Raises:
            LimitExceeded: it needs more than it may.
            BoundedError: it raised an error.
        """
        (answer,) = self.ask_many([arguments])
        if isinstance(answer, BoundedError):
            raise answer
        return answer

    def ask_many(self, questions: Sequence[Mapping[str, Any]], **common: Any) -> list[Any]:
        """Return the answer to each question, or the BoundedError in its place.

        Args:
            questions: arguments of one call each.
            common: arguments of all calls.

        Raises:
            TypeError, ValueError: an argument is not JSON.
        """
        texts, shared = [json.dumps(one) for one in questions], json.dumps(common)
        answers: list[Any] = []
        is_one_by_one = False  # until the question is found that ended a child
        with self._lock():
            while len(answers) < len(texts):
                end = len(answers) + 1 if is_one_by_one else len(texts)
                answers += self._answers(texts[len(answers) : end], shared)
                if len(answers) < end:
                    is_one_by_one = True
                elif isinstance(answers[-1], _ChildEnded):
                    is_one_by_one = False
        return answers

    def close(self) -> None:
        """End the child."""
        with self._lock():
            self._end()
            self._child = None

    def let_go(self) -> None:
        """Close, in a fork of its owner, the pipes to the child, which ends with its owner's."""
        if self._child is None or self._owner == os.getpid():
            return
        for pipe in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "rb") as nothing:
                assert pipe is not None
                os.dup2(nothing.fileno(), pipe.fileno(), inheritable=False)

    def _lock(self) -> threading.RLock:
        return self._locks.setdefault(os.getpid(), threading.RLock())

    def _answers(self, texts: Sequence[str], shared: str) -> list[Any]:
        """Return the answers that the child gave; where it ended at the only question, why."""
        try:
            return self._exchange(self._living_child(), texts, shared)
        except BaseException:  # Ctrl-C: the next question must not get this one's answer
            self.close()
            raise

    def _exchange(
        self, child: subprocess.Popen[bytes], texts: Sequence[str], shared: str
    ) -> list[Any]:
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the lines that follow find the reason
            child.stdin.write(f"[{shared},{','.join(texts)}]\n".encode())
            child.stdin.flush()
        lines = _Lines(child.stdout.fileno())
        answers: list[Any] = []
        for _ in texts:
            line = lines.next(self._seconds * _WALL_SECONDS_PER_CPU_SECOND)
            if line is None:
                reason = self._reason_of_end(child)
                self.close()
                return answers if len(texts) > 1 else [reason]
            answers.append(_answer_of(json.loads(line)))
        return answers

    def _living_child(self) -> subprocess.Popen[bytes]:
        is_ours = self._child is not None and self._owner == os.getpid()
        if is_ours and self._child is not None and self._child.poll() is None:
            return self._child
        if is_ours:
            self.close()
        child = _start(self._limits)
        self._child, self._owner = child, os.getpid()
        self._end = weakref.finalize(self, _end, child, os.getpid())
        assert child.stdout is not None
        line = _Lines(child.stdout.fileno()).next(_SECONDS_TO_START)
        problem = _NOT_STARTED if line is None else json.loads(line)
        if problem:
            self.close()
            raise BoundedError(f"the process that computes {self._limits[0]} failed: {problem}")
        return child

    def _reason_of_end(self, child: subprocess.Popen[bytes]) -> LimitExceeded:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(1.0)
        status = child.returncode
        if status is None or status == -signal.SIGPROF:
            return _ChildEnded(f"it needs more than {self._seconds:g} s of CPU time")
        return _ChildEnded(f"the process that computes it ended with status {status}")


def call(function: str, /, *, seconds: float, memory_mib: int = 512, **arguments: Any) -> Any:
    """Call a function once in a child process; see `BoundedProcess`.

    Raises:
        LimitExceeded: it needs more than it may.
        BoundedError: it raised an error.
    """
    process = BoundedProcess(function, seconds=seconds, memory_mib=memory_mib)
    try:
        return process.ask(**arguments)
    finally:
        process.close()


def search_problem(patterns: Sequence[str], texts: Sequence[str]) -> str | None:
    """Say why regular expressions cannot be searched in texts in time; None: they can.

    Some patterns take exponential time, and a thread in `re` cannot be stopped.
    """
    try:
        call(f"{_MODULE}:search_all", seconds=_SECONDS_TO_SEARCH, patterns=patterns, texts=texts)
    except BoundedError as error:
        return f"searching {', '.join(map(repr, patterns))} among {len(texts)} names: {error}"
    return None


def search_all(patterns: Sequence[str], texts: Sequence[str]) -> None:
    """Search each pattern in each text; called in the child."""
    for pattern in patterns:
        for text in texts:
            re.search(pattern, text)


def within(seconds: float, exchange: Callable[[], Result]) -> Result:
    """Return what an exchange over a network returns, if it ends in time.

    A server that sends a byte now and then never lets a socket's own timeout pass. The thread of
    an exchange that takes longer is left behind, and does not keep the process alive.

    Raises:
        TimeoutError: it takes longer.
        Exception: whatever the exchange raises.
    """
    done = threading.Event()
    results: list[Result] = []
    errors: list[BaseException] = []
    _started(exchange, results, errors, done)
    if not done.wait(seconds):
        raise TimeoutError(f"no complete answer within {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]


def while_growing(
    exchange: Callable[[], Result],
    num_bytes: Callable[[], int],
    *,
    bytes_per_second: float,
    seconds: float,
) -> Result:
    """Return what a download returns, if what it has written grows fast enough; see `within`.

    Args:
        num_bytes: how much is written by now.
        bytes_per_second: the least growth, on average over `seconds`.

    Raises:
        TimeoutError: it is slower.
        Exception: whatever the download raises.
    """
    done, present = threading.Event(), num_bytes()
    results: list[Result] = []
    errors: list[BaseException] = []
    _started(exchange, results, errors, done)
    while not done.wait(seconds):
        before, present = present, num_bytes()
        if present - before < bytes_per_second * seconds:
            raise TimeoutError(f"{present - before} bytes in {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]


def _started(
    exchange: Callable[[], Result],
    results: list[Result],
    errors: list[BaseException],
    done: threading.Event,
) -> None:
    """Start an exchange in a thread that may be left behind."""

    def run() -> None:
        try:
            results.append(exchange())
        except BaseException as error:  # noqa: BLE001 (raised by the caller's thread)
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=run, daemon=True, name="exchange").start()


_all: weakref.WeakSet[BoundedProcess] = weakref.WeakSet()


def _let_go_of_all() -> None:
    for one in list(_all):
        one.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)


class _Lines:
    """Lines of a pipe, each with a limit of time."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLIN)
        self._rest = b""

    def next(self, seconds: float) -> bytes | None:
        """Return the next line; None at the pipe's end, or where there is none in time."""
        line, found, rest = self._rest.partition(b"\n")
        if found:
            self._rest = rest
            return line
        chunks, deadline = [line], time.monotonic() + seconds
        while self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            chunk = os.read(self._descriptor, _CHUNK_BYTES)
            if not chunk:
                return None
            line, found, rest = chunk.partition(b"\n")
            chunks.append(line)
            if found:
                self._rest = rest
                return b"".join(chunks)
        return None


def _answer_of(message: Mapping[str, Any]) -> Any:
    if "limit" in message:
        return LimitExceeded(message["limit"])
    return BoundedError(message["error"]) if "error" in message else message["value"]


def _start(words: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = {key: os.environ[key] for key in _PASSED_VARIABLES if key in os.environ}
    # Of the user's, and of modules that a cluster puts on PYTHONPATH: `python -I` ignores both.
    folders = [path for path in sys.path if os.path.basename(path) in _INSTALLED]  # noqa: PTH119
    return subprocess.Popen(
        [sys.executable, "-I", "-B", __file__, *words, *folders],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env=environment,
        start_new_session=True,  # Ctrl-C is for the parent, whose end closes the pipe
    )


def _end(child: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a forked process: the child is its parent's
        return
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        with contextlib.suppress(OSError):
            assert pipe is not None
            pipe.close()


def _serve(
    function: str, seconds: str, memory_mib: str, most_characters: str, *folders: str
) -> None:
    """Be the child: import the function, then answer each line of questions."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not an answer
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    problem, call_function = "", None
    try:
        name, _, attribute = function.partition(":")
        if name.partition(".")[0] == _PACKAGE:
            _import_package()
        module = importlib.import_module(name)
        call_function = getattr(module, attribute)
        getattr(module, "prepare_child", lambda: None)()
    except Exception as error:  # noqa: BLE001 (reported by the parent)
        problem = f"{type(error).__name__}: {error}"
    _limit_resources(int(memory_mib))
    _write(answers, problem)
    parent = os.getppid()
    for line in sys.stdin.buffer:
        common, *questions = json.loads(line)
        for own in questions:
            if os.getppid() != parent:
                return  # nothing reads the answers
            # The kernel ends this process by SIGPROF when the CPU time is used up.
            signal.setitimer(signal.ITIMER_PROF, float(seconds))
            answer = _answer(call_function, {**common, **own}, memory_mib, int(most_characters))
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            answers.write(answer)
        answers.flush()


def _import_package() -> None:
    """Import the package that this file belongs to, which may not be the installed one."""
    folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    spec = importlib.util.spec_from_file_location(
        _PACKAGE,
        os.path.join(folder, "__init__.py"),
        submodule_search_locations=[folder],
    )
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


def _answer(
    function: Any, arguments: Mapping[str, Any], memory_mib: str, most_characters: int
) -> bytes:
    try:
        text = json.dumps({"value": function(**arguments)}, allow_nan=False)
        if len(text) <= most_characters:
            return f"{text}\n".encode()
        message = {"limit": f"its result has {len(text)} characters of at most {most_characters}"}
    except MemoryError:
        message = {"limit": f"it needs more than {memory_mib} MiB of memory"}
    except Exception as error:  # noqa: BLE001 (reported by the parent)
        message = {"error": str(error)[:2000] or type(error).__name__}
    return f"{json.dumps(message)}\n".encode()


def _limit_resources(memory_mib: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    most, allowed = used + memory_mib * _MIB, resource.getrlimit(resource.RLIMIT_AS)[1]
    if allowed != resource.RLIM_INFINITY:  # a job's own limit is the lower one
        most = min(most, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _write(answers: Any, value: Any) -> None:
    answers.write(f"{json.dumps(value)}\n".encode())
    answers.flush()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
