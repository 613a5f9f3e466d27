"""Supervise one worker: start it, write its log, stop it, and write how it ended to exit.json.

`python -m redco_flow.launch.supervisor ATTEMPT_DIRECTORY` runs in the foreground, as a cluster's
job of one process; with `--ready-fd`, as the local executor starts it, it detaches and writes
job.json too. Owns logs/ and exit.json of the attempt. Imports little, so that it starts at
once and never fails for the worker's reasons; knows nothing of stages. Time here is monotonic.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from redco_flow.launch import disk_reserve
from redco_flow.launch.processes import READY, adopt_orphans, die_with_parent, kill_descendants
from redco_flow.launch.redaction import Redactor
from redco_flow.launch.worker_exit import OomCounters, WorkerExit, exit_record, host_memory_bytes
from redco_flow.records import change_mark, open_no_link, write_json
from redco_flow.spec.secrets import secret_values
from redco_flow.tracking.attempt import AttemptDirectory, Cause, ExitRecord
from redco_flow.tracking.process_identity import ProcessIdentity, utc_now

_TAIL_BYTES = 4096


class LogWriter:
    """One rank's log."""

    def __init__(self, path: Path, secrets: Iterable[bytes]) -> None:
        self.path = path
        self.tail = b""  # the last of what was shown
        self.problem: str | None = None
        self._redactor = Redactor(secrets)
        self._descriptor = open_no_link(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, chunk: bytes) -> None:
        """Append the process's next bytes."""
        self._append(self._redactor.feed(chunk))

    def note(self, text: str) -> None:
        """Append a line of our own, on a line of its own."""
        start = b"" if self.tail.endswith(b"\n") or not self.tail else b"\n"
        self._append(start + f"redco-flow: {text}\n".encode())

    def close(self) -> None:
        """Append what was held back; the stream has ended."""
        self._append(self._redactor.flush())
        os.close(self._descriptor)

    def _append(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-_TAIL_BYTES:]
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            self.problem = f"{self.path}: part of the log is lost: {error.strerror}."


_CHUNK_BYTES = 1 << 16
_SECONDS_FOR_STACKS = 1.0
_SECONDS_TO_DRAIN = 2.0
_SECONDS_WITHOUT_SAMPLES = 10.0  # a short stage is over before, and needs none

TIME_OVER = "its time (walltime_minutes) is over."


@dataclass(frozen=True)
class WorkerLimits:
    """Time limits of a worker: for silence, and for saving after a request to stop."""

    stall_seconds: float
    grace_seconds: float


