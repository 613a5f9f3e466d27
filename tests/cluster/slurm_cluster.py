"""A Slurm cluster of four nodes on this machine, in a directory of its own, without a trace after.

`python tests/cluster/slurm_cluster.py [DIRECTORY]` starts one for a person; a test session gets
one from the fixture `slurm`. Every daemon is a child that the kernel kills with its parent, and
each node is a process namespace, so a killed node takes its jobs along, as a power cut would.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

INSTALL = "install slurm-wlm munge (apt)"
NUM_NODES = 4
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "unshare")
_SEARCH_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
_NAMESPACES = ("--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc")
_SECONDS_TO_START = 300.0
_PORTS = (10_000, 32_000)  # below what the kernel gives to outgoing connections
_PR_SET_PDEATHSIG = 1

_SLURM_CONF = """\
ClusterName=redco{job_base}
FirstJobId={job_base}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
PropagateResourceLimits=NONE
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
SlurmdTimeout=60
MessageTimeout=10
TCPTimeout=5
KillWait=5
CompleteWait=0
InactiveLimit=0
MinJobAge={min_job_age}
MaxArraySize=11
Prolog={directory}/prolog
JobRequeue=1
AccountingStorageType=accounting_storage/none
"""
_NODE = (
    "NodeName={node} NodeAddr={node} NodeHostname={host} Port={port} CPUs=4 Sockets=1 "
    "CoresPerSocket=4 ThreadsPerCore=1 RealMemory=4000 Gres=gpu:h100:2\n"
)
_PARTITIONS = """\
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 \
PreemptMode=REQUEUE GraceTime=30
PartitionName=high Nodes={nodes} MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def missing_programs() -> list[str]:
    """Return the programs that a cluster needs and this machine has not."""
    return [name for name in _PROGRAMS if shutil.which(name, path=_SEARCH_PATH) is None]


