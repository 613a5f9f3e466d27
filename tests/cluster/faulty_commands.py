"""Slurm's commands with injected faults: wrappers, first on PATH, that log each call."""

import os
import shutil

COMMANDS = ("sbatch", "squeue", "sacct", "scancel")
WRAPPER = """\
#!/bin/bash
folder={folder}
real={real}
echo "$*" >> "$folder/{name}.calls"
[ -e "$folder/{name}.fault" ] && . "$folder/{name}.fault"
exec "$real" "$@"
"""


class FaultyCommands:
    """The commands of one folder; each does what the real one does, unless it has a fault.

    Args:
        folder: has the wrappers in `bin`.
    """

    def __init__(self, folder):
        self.folder = folder
        self.path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        (folder / "bin").mkdir(parents=True)
        for name in COMMANDS:
            wrapper = folder / "bin" / name
            wrapper.write_text(WRAPPER.format(folder=folder, real=shutil.which(name), name=name))
            wrapper.chmod(0o755)

    def inject(self, name, lines):
        """Have a command run these lines of bash first; `exec "$real" "$@"` follows."""
        (self.folder / f"{name}.fault").write_text(lines)

    def repair(self, name):
        """Take a command's fault away."""
        (self.folder / f"{name}.fault").unlink()

    def calls(self, name):
        """Return the arguments of each call of a command."""
        path = self.folder / f"{name}.calls"
        return path.read_text().splitlines() if path.exists() else []