@dataclass
class Supervisor:
    """The life of one worker; used once."""

    attempt: AttemptDirectory
    limits: WorkerLimits
    log: LogWriter
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _actions: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _stop_cause: Cause | None = None
    _stop_reason: str = ""
    _worker: int = 0
    _sampler: int = 0
    _wait_status: int | None = None
    _peak_memory_bytes: int = 0
    _progress: tuple[int, int] = (0, 0)
    _progress_at: float = 0.0

    def listen(self, handlers: Mapping[signal.Signals, Callable[[], None]]) -> None:
        """Take signals from here on; each handler is called in the loop, soon after its signal."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number, handler in handlers.items():
            signal.signal(number, lambda *_, act=handler: self.later(0.0, act))
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake the loop
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._selector.register(wake_read, selectors.EVENT_READ, lambda: self._drain(wake_read))

    def run(self, command: list[str]) -> WorkerExit:
        """Run the worker to its end and leave no process behind."""
        output = self._start(command)
        counters = OomCounters.of_process(self._worker)
        while self._wait_status is None:
            self._wait_for_events()
            self._reap()
            self._act()
        # Orphans come first: one that holds the pipe would keep the log open for ever.
        if self._sampler:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._sampler, signal.SIGKILL)
        # A driver that hangs holds up the sampler, but not the end of the job.
        left = kill_descendants(besides={self._sampler})
        if left:
            self.log.note(f"processes {left} do not die; they are stuck in the kernel.")
        self._read_rest(output)
        return WorkerExit(
            wait_status=self._wait_status,
            stop_cause=self._stop_cause,
            stop_reason=self._stop_reason,
            oom_kill=counters.growth(),
            peak_memory_bytes=self._peak_memory_bytes,
            host_memory_bytes=host_memory_bytes(),
            last_output=self.log.tail,
        )

    def _start(self, command: list[str]) -> int:
        output, worker_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(output, False)
        self._worker = _start_child(command, worker_end)
        os.close(worker_end)
        self._selector.register(output, selectors.EVENT_READ, lambda: self._read(output))
        self._progress_at = time.monotonic()
        self.later(0.0, self._check_progress)
        if self.attempt.rank == 0:
            self.later(_SECONDS_WITHOUT_SAMPLES, self._sample_system)
        return output

    def _sample_system(self) -> None:
        """Start the process that samples what the job uses; it ends when the worker does."""
        module, path = "redco_flow.launch.system_metrics", str(self.attempt.path)
        with contextlib.suppress(OSError):
            command = [sys.executable, "-P", "-m", module, path]
            self._sampler = _start_child(command, subprocess.DEVNULL)

    # Events

    def _wait_for_events(self) -> None:
        next_action = min((when for when, _ in self._actions), default=time.monotonic() + 60)
        timeout = max(0.0, next_action - time.monotonic())
        for key, _ in self._selector.select(timeout):
            key.data()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._sampler:
                    self._sampler = 0
                if pid == self._worker:
                    self._wait_status = status
                    self._peak_memory_bytes = usage.ru_maxrss * 1024

    def _read(self, output: int) -> bytes | None:
        """Move one chunk to the log; b"" at the end, None when there is nothing just now."""
        try:
            chunk = os.read(output, _CHUNK_BYTES)
        except BlockingIOError:
            return None
        self.log.write(chunk)
        if not chunk and output in self._selector.get_map():
            self._selector.unregister(output)
        return chunk

    def _read_rest(self, output: int) -> None:
        deadline = time.monotonic() + _SECONDS_TO_DRAIN
        while self._read(output) and time.monotonic() < deadline:
            pass

    @staticmethod
    def _drain(wake: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(wake, _CHUNK_BYTES)

    # Actions, each at its time

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something while the worker runs; dropped when it has ended."""
        self._actions.append((time.monotonic() + seconds, action))

    def _act(self) -> None:
        now = time.monotonic()
        due = [entry for entry in self._actions if entry[0] <= now]
        for entry in due:
            self._actions.remove(entry)
            if self._wait_status is None:
                entry[1]()

    def _check_progress(self) -> None:
        """Look whether progress.json changed; stop the worker that has been silent too long."""
        if self._stop_cause is not None:
            return
        seen = change_mark(self.attempt.progress_path)
        now = time.monotonic()
        if seen != self._progress:
            self._progress, self._progress_at = seen, now
        if now - self._progress_at >= self.limits.stall_seconds:
            self._stop_stalled()
        else:
            self.later(min(5.0, self.limits.stall_seconds / 10), self._check_progress)

    def _stop_stalled(self) -> None:
        self._stop_cause = Cause.STALLED
        self._stop_reason = (
            f"no progress for {self.limits.stall_seconds / 60:.3g} minutes "
            f"(stall_timeout_minutes in the profile); the stacks of all threads are in "
            f"{self.log.path}."
        )
        self._write_stacks()
        self.later(_SECONDS_FOR_STACKS, self._terminate)

    def _write_stacks(self) -> None:
        self.log.note(f"{self._stop_reason} Stopping the worker.")
        self._signal(signal.SIGUSR1)
        self._signal(signal.SIGCONT)  # a stopped process takes no other signal

    def stop(self, cause: Cause, reason: str) -> None:
        """Ask the worker to stop, and kill it when its grace is over; the first cause counts."""
        if self._stop_cause is None:
            self._stop_cause, self._stop_reason = cause, reason
            self._terminate()

    def stop_with_stacks(self, cause: Cause, reason: str) -> None:
        """Kill the worker once its threads' stacks are in the log; the first cause counts."""
        if self._stop_cause is None:
            self._stop_cause, self._stop_reason = cause, reason
            self._write_stacks()
        self.later(_SECONDS_FOR_STACKS, self._kill)

    @property
    def is_stopping(self) -> bool:
        """Whether the worker was asked to stop."""
        return self._stop_cause is not None

    def _terminate(self) -> None:
        self.log.note(f"asking the worker to stop; it has {self.limits.grace_seconds:g} s to save.")
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)
        self.later(self.limits.grace_seconds, self.kill_late)

    def kill_late(self) -> None:
        """Kill a worker that was asked to stop and has not."""
        self._stop_reason += " The worker did not stop in time and was killed."
        self._kill()

    def _kill(self) -> None:
        self.log.note("killing the worker and all that it started.")
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        # Not yet waited for, so this id cannot belong to anybody else.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._worker, number)


