"""Sample what a job uses of its first host into system_metrics.jsonl, in a process of its own.

`python -m redco_flow.launch.system_metrics ATTEMPT_DIRECTORY` runs until it is killed. The
supervisor of the first rank starts it beside a worker that has run for a while, so a short stage
costs nothing, and does not wait for its end: a GPU driver that hangs holds up this process alone.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import psutil
import pynvml

from redco_flow.launch.call import read_call
from redco_flow.launch.processes import descendants
from redco_flow.records import open_no_link
from redco_flow.tracking.attempt import AttemptDirectory

if TYPE_CHECKING:
    from redco_flow.tracking.attempt import GpuSample, SystemSample

_SECONDS_BETWEEN_SAMPLES = 10.0
_SAMPLES_BEFORE_THEY_THIN_OUT = 1000  # a week then has 5,000 samples, of 200 bytes


class SystemMetrics:
    """Use of this host by the descendants of a supervisor.

    Args:
        environ: of the job: `CUDA_VISIBLE_DEVICES` hides GPUs. A Slurm job that asked for none and
            got none sees those of other jobs where the site does not hide them; they are left out.
    """

    def __init__(
        self, attempt: AttemptDirectory, environ: Mapping[str, str], supervisor: int
    ) -> None:
        self._attempt, self._supervisor = attempt, supervisor
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None and "SLURM_JOB_ID" in environ:
            has_gpus = read_call(attempt.call_path).resources.gpus_per_host > 0
            visible = None if has_gpus else ""
        self._gpus = dict(_find_gpus(visible))
        self._cpu_seconds: dict[int, float] = {}
        self._read_at = 0.0
        self.sample()  # what was used before counts in no sample

    def sample(self) -> SystemSample:
        """Return the present use; of the CPUs, the mean since the sample before."""
        cpu_seconds: dict[int, float] = {}
        memory_bytes = 0
        for pid in set(descendants(self._supervisor)) - {os.getpid()}:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                memory_bytes += process.memory_info().rss
                times = process.cpu_times()
                cpu_seconds[pid] = times.user + times.system
        used = sum(spent - self._cpu_seconds.get(pid, 0.0) for pid, spent in cpu_seconds.items())
        now = time.monotonic()
        cpu_cores = used / (now - self._read_at)
        self._cpu_seconds, self._read_at = cpu_seconds, now
        disk = os.statvfs(self._attempt.path)
        return {
            "time": time.time(),
            "cpu_cores": round(cpu_cores, 2),
            "memory_bytes": memory_bytes,
            "disk_free_bytes": disk.f_bavail * disk.f_frsize,
            "gpus": [_sample_gpu(index, gpu) for index, gpu in self._gpus.items()],
        }


def _find_gpus(visible: str | None) -> Iterator[tuple[int, Any]]:
    """Yield index and handle of each NVIDIA GPU that the job may use; none without a driver.

    The index is that of nvidia-smi: the order on the PCI bus, which is CUDA's too where all GPUs of
    the host are equal.
    """
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):  # one that is lost
                gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
                uuid = pynvml.nvmlDeviceGetUUID(gpu)
                if names is None or any(
                    name == str(index) or (name.startswith("GPU-") and uuid.startswith(name))
                    for name in names
                ):
                    yield index, gpu


def _sample_gpu(index: int, gpu: Any) -> GpuSample:
    sample: GpuSample = {"index": index}
    with contextlib.suppress(pynvml.NVMLError):  # not all drivers and parts of GPUs count both
        memory = pynvml.nvmlDeviceGetMemoryInfo(gpu)
        sample["memory_used_bytes"] = int(memory.used)
        sample["memory_total_bytes"] = int(memory.total)
    with contextlib.suppress(pynvml.NVMLError):
        sample["utilization_percent"] = int(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
    return sample


def main(arguments: list[str]) -> None:
    """Append a sample to the attempt's file at each interval, until this process is killed."""
    attempt = AttemptDirectory(Path(arguments[0]))
    metrics = SystemMetrics(attempt, os.environ, os.getppid())
    started_at = time.monotonic()
    while True:
        elapsed = time.monotonic() - started_at
        time.sleep(max(_SECONDS_BETWEEN_SAMPLES, elapsed / _SAMPLES_BEFORE_THEY_THIN_OUT))
        with contextlib.suppress(OSError):  # a full disk: a sample is not worth a job
            _append(attempt.system_metrics_path, orjson.dumps(metrics.sample()) + b"\n")


def _append(path: Path, line: bytes) -> None:
    """Append a line, on a line of its own where one before was not written whole."""
    with open(path, "ab+", buffering=0, opener=open_no_link) as file:
        if size := file.seek(0, os.SEEK_END):
            file.seek(size - 1)
            line = line if file.read(1) == b"\n" else b"\n" + line
        file.write(line)


if __name__ == "__main__":
    main(sys.argv[1:])