class SlurmCluster:
    """One running cluster.

    Args:
        directory: everything of it; must be short, for it holds a socket.
        min_job_age: seconds that Slurm remembers an ended job.
    """

    def __init__(self, directory: Path, *, min_job_age: int = 300) -> None:
        self.directory = directory.absolute()
        self.nodes = [f"127.0.0.{11 + index}" for index in range(NUM_NODES)]
        self._min_job_age = min_job_age
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        """What finds the cluster: to be added to a process's environment."""
        return {"SLURM_CONF": str(self.directory / "slurm.conf")}

    def start(self) -> None:
        """Start every daemon and wait until all nodes are idle.

        Raises:
            RuntimeError: a daemon ended, or the nodes do not come up; has the logs' ends.
        """
        for name in ("munge", "state", "spool", "log"):
            (self.directory / name).mkdir(parents=True, mode=0o755)
        self._write_configuration()
        self._start_munge()
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        self.wait_until_idle()

    def wait_until_idle(self, seconds: float = _SECONDS_TO_START) -> None:
        """Wait until every node is up and no job is left.

        Raises:
            RuntimeError: it does not become so; has the logs' ends.
        """
        self.wait_for("every node is idle", lambda: self._idle_nodes() == set(self.nodes), seconds)

    def stop(self) -> None:
        """Kill every daemon, and with the nodes all that runs there."""
        for name in list(self._daemons):
            self._kill(name)

    def start_anew(self) -> None:
        """Stop, forget every job and node state, and start with the same environment."""
        self.stop()
        for entry in self.directory.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self.start()

    def start_controller(self) -> None:
        """Start slurmctld; with the state it left, if it ran before."""
        self._start("slurmctld", ["slurmctld", "-D"])

    def stop_controller(self) -> None:
        """End slurmctld; jobs do not notice.

        By SIGTERM: killed, it forgets the jobs of its last seconds, gives their ids to others, and
        drains the nodes where they still run.
        """
        self._daemons["slurmctld"].terminate()
        self._daemons.pop("slurmctld").wait(300)

    def kill_controller(self) -> None:
        """End slurmctld by SIGKILL, as its host's power cut would; see `stop_controller`."""
        self._kill("slurmctld")

    def start_node(self, node: str) -> None:
        """Start a node's slurmd in its own process namespace."""
        self._start(node, ["unshare", *_NAMESPACES, self._program("slurmd"), "-D", "-N", node])

    def kill_node(self, node: str) -> None:
        """End a node and everything on it at once, as a power cut would.

        The node is marked as down, which Slurm itself does only after a minute.
        """
        self._kill(node)
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=power")

    def break_node(self, node: str) -> None:
        """Have a node fail its health check (prolog) at the next job's start: Slurm drains it."""
        (self.directory / f"broken-{node}").touch()

    def mend_node(self, node: str) -> None:
        """Take `break_node` back."""
        (self.directory / f"broken-{node}").unlink()
        with contextlib.suppress(RuntimeError):  # nothing has started there
            self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")

    @contextlib.contextmanager
    def starts_nothing(self) -> Iterator[None]:
        """Running jobs go on; one that waits, or is queued again, waits to the end of this."""
        self.run("scontrol", "update", "PartitionName=main", "State=DOWN")
        try:
            yield
        finally:
            self.run("scontrol", "update", "PartitionName=main", "State=UP")

    def run(self, *command: str, seconds: float = 300.0) -> str:
        """Run one of Slurm's commands; return what it printed.

        Raises:
            RuntimeError: it failed; has its error output.
        """
        done = subprocess.run(
            [self._program(command[0]), *command[1:]],
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def jobs(self) -> dict[str, str]:
        """Return state by id of every job that has not ended."""
        lines = self.run("squeue", "--noheader", "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)

    def wait_for(
        self, what: str, holds: Callable[[], bool], seconds: float = _SECONDS_TO_START
    ) -> None:
        """Wait until something holds.

        Raises:
            RuntimeError: it does not in time, or a daemon ended meanwhile.
        """
        deadline = time.monotonic() + seconds
        while not holds():
            ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"not so: {what}; ended: {ended}\n{self.log_ends()}")
            time.sleep(0.05)

    def _write_configuration(self) -> None:
        host = socket.gethostname()
        controller_port, *node_ports = _free_ports(1 + NUM_NODES)
        text = _SLURM_CONF.format(
            job_base=int.from_bytes(os.urandom(2), "big") + 1000,
            host=host,
            controller_port=controller_port,
            user=_user_name(),
            directory=self.directory,
            min_job_age=self._min_job_age,
        )
        for node, port in zip(self.nodes, node_ports, strict=True):
            text += _NODE.format(node=node, host=host, port=port)
        text += _PARTITIONS.format(nodes=",".join(self.nodes))
        (self.directory / "slurm.conf").write_text(text)
        (self.directory / "cgroup.conf").write_text("CgroupAutomount=no\n")
        prolog = self.directory / "prolog"
        prolog.write_text(f'#!/bin/sh\n[ ! -e "{self.directory}/broken-$SLURMD_NODENAME" ]\n')
        prolog.chmod(0o755)
        # Slurm only counts what stands for a GPU here: any device files do.
        (self.directory / "gres.conf").write_text("Name=gpu Type=h100 File=/dev/null,/dev/zero\n")

    def _start_munge(self) -> None:
        folder = self.directory / "munge"
        key = folder / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {name: folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        self._start(
            "munged",
            [
                *("munged", "-F", "--force", f"--key-file={key}", f"--socket={files['socket']}"),
                *(f"--pid-file={files['pid']}", f"--log-file={files['log']}"),
                f"--seed-file={files['seed']}",
            ],
        )
        self.wait_for("munged listens", files["socket"].exists)

    def _start(self, name: str, command: list[str]) -> None:
        with (self.directory / "log" / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                [self._program(command[0]), *command[1:]],
                env=os.environ | self.environment | {"PATH": _SEARCH_PATH},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=_die_with_parent,
            )

    def _kill(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        if name in self.nodes:
            # The namespace's first process first: `unshare` then reaps it and ends by itself.
            for child in _children(daemon.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        else:
            daemon.kill()
        try:
            daemon.wait(5)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def _idle_nodes(self) -> set[str]:
        with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
            lines = self.run("sinfo", "-N", "-h", "-o", "%N %T").splitlines()
            return {line.split()[0] for line in lines if line.endswith(" idle")}
        return set()

    def log_ends(self) -> str:
        """Return the end of each daemon's log."""
        ends = []
        for path in sorted((self.directory / "log").iterdir()):
            ends.append(f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}")
        return "\n".join(ends)

    def _program(self, name: str) -> str:
        return shutil.which(name, path=_SEARCH_PATH) or name


@contextlib.contextmanager
def running_cluster(directory: Path | None = None, **options: int) -> Iterator[SlurmCluster]:
    """Start a cluster; stop it and remove its directory at the end."""
    folder = directory or Path(tempfile.mkdtemp(prefix="redco-slurm-"))
    folder.mkdir(exist_ok=True)
    cluster = SlurmCluster(folder, **options)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except FileNotFoundError:
        return []


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _free_ports(count: int) -> list[int]:
    """Free ports that no outgoing connection gets, so a restarted daemon has its own."""
    ports: set[int] = set()
    while len(ports) < count:
        port = random.randrange(*_PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            ports.add(port)
    return list(ports)


def _user_name() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def main() -> int:
    """Start a cluster, say how to use it, and keep it until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="slurm_cluster", description=__doc__.splitlines()[0])
    parser.add_argument("directory", nargs="?", type=Path, help="made, and removed at the end")
    options = parser.parse_args()
    if missing := missing_programs():
        sys.stderr.write(f"not here: {', '.join(missing)}; {INSTALL}\n")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with running_cluster(options.directory) as cluster, contextlib.suppress(KeyboardInterrupt):
        print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}")
        print(
            "# now, in another terminal: sinfo; redco-flow run pipelines/quickstart.yaml -p slurm"
        )
        print("# Ctrl-C here stops the cluster and every job on it", flush=True)
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