def _start_child(command: list[str], output: int) -> int:
    """Start a process that dies with this one; return its id, for which the caller waits."""
    supervisor = os.getpid()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        process_group=0,
        preexec_fn=lambda: die_with_parent(supervisor),  # safe: this process has one thread
    )
    process.returncode = 0  # it is waited for together with adopted orphans
    return process.pid


def main(arguments: list[str]) -> int:
    """Detach if asked to and say that the job exists, run it, say how it ended."""
    options = _parse(arguments)
    detaches = options.ready_fd is not None
    if detaches and os.fork() != 0:  # the submitter need not wait for us, nor see a zombie
        return 0
    attempt = AttemptDirectory(options.attempt)
    limits = WorkerLimits(options.stall_seconds, options.grace_seconds)
    log = LogWriter(attempt.log_path(0), secret_values(os.environ))
    supervisor = Supervisor(attempt, limits, log)
    supervisor.listen({signal.SIGTERM: lambda: _cancel(supervisor)})
    if options.walltime_seconds is not None:
        supervisor.later(
            options.walltime_seconds, lambda: supervisor.stop(Cause.TIMEOUT, TIME_OVER)
        )
    adopt_orphans()
    disk_reserve.take(attempt.path)
    if detaches:
        write_json(attempt.job_path, job_record(attempt, ProcessIdentity.current()))
        os.write(options.ready_fd, READY)
        os.close(options.ready_fd)
    record = run_worker(supervisor)
    remove_temporary_files(attempt)
    write_json(attempt.exit_path, record.to_json())
    return 0


def run_worker(supervisor: Supervisor) -> ExitRecord:
    """Run the attempt's worker to its end; return what exit.json shall hold, whatever happens."""
    attempt, log = supervisor.attempt, supervisor.log
    try:
        seen = supervisor.run(
            [sys.executable, "-P", "-m", "redco_flow.worker", str(attempt.call_path)]
        )
        record = exit_record(seen, attempt, utc_now())
    except Exception as error:  # noqa: BLE001 (whatever it is, the job must not be left unknown)
        traceback.print_exc()
        kill_descendants()
        message = f"the supervisor failed: {type(error).__name__}: {error}"
        record = ExitRecord(exit_code=None, cause=Cause.LOST, message=message, ended_at=utc_now())
    log.close()
    if log.problem:
        record = replace(record, message=f"{record.message} {log.problem}")
    return record


def _cancel(supervisor: Supervisor) -> None:
    """A first SIGTERM asks for a stop, a second one for a stop at once."""
    if supervisor.is_stopping:
        supervisor.kill_late()
    else:
        supervisor.stop(Cause.CANCELLED, "it was cancelled.")


def job_record(attempt: AttemptDirectory, supervisor: ProcessIdentity) -> dict[str, object]:
    """Return what job.json holds: enough to find the job again from any process."""
    return {
        "executor": "local",
        "job_id": f"{supervisor.pid}-{supervisor.start_time}",
        "attempt": str(attempt.path),
        "supervisor": supervisor.to_json(),
        "submitted_at": utc_now(),
    }


def parser_of(program: str) -> argparse.ArgumentParser:
    """Return a parser of what all programs take that supervise an attempt."""
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("attempt", type=Path)
    parser.add_argument("--stall-seconds", type=float, required=True)
    parser.add_argument("--grace-seconds", type=float, required=True)
    return parser


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of("redco_flow.launch.supervisor")
    parser.add_argument("--walltime-seconds", type=float)
    parser.add_argument("--ready-fd", type=int)
    return parser.parse_args(arguments)


def remove_temporary_files(attempt: AttemptDirectory) -> None:
    """Remove what a killed worker was writing when it died, and the disk reserves.

    What the launcher or a command writes stays: it may be about to rename it.
    """
    theirs = tuple(f".{path.name}." for path in (attempt.job_path, attempt.cancel_path))
    for path in attempt.path.glob(".*.tmp"):
        if not path.name.startswith(theirs):
            with contextlib.suppress(OSError):
                path.unlink()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
