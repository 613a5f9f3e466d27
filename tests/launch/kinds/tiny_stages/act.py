"""A stage that does one thing, good or bad, as its config says."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from redco_flow.runtime.context import Output, StageOutputs
from redco_flow.spec.stage_kind import InputSlot, StageConfig

INPUTS = {"dataset": InputSlot(kind="dataset")}
OUTPUTS = {"dataset": "dataset"}


class Config(StageConfig):
    action: str = "write"
    text: str = "hello"
    folder: str = ""


def run(context, config):
    path = context.work_dir / "text.txt"
    path.write_text(config.text)
    whole = StageOutputs({"dataset": Output("dataset", path)}, {"length": len(config.text)})
    change = globals()[config.action](context, config)
    return change(whole, path) if change else whole


def write(context, config):
    context.report(phase="writing", step=1, total_steps=1, loss=float("nan"))
    context.log_metrics({"step": 1, "loss": 0.5})


def count_starts(context, config):
    with open(Path(config.folder) / "starts", "a") as file:
        file.write("x")


def wait_for_go(context, config):
    """Run until the file `go` appears."""
    count_starts(context, config)
    while not (Path(config.folder) / "go").exists():
        context.report(phase="waiting")
        time.sleep(0.01)


def use_a_fifth_of_a_core_until_go(context, config):
    held = bytearray(os.urandom(1 << 20) * 300)
    while not (Path(config.folder) / "go").exists():
        start = time.process_time()
        while time.process_time() - start < 0.01:
            pass
        time.sleep(0.04)
    assert held


def hang(context, config):
    context.report(phase="hanging")
    threading.Event().wait()


def save_when_stopped(context, config):
    context.stop_requested()  # from here on the stage is asked, not interrupted
    context.report(phase="training")
    while not context.stop_requested():
        time.sleep(0.01)
    (Path(config.folder) / "saved").write_text("")
    context.raise_if_stopped()


def note_process(context, config):
    """Write which process this is, in JAX's words."""
    import jax

    index = jax.process_index()
    local = os.environ["REDCO_FLOW_LOCAL_RANK"]
    text = f"{index} of {jax.process_count()}, {len(jax.devices())} devices, {local} on its host"
    (Path(config.folder) / f"{index}.noted").write_text(text)
    (Path(config.folder) / f"{index}.shares").write_text(str(context.shares_disk))


def raise_on_rank_one(context, config):
    if os.environ["REDCO_FLOW_RANK"] == "1":
        raise RuntimeError("only rank 1 does this")
    hang(context, config)


def save_beside_a_child(context, config):
    """Save whether a helper, which expects no signals, is alive when the stage is to stop."""
    child = subprocess.Popen(["sleep", "600"])
    context.stop_requested()
    context.report(phase="training")
    while not context.stop_requested():
        time.sleep(0.01)
    (Path(config.folder) / "saved").write_text(
        "the child lives" if child.poll() is None else "the child is dead"
    )
    context.raise_if_stopped()


def finish_if_saved(context, config):
    """Save and stop as asked; where that was done before, go on to the end."""
    if (Path(config.folder) / "saved").exists():
        context.report(phase="resumed")
    else:
        save_when_stopped(context, config)


def save_slowly(context, config):
    """Stopped, save more than the grace has time for; started again, say what is there whole."""
    import jax.numpy as jnp

    from redco_flow.engine.checkpoint.checkpointer import Checkpointer

    with Checkpointer(context.work_dir / "checkpoints") as checkpointer:
        if has_restored(checkpointer, config):
            return
        checkpointer.save(1, {"params": {"w": jnp.ones(4)}}, cursor={})
        checkpointer.wait()
        gigabyte = {"params": {"w": jnp.ones(1 << 28).block_until_ready()}}
        context.stop_requested()
        context.report(phase="training")
        while not context.stop_requested():
            time.sleep(0.01)
        checkpointer.save(2, gigabyte, cursor={})
        checkpointer.wait()
        (Path(config.folder) / "saved").touch()


def save_twice(context, config):
    """Log and save, once more when `again` stands, and hang; started again, say what is there."""
    import jax.numpy as jnp

    from redco_flow.engine.checkpoint.checkpointer import Checkpointer

    with Checkpointer(context.work_dir / "checkpoints") as checkpointer:
        if has_restored(checkpointer, config):
            return
        for step in (1, 2):
            checkpointer.save(step, {"params": {"w": jnp.ones(4)}}, cursor={})
            checkpointer.wait()
            context.log_metrics({"step": step, "loss": 1 / step})
            print(f"saved step {step}")
            (Path(config.folder) / f"saved-{step}").touch()
            while step == 1 and not (Path(config.folder) / "again").exists():
                time.sleep(0.01)
    hang(context, config)


