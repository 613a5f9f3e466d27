"""What launching costs on the login node: CPU of every process but the jobs' own.

    python benchmarks/launch.py [--executor slurm] [--points 20] [--repeats 3]

Measures, with a script of one line: `redco-flow run`, the same again (everything is reused), and a
sweep; on Slurm also a function by submitit, in turns. Processes are sampled from /proc; those of
jobs are counted apart. Prints one JSON line last.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

PIPELINE = """\
name: launch
stages:
  work: {kind: script, path: work.py, arguments: {number: 0}}
"""
SUBMITIT = """\
import os, submitit
executor = submitit.SlurmExecutor("submitit")
executor.update_parameters(time=5)
assert executor.submit(os.getpid).result() > 0
"""
_TICKS = os.sysconf("SC_CLK_TCK")
_OF_JOBS = ("redco_flow.launch.supervisor", "redco_flow.worker", "work.py")


class Sampler:
    """CPU seconds and memory of all processes whose environment names a folder."""

    def __init__(self, folder: str) -> None:
        self._mark = f"REDCO_FLOW_WORKSPACE={folder}/workspace".encode()
        self._seen: dict[int, tuple[str, float, int]] = {}
        self._known: dict[int, str | None] = {}
        self._of_slurm: set[int] = set()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def cpu_seconds(self, *, of_jobs: bool) -> float:
        """The CPU seconds of the jobs' processes, or of all others."""
        return sum(cpu for kind, cpu, _ in self._seen.values() if (kind == "job") is of_jobs)

    def most_mib(self) -> float:
        """The largest resident memory of a process outside of jobs."""
        return max(kib for kind, _, kib in self._seen.values() if kind != "job") / 1024

    def _sample(self) -> None:
        while not self._done.wait(0.02):
            for name in filter(str.isdigit, os.listdir("/proc")):
                self._look(int(name))

    def _look(self, pid: int) -> None:
        try:
            kind = self._kind(pid)
            if kind is None:
                return
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            cpu = (int(stat[11]) + int(stat[12])) / _TICKS
            resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4
        except OSError:
            return
        before = self._seen.get(pid, ("", 0.0, 0))
        self._seen[pid] = (kind, max(cpu, before[1]), max(resident, before[2]))

    def _kind(self, pid: int) -> str | None:
        """Return job, login, or None for a process that is not ours."""
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        if self._known.get(pid) is None or line != self._known[pid]:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if self._mark not in environment:
                return None
            self._known[pid] = line
            self._of_slurm |= {pid} if b"SLURM_JOB_ID=" in environment else set()
        is_job = pid in self._of_slurm or any(word in line for word in _OF_JOBS)
        return "job" if is_job else "login"


def measure(words: list[str], folder: str) -> dict[str, float]:
    """Run Python with these words to its end and return what it cost."""
    environment = os.environ | {"REDCO_FLOW_WORKSPACE": f"{folder}/workspace"}
    command = [sys.executable, *words]
    start = time.perf_counter()
    with Sampler(folder) as sampler:
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE)
        wall = time.perf_counter() - start
        time.sleep(0.5)  # of the process that drives: notices, its end
    return {
        "wall": round(wall, 2),
        "cpu": round(sampler.cpu_seconds(of_jobs=False), 2),
        "cpu_of_jobs": round(sampler.cpu_seconds(of_jobs=True), 2),
        "mib": round(sampler.most_mib()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--executor", choices=["local", "slurm"], default="local")
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    figures: dict[str, list[dict[str, float]]] = {}
    numbers = ",".join(str(1 + one) for one in range(given.points))
    run = ["-m", "redco_flow.cli.main", "run", "launch.yaml", "--json", "-p", given.executor]
    sweep = ["--sweep", f"work.arguments.number={numbers}", "--max-parallel", str(given.parallel)]
    commands = {"run": run, "reuse": run, "sweep": [*run, *sweep]}
    if given.executor == "slurm":
        commands["submitit"] = ["-c", SUBMITIT]
    for _ in range(given.repeats):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["REDCO_FLOW_HOME"] = f"{folder}/home"
            (Path(folder) / "work.py").write_text("print('at work')\n")
            (Path(folder) / "launch.yaml").write_text(PIPELINE)
            for name, words in commands.items():
                figures.setdefault(name, []).append(measure(words, folder))
    for cost in figures["sweep"]:
        cost["cpu_per_point"] = cost["cpu"] / given.points
    medians = {
        name: {key: round(statistics.median(one[key] for one in costs), 2) for key in costs[0]}
        for name, costs in figures.items()
    }
    print(json.dumps({"points": given.points, **medians}))


if __name__ == "__main__":
    main()
