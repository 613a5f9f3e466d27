"""Random sequences of faults over runs and sweeps of a real Slurm, and what must hold after them.

`python tests/cluster/random_faults.py --seeds 0-199 --parallel 6 DIRECTORY` tries some, each
worker on a cluster and a small disk of its own (so only as root). A seed decides the pipeline, the
faults and their times; a failure prints them and leaves the files of its trial in DIRECTORY.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

HERE = Path(__file__).parent
KINDS = HERE.parent / "orchestrate" / "kinds"
if __name__ == "__main__":
    sys.path += [str(HERE), str(KINDS)]

import yaml  # noqa: E402
from faulty_commands import FaultyCommands  # noqa: E402
from slurm_cluster import running_cluster  # noqa: E402
from small_disk import fill, small_disk  # noqa: E402

from redco_flow.cli.view import read_run_view  # noqa: E402
from redco_flow.orchestrate.run.launcher import launcher_status  # noqa: E402
from redco_flow.tracking.locks import find_holder  # noqa: E402
from redco_flow.tracking.run_directory import list_runs  # noqa: E402
from redco_flow.tracking.sweep_directory import SweepDirectory  # noqa: E402
from redco_flow.tracking.workspace import Workspace  # noqa: E402

SECONDS_TO_END = 900.0  # Slurm misses a job that ended without its controller after 6 minutes
SECONDS_OF_A_COMMAND = 400.0
SECONDS_FOR_A_TARGET = 15.0
MOST_RESUMES = 6
_ENDED = ("completed", "failed", "cancelled")

_REFUSED = 'echo "sbatch: error: Batch job submission failed: {}" >&2; exit 1\n'
_TIMED_OUT = _REFUSED.format("Socket timed out on send/recv operation")
_SILENT = 'echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1\n'
COMMAND_FAULTS = {
    "sbatch is refused": ("sbatch", _TIMED_OUT),
    "sbatch is accepted and says refused": ("sbatch", f'"$real" "$@" > /dev/null; {_TIMED_OUT}'),
    "sbatch is accepted and prints no id": ("sbatch", '"$real" "$@" > /dev/null; exit 0\n'),
    "sbatch is accepted and killed": ("sbatch", '"$real" "$@" > /dev/null; kill -9 $$\n'),
    "sbatch is refused or accepted": (
        "sbatch",
        f'if [ $((RANDOM % 2)) = 0 ]; then "$real" "$@" > /dev/null; fi; {_TIMED_OUT}',
    ),
    "sbatch meets a limit": (
        "sbatch",
        'if [ "$(squeue --me --noheader | wc -l)" -ge 1 ]; then\n'
        'echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2\n'
        + _REFUSED.format("Job violates accounting/QOS policy (job submit limit)")
        + "fi\n",
    ),
    "squeue is empty": ("squeue", "exit 0\n"),
    "squeue fails": ("squeue", _SILENT),
    "squeue is cut": ("squeue", '"$real" "$@" | head -c $((RANDOM % 400)); exit 0\n'),
    "squeue leaves jobs out": (
        "squeue",
        '"$real" "$@" | awk "NR % 2 == $((RANDOM % 2))"; exit 0\n',
    ),
    "squeue prints nonsense": ("squeue", "head -c 300 /dev/urandom; exit 0\n"),
    "squeue does not answer": ("squeue", "sleep 40\n"),
    "sacct is empty": ("sacct", "exit 0\n"),
    "sacct prints nonsense": ("sacct", "head -c 300 /dev/urandom; exit 0\n"),
    "scancel fails": (
        "scancel",
        'echo "scancel: error: Kill job error: Unable to contact slurm controller" >&2; exit 1\n',
    ),
}
OTHER_FAULTS = (
    "kill_driver", "kill_driver", "detach_driver", "kill_supervisor", "kill_worker", "kill_script",
    "lose_node", "reboot_node", "requeue", "preempt", "terminate", "suspend", "hold", "scancel",
    "resume", "cancel", "run_again", "restart_controller", "crash_controller", "fill_disk",
)  # fmt: skip
# Words of a failure's message that name a fault.
CAUSES = {
    "kill_driver": "no job named",  # it was to submit the job again
    "detach_driver": "no job named",
    "kill_worker": "SIGKILL",
    "kill_supervisor": "SIGKILL|no word|no rank",
    "kill_script": "SIGKILL|Slurm says|no word|no rank|forgotten",
    "lose_node": "host went down|no word|NODE_FAIL|no rank",
    "reboot_node": "host went down|no word|NODE_FAIL|no rank",
    "scancel": "cancel",
    "cancel": "cancel",
    "crash_controller": "forgotten|no job named|cancel|no rank|no word",
    "preempt": "cancel|no word|wanted for another job",
    "fill_disk": "No space left|no word|no rank|full",
    "requeue": "no word",
    "restart_controller": "no rank",  # srun does not reach it
}
AFTER_ANOTHER_JOB = (
    "packed job ended before its turn|a job that it depends on did not complete"
    "|has no result in .*: it did not complete"
)


ENDS_OF_DRIVERS = {  # a job that drives a run has a script, too
    *("kill_driver", "detach_driver", "kill_script", "scancel", "cancel", "crash_controller"),
    "fill_disk",
}
ENDS_OF_JOBS = {
    *("kill_supervisor", "kill_worker", "kill_script", "lose_node", "reboot_node", "requeue"),
    *("preempt", "terminate", "scancel", "cancel", "crash_controller", "fill_disk"),
}


class Violation(AssertionError):
    """Something that must hold does not."""


class Trial:
    """One sequence of faults over the runs of one workspace.

    Args:
        shim: returns the library of a faulty file system by its name, for LD_PRELOAD.
        disk: a small one, for the workspace; None: it is never full.
        only: faults to draw from; None: all.
    """

    def __init__(self, seed, cluster, folder, shim, disk=None, only=None):
        self.random = random.Random(seed)
        self.seed = seed
        self.cluster = cluster
        self.folder = folder
        self.disk = disk
        self.workspace = Workspace((disk or folder) / "workspace")
        self.commands = FaultyCommands(folder / "slurm")
        self.since = time.monotonic()
        self.events = []
        self.injected = Counter()
        self.resumes = Counter()
        self.failures = {}
        self._undo = []
        self._background = []
        self._env = os.environ | {
            "PATH": self.commands.path,
            "PYTHONPATH": f"{HERE.parent.parent}{os.pathsep}{KINDS}",
            "REDCO_FLOW_HOME": str(folder / "home"),
            "REDCO_FLOW_WORKSPACE": str(self.workspace.root),
            **cluster.environment,
        }
        self._draw(shim, only or (*COMMAND_FAULTS, *OTHER_FAULTS))

    def _draw(self, shim, faults):
        """Draw the pipeline, how it is run, and the faults with their times."""
        draw = self.random
        self.is_sweep = draw.random() < 0.33
        self.launcher = "slurm" if not self.is_sweep and draw.random() < 0.2 else "local"
        file_system = draw.choices(["", "late_files", "node_locks"], [70, 15, 15])[0]
        if self.launcher != "local" and file_system == "late_files":
            file_system = ""
        is_grouped = draw.random() < 0.25
        options = [] if self.is_sweep or draw.random() < 0.5 else ["--ahead"]
        if self.is_sweep:
            values = ",".join(str(n) for n in range(1, draw.randint(4, 8) + 1))
            options += ["--sweep", f"b.value={values}", "--max-parallel", str(draw.randint(2, 4))]
            if draw.random() < 0.5 and not is_grouped:
                options += ["--points-per-job", str(draw.randint(2, 4))]
        else:
            options += ["--launcher", self.launcher]
        self._run_words = ["run", "pipeline.yaml", "-p", "profile.yaml", "--detach", *options]
        profile = {
            "executor": "slurm",
            "workspace": str(self.workspace.root),
            "grace_seconds": 5,
            "retries": {"failed": draw.randint(0, 2), "lost": draw.randint(0, 1)},
        }
        if file_system:
            late = {"LATE_FILES": "/exit.json:/result.json:/results/", "LATE_SECONDS": "8"}
            self._env |= {"LD_PRELOAD": shim(file_system), "FLOCK": "absent", **late}
        if file_system == "late_files":
            # Also of the job's shell: what its host has written, it sees at once.
            profile["slurm"] = {"options": ["--export=ALL,LD_PRELOAD="]}
        (self.folder / "profile.yaml").write_text(yaml.safe_dump(profile))
        (self.folder / "pipeline.yaml").write_text(yaml.safe_dump(self._pipeline(is_grouped)))
        self.faults = sorted(
            (round(draw.uniform(0, 20), 1), _draw_seconds(draw), draw.choice(list(faults)))
            for _ in range(draw.randint(3, 10))
        )
        self.note(f"seed {self.seed}: {' '.join(options)}, {file_system or 'no shim'}, {profile}")
        for at, seconds, fault in self.faults:
            self.note(f"planned at {at} for {seconds}: {fault}")

    def _pipeline(self, is_grouped):
        draw = self.random
        act = {"kind": "orchestrate_kinds.witness", "folder": str(self.folder)}
        links = {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"], "e": ["d"]}
        if self.is_sweep or draw.random() < 0.3:
            links = {"a": [], "b": ["a"], "c": ["b"]}
        stages = {}
        for name, metrics in links.items():
            milliseconds = draw.choice([10, 1000, 3000, 6000])
            stages[name] = {**act, "milliseconds": milliseconds}
            if metrics:
                stages[name]["metrics"] = metrics
        if is_grouped:
            last, before = list(links)[-1], list(links)[-2]
            stages[before]["group"] = stages[last]["group"] = "together"
        return {"name": "witnessed", "stages": stages}

    def note(self, text):
        """Add a line to the trial's events."""
        line = f"{time.monotonic() - self.since:6.1f} {text}"
        self.events.append(line)
        with (self.folder / "events").open("a") as file:
            file.write(line + "\n")

    def run(self):
        """Play the sequence, end the faults, and check what came of it.

        Raises:
            Violation: something does not hold.
        """
        self._start_run()
        self.since = time.monotonic()
        left = list(self.faults)
        while left or self._undo:
            now = time.monotonic() - self.since
            for one in [one for one in self._undo if one[0] <= now]:
                self._undo.remove(one)
                self._end_fault(*one[1:])
            for one in [one for one in left if one[0] <= now]:
                at, seconds, fault = one
                if self._inject(fault, now + seconds) or now - at > SECONDS_FOR_A_TARGET:
                    left.remove(one)
            self._note_failures()
            time.sleep(0.1)
        self.note("the faults end")
        self._mend()
        self._bring_to_end()
        self._check()

    def _inject(self, fault, until):
        """Return whether there was something that the fault could hit."""
        try:
            if fault in COMMAND_FAULTS:
                name, lines = COMMAND_FAULTS[fault]
                self.commands.inject(name, lines)
                found = "", lambda: self._repair(name, lines)
            else:
                found = getattr(self, f"_{fault}")()
        except (RuntimeError, LookupError, subprocess.TimeoutExpired):
            return False  # Slurm does not answer; the process or daemon has just ended
        if found is None:
            return False
        said, undo = found
        self.injected[fault] += 1
        self.note(f"fault: {fault} {said}")
        if undo:
            self._undo.append((until, fault, undo))
        return True

    def _end_fault(self, fault, undo):
        with suppress(RuntimeError):
            undo()
        self.note(f"ended: {fault}")

    def _repair(self, name, lines):
        path = self.commands.folder / f"{name}.fault"
        if path.exists() and path.read_text() == lines:
            self.commands.repair(name)

    def _mend(self, released=("launch failed",)):
        """Do what an administrator does: no node is drained, no job suspended, or held by a node.

        Slurm may hold one that has ended while its controller was down; it must then do nothing.

        Args:
            released: words of the reasons for which jobs are held that are to be released.
        """
        with suppress(RuntimeError):
            for line in self.cluster.run("sinfo", "-N", "-h", "-o", "%N %T").splitlines():
                node, state = line.split()
                if state.rstrip("*") in ("down", "drained", "draining"):
                    self.cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")
            for job, state in self.cluster.jobs().items():
                if state == "RUNNING" and self.injected["suspend"]:
                    # A killed controller may have forgotten the suspension; its node has not.
                    self.cluster.run("scontrol", "suspend", job)
                if state in ("RUNNING", "SUSPENDED"):
                    self.cluster.run("scontrol", "resume", job)
            held = self.cluster.run("squeue", "--noheader", "--format=%i %r").splitlines()
            held = [line for line in held if any(words in line for words in released)]
            for job in [line.split()[0] for line in held]:
                self.cluster.run("scontrol", "release", job)

    # Faults: each returns words for people, and what ends it.

    def _kill_driver(self):
        return self._signal_driver(signal.SIGKILL)

    def _detach_driver(self):
        return self._signal_driver(signal.SIGTERM)

    def _signal_driver(self, number):
        driven = [one for one in (*self._sweeps(), *self.runs()) if find_holder(one)]
        holders = sorted({(one.holder.pid, one.job) for one in map(find_holder, driven) if one})
        if not holders:
            return None
        pid, job = self.random.choice(holders)
        if job:  # it is in a namespace of its own
            pids = self._processes("run.orchestrator")
            pid = self.random.choice(pids) if pids else 0
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return f"{number.name} to {pid}{f' of job {job}' if job else ''}", None

    def _kill_supervisor(self):
        return self._kill("redco_flow.launch.rank")

    def _kill_worker(self):
        return self._kill("redco_flow.worker")

    def _kill_script(self):
        return self._kill("slurm_script")

    def _kill(self, program):
        pids = self._processes(program)
        if not pids:
            return None
        pid = self.random.choice(pids)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return f"{program} {pid}", None

    def _node(self):
        """A node, one with a job if there is one."""
        busy = self.cluster.run("squeue", "-h", "-t", "RUNNING", "-o", "%B").split()
        return self.random.choice(sorted(busy) or self.cluster.nodes)

    def _lose_node(self):
        node = self._node()
        self.cluster.kill_node(node)
        return node, lambda: self.cluster.start_node(node)

    def _reboot_node(self):
        node = self._node()
        self.cluster.kill_node(node)
        self.cluster.start_node(node)
        return node, None

    def _job(self, *states):
        """Return a job of ours in one of the states."""
        jobs = sorted(job for job, state in self.cluster.jobs().items() if state in states)
        return self.random.choice(jobs) if jobs else None

    def _requeue(self):
        if job := self._job("RUNNING"):
            self.cluster.run("scontrol", "requeue", job)
            return job, None
        return None

    def _terminate(self):
        if job := self._job("RUNNING"):
            self.cluster.run("scancel", "--signal=TERM", job)
            return job, None
        return None

    def _scancel(self):
        if job := self._job("RUNNING", "PENDING"):
            self.cluster.run("scancel", job)
            return job, None
        return None

    def _suspend(self):
        if job := self._job("RUNNING"):
            self.cluster.run("scontrol", "suspend", job)
            return job, lambda: self.cluster.run("scontrol", "resume", job)
        return None

    def _hold(self):
        if job := self._job("PENDING"):
            self.cluster.run("scontrol", "hold", job)
            return job, lambda: self.cluster.run("scontrol", "release", job)
        return None

    def _preempt(self):
        asked = ["--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null"]
        other = self.cluster.run("sbatch", "--parsable", *asked, "--wrap=sleep 60").strip()
        return other, lambda: self.cluster.run("scancel", other)

    def _restart_controller(self):
        self.cluster.stop_controller()
        return "", self.cluster.start_controller

    def _crash_controller(self):
        self.cluster.kill_controller()
        return "", self.cluster.start_controller

    def _fill_disk(self):
        if self.disk is None:
            return None
        ballast = self.disk / f"another-users-{self.injected['fill_disk']}"
        fill(ballast)
        return "", ballast.unlink

    def _resume(self):
        return self._in_background("resume", "--detach")

    def _cancel(self):
        return self._in_background("cancel")

    def _run_again(self):
        self._background.append((self._run_words, self._start(*self._run_words)))
        return "", None

    def _in_background(self, verb, *options):
        names = self._names()
        if not names:
            return None
        name = self.random.choice(names)
        words = [verb, name, *options]
        self._background.append((words, self._start(*words)))
        return name, None

    # What a user does and sees.

    def runs(self):
        """All runs of the workspace."""
        return sorted(list_runs(self.workspace), key=lambda run: run.id)

    def _sweeps(self):
        folder = self.workspace.root / "sweeps"
        paths = [one for one in sorted(folder.glob("*")) if (one / "sweep.json").exists()]
        return [SweepDirectory(path) for path in paths]

    def _names(self):
        """What a user resumes or cancels: sweeps, or runs where there are none."""
        return [one.id for one in (self._sweeps() if self.is_sweep else self.runs())]

    def _start(self, *words):
        with (self.folder / "commands").open("ab") as log:
            log.write(f"\n$ redco-flow {' '.join(words)}\n".encode())
            return subprocess.Popen(
                [sys.executable, "-m", "redco_flow.cli.main", *words],
                cwd=self.folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _start_run(self):
        if self._command(*self._run_words) != 0:
            raise RuntimeError((self.folder / "commands").read_text())

    def _command(self, *words):
        """Run a command of the user's; return its exit code."""
        process = self._start(*words)
        return self._wait(words, process)

    def _wait(self, words, process):
        try:
            code = process.wait(SECONDS_OF_A_COMMAND)
        except subprocess.TimeoutExpired:
            raise Violation(f"`{' '.join(words)}` does not end (pid {process.pid})") from None
        self.note(f"`redco-flow {' '.join(words)}` ended with {code}")
        return code

    def _processes(self, program=""):
        """The processes of this trial, wherever they run."""
        marks, found = [f"{one}/".encode() for one in (self.folder, self.disk) if one], []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if program.encode() not in command or int(entry.name) == os.getpid():
                    continue
                known = command + (entry / "environ").read_bytes()
                if any(mark in known for mark in marks):
                    found.append(int(entry.name))
        return sorted(found)

    def _bring_to_end(self):
        """Wait for all runs; resume what no process drives, as a user does."""
        for words, process in self._background:
            self._wait(words, process)
        deadline = time.monotonic() + SECONDS_TO_END
        while left := self._undriven():
            if time.monotonic() > deadline:
                raise Violation(f"runs do not end: {self._shown()}")
            for name in left:
                if name and self.resumes[name] >= MOST_RESUMES:
                    raise Violation(f"{name} is resumed again and again: {self._shown()}")
                if name:
                    self.resumes[name] += 1
                    self._command("resume", name, "--detach")
            self._note_failures()
            time.sleep(0.5)

    def _undriven(self):
        """What has not completed: "" for what goes on by itself, else the name to resume."""
        found = set()
        sweeps = {run.id: sweep for sweep in self._sweeps() for run in sweep.runs}
        for run in self.runs():
            state = run.read_state()["state"]
            if state == "completed":
                continue
            sweep = sweeps.get(run.id)
            launcher = launcher_status(run)
            is_driven = (
                find_holder(run)
                or (sweep is not None and find_holder(sweep))
                or (launcher is not None and not launcher.has_ended and state not in _ENDED)
            )
            found.add("" if is_driven else (sweep or run).id)
        return sorted(found)

    def _note_failures(self):
        """Keep what is said of each stage that has failed or was cancelled."""
        for run in self.runs():
            with suppress(OSError):
                for name, stage in run.read_state()["stages"].items():
                    if stage["state"] in ("failed", "cancelled"):
                        said = str(stage.get("message"))
                        key = (run.id, name, said)
                        if key not in self.failures:
                            self.failures[key] = stage["state"]
                            self.note(f"{run.id} {name} {stage['state']}: {said[:600]}")

    def _shown(self):
        return {run.id: run.read_state() for run in self.runs()}

    # What must hold.

    def _check(self):
        self._check_bodies()
        self._check_causes()
        self._wait_until("a job is left in the queue", lambda: not self.cluster.jobs())
        self._wait_until("a process is left", lambda: not self._processes())
        for run in self.runs():
            view = read_run_view(run)
            states = {stage["state"] for stage in view["stages"].values()}
            if (view["state"], view["exit_code"]) != ("completed", 0) or states != {"completed"}:
                raise Violation(f"status shows {view}")
        if self._command("status", self.runs()[0].id) != 0:
            raise Violation("status fails")

    def _wait_until(self, what, holds):
        deadline = time.monotonic() + SECONDS_TO_END
        while not holds():
            self._mend(("launch failed", "JobHeldAdmin"))  # nothing waits for it
            if time.monotonic() > deadline:
                jobs = self.cluster.run(
                    "squeue", "--noheader", "--Format=JobID,Name:80,State,Reason"
                )
                raise Violation(f"{what}:\n{jobs}\n{self._command_lines()}")
            time.sleep(0.5)

    def _command_lines(self):
        lines = {}
        for pid in self._processes():
            with suppress(OSError):
                text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                lines[pid] = text
        return lines

    def _check_bodies(self):
        """Every published result is of a body that ended; none ran beside or after it."""
        bodies = [json.loads(line) for line in (self.folder / "bodies.jsonl").open()]
        for body in bodies:
            if body.get("overlaps") or body.get("published"):
                raise Violation(f"a stage ran twice: {body}")
        ended = Counter(body["work"] for body in bodies if body["event"] == "ended")
        begun = Counter(body["work"] for body in bodies if body["event"] == "began")
        results = {path.stem for path in self.workspace.results.glob("*.json")}
        if {one[: len(next(iter(ended)))] for one in results} != set(ended):
            raise Violation(f"published {results}, ended {set(ended)}")
        self.note(f"bodies: {sum(begun.values())} of {len(begun)} results began")
        repeated = {work: count for work, count in ended.items() if count > 1}
        if repeated and not ENDS_OF_JOBS & {*self.injected}:
            raise Violation(f"ended more than once, before they were published: {repeated}")

    def _check_causes(self):
        """What failed did so by a fault, which its message names; only faults ended a driver."""
        if self.resumes and not self.failures and not ENDS_OF_DRIVERS & {*self.injected}:
            raise Violation(f"resumed without a cause: {self.resumes}")
        words = [CAUSES[fault] for fault in self.injected if fault in CAUSES]
        words += [AFTER_ANOTHER_JOB] if ENDS_OF_JOBS & {*self.injected} else []
        for (run, stage, said), state in [*self.failures.items(), *self._failed_attempts()]:
            if not any(re.search(word, said) for word in words):
                raise Violation(f"{run} {stage} {state} by no fault that was injected: {said}")

    def _failed_attempts(self):
        for run in self.runs():
            for stage in run.read_state()["stages"]:
                for attempt in run.attempts(stage):
                    if attempt.cause not in (None, "completed", "cancelled"):
                        yield (run.id, stage, attempt.read_exit().message), attempt.cause

    def end(self):
        """End what a failed trial leaves."""
        for _, undo in [one[1:] for one in self._undo]:
            with suppress(Exception):
                undo()
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(RuntimeError):
            for job in self.cluster.jobs():
                self.cluster.run("scancel", job)
            self._mend()


def _draw_seconds(draw):
    """For how long a fault lasts: some last longer than Slurm is given to answer again."""
    return round(draw.uniform(2, 15) if draw.random() < 0.8 else draw.uniform(30, 80), 1)


def try_seed(seed, cluster, folder, shim, disk=None, only=None):
    """Play one seed; return its trial and what does not hold, "" if all does."""
    cluster.wait_until_idle(120)
    trial = Trial(seed, cluster, folder, shim, disk, only)
    try:
        trial.run()
    except Violation as error:
        return trial, str(error)
    except Exception:
        return trial, traceback.format_exc()
    finally:
        trial.end()
    return trial, ""


def _try_seeds(seeds, directory, only):
    """Try seeds on a cluster of this process's own; print each outcome.

    Returns:
        The seeds that failed, and those that were not tried as the cluster was not idle.
    """
    failed, skipped = [], []
    disk = directory / f"disk-{seeds[0]}"
    # Nodes see only what was mounted before they were started.
    with small_disk(disk, 256 << 20), running_cluster() as cluster:
        os.environ |= cluster.environment
        for seed in seeds:
            folder = directory / f"seed-{seed}"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(disk / "workspace", ignore_errors=True)
            folder.mkdir(parents=True)
            began = time.monotonic()
            try:
                trial, problem = try_seed(
                    seed, cluster, folder, lambda name: str(directory / f"{name}.so"), disk, only
                )
            except RuntimeError as error:
                print(f"seed {seed}: the cluster is started again: {error}", flush=True)
                cluster.start_anew()
                skipped.append(seed)
                continue
            took = time.monotonic() - began
            resumed = sum(trial.resumes.values())
            print(
                f"seed {seed}: {'FAILED' if problem else 'ok'} {took:.0f} s, {resumed} resumes,"
                f" {dict(trial.injected)}",
                flush=True,
            )
            if problem:
                failed.append(seed)
                trial.note(f"FAILED: {problem}")
                print("\n".join(trial.events), flush=True)
                shutil.copytree(trial.workspace.root, folder / "workspace", dirs_exist_ok=True)
            else:
                shutil.rmtree(folder / "home", ignore_errors=True)
    return failed, skipped


def main():
    """Try the seeds; exit with 1 unless all of them were tried and hold."""
    parser = argparse.ArgumentParser(prog="random_faults", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="gets the files of the trials")
    parser.add_argument("--seeds", default="0-9", help="as 0-199, or 3,5")
    parser.add_argument("--parallel", type=int, default=1, help="clusters at once")
    parser.add_argument("--only", help="kinds of faults, as kill_driver,resume; otherwise all")
    options = parser.parse_args()
    seeds = []
    for part in options.seeds.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    directory = options.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    for source in (HERE.parent / "shims").glob("*.c"):
        library = directory / f"{source.stem}.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    only = options.only and options.only.split(",")
    shares = [seeds[n :: options.parallel] for n in range(min(options.parallel, len(seeds)))]
    with ProcessPoolExecutor(options.parallel, mp_context=get_context("spawn")) as pool:
        given = [pool.submit(_try_seeds, share, directory, only) for share in shares]
        outcomes = [one.result() for one in given]
    failed = sorted(seed for one, _ in outcomes for seed in one)
    skipped = sorted(seed for _, one in outcomes for seed in one)
    num_held = len(seeds) - len(failed) - len(skipped)
    print(f"{num_held} of {len(seeds)} seeds hold; failed: {failed}, not tried: {skipped}")
    return 1 if failed or skipped else 0


if __name__ == "__main__":
    sys.exit(main())