def save_twice_or_list(context, config):
    """Save as `save_twice`; started again, say which checkpoints stand where this process is."""
    import jax

    found = context.work_dir.glob("checkpoints/*/commit.json")
    steps = sorted(int(path.parent.name) for path in found)
    if not steps:
        save_twice(context, config)
    path = Path(config.folder) / f"checkpoints-of-{jax.process_index()}.json"
    path.write_text(json.dumps(steps))


def has_restored(checkpointer, config):
    """Write down what the last checkpoint holds, if there is one."""
    import jax.numpy as jnp

    if checkpointer.latest() is None:
        return False
    state, commit = checkpointer.restore(like={"params": {"w": jnp.zeros(4)}})
    found = {"step": commit.step, "w": state["params"]["w"].tolist()}
    (Path(config.folder) / "restored.json").write_text(json.dumps(found))
    return True


def ignore_termination(context, config):
    """Refuse to stop, as do a child and its child, which left for a session of its own."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    program = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "depth, folder = int(sys.argv[1]), sys.argv[2]\n"
        "if depth: subprocess.Popen([sys.executable, '-S', '-c', sys.argv[3],"
        " str(depth - 1), folder, sys.argv[3]], start_new_session=True)\n"
        "open(f'{folder}/{os.getpid()}.pid', 'w').close()\n"
        "if depth: sys.exit()\n"
        "time.sleep(600)\n"
    )
    child = [sys.executable, "-S", "-c", program, "1", config.folder, program]
    subprocess.Popen(child)
    hang(context, config)


def leave_a_child_behind(context, config):
    child = subprocess.Popen(["sleep", "600"])
    (Path(config.folder) / f"{child.pid}.pid").touch()


def print_secret(context, config):
    secret = os.environ["TINY_API_TOKEN"]
    for half in ("a " + secret[:7], secret[7:] + " z\n"):
        sys.stdout.write(half)
        sys.stdout.flush()
        time.sleep(0.1)  # two writes, so that the supervisor reads them apart
    sys.stdout.write("x" * (65536 - 5) + secret + "\n")
    raise RuntimeError(f"the server refused {secret}")


def print_fifty_megabytes(context, config):
    chunk = b"\xff\xfe\x00" + b"y" * (1 << 20)
    for _ in range(50):
        os.write(1, chunk)
    wait_for_go(context, config)


def exhaust_files(context, config):
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    kept = []
    while True:
        kept.append(os.open(os.devnull, os.O_RDONLY))


def exhaust_memory(context, config):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
    bytearray(1 << 30)


def fill_memory(context, config):
    bytearray(b"x") * (1 << 30)


def fill_disk(context, config):
    with (context.work_dir / "big").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def raise_beside_a_running_thread(context, config):
    threading.Thread(target=threading.Event().wait).start()
    raise ValueError("the loss went away")


class UnprintableError(Exception):
    def __str__(self):
        raise RuntimeError


def raise_unprintable(context, config):
    threading.Thread(target=threading.Event().wait).start()
    raise UnprintableError


def return_odd_metadata(context, config):
    return lambda whole, path: StageOutputs({"dataset": Output("dataset", path, {"a": path})})


def return_secret_metadata(context, config):
    secret = os.environ["OWN_API_KEY"]
    context.report(devices=f"2 x {secret}")
    return lambda whole, path: StageOutputs(
        {"dataset": Output("dataset", path, {"by": f"me, {secret}", "rows": 3})}, {secret: 1.0}
    )


def return_nan(context, config):
    return lambda whole, path: StageOutputs(whole.outputs, {"rouge2": float("nan")})


def return_extra_output(context, config):
    return lambda whole, path: StageOutputs({**whole.outputs, "more": Output("more", path)})


def return_nothing(context, config):
    return lambda whole, path: None


def return_other_kind(context, config):
    return lambda whole, path: StageOutputs({"dataset": Output("checkpoint", path)})


def return_missing_file(context, config):
    return lambda whole, path: StageOutputs({"dataset": Output("dataset", path / "gone")})


def show_environment(context, config):
    shown = {name: os.environ.get(name) for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    shown["jax_is_imported"] = "jax" in sys.modules
    (Path(config.folder) / "environment.json").write_text(json.dumps(shown))


def note_inputs(context, config):
    artifact = context.input("dataset")
    noted = {"id": artifact.id, "files": sorted(os.listdir(artifact.path))}
    (Path(config.folder) / "inputs.json").write_text(json.dumps(noted))
