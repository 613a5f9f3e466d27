"""What lets a test hold a stage where it wants it: a file to wait for, a file of executions."""

import os
import time
from pathlib import Path


def note_execution(executions, context):
    """Add a line for this execution: tests count them."""
    if executions:
        with open(executions, "a") as file:
            file.write(f"{context.stage} {context.attempt_dir.number} {os.getpid()}\n")


def pass_gate(gate, context):
    """Wait until the file is there, reporting progress, ending early when asked to."""
    step = 0
    while gate and not Path(gate).exists():
        step += 1
        context.report(phase="waiting", step=step)
        context.raise_if_stopped()
        time.sleep(0.05)
