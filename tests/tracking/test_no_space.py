"""A full disk, one without inodes, and a quota: each error names the mount and what is used up."""

import errno
import shutil
import subprocess

import pytest

from redco_flow.records import explain_no_space, mount_of

FILL = """
import sys
from pathlib import Path
from redco_flow.records import explain_no_space, write_text
folder = Path(sys.argv[1])
try:
    for number in range(1000):
        write_text(folder / str(number), "x" * int(sys.argv[2]))
except OSError as error:
    print(explain_no_space(error))
"""
MOUNT = 'mount -t tmpfs -o size=256k,nr_inodes=16 tmpfs "$0" && exec "$@"'


@pytest.mark.parametrize(("num_bytes", "what"), [(1, "has no inode left"), (65536, "is full: ")])
def test_the_mount_and_what_ran_out_on_it_are_named(start_python, tmp_path, num_bytes, what):
    prefix = ("unshare", "--map-root-user", "--mount", "sh", "-c", MOUNT, str(tmp_path))
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"]).returncode:
        pytest.skip("no mount namespaces here: no small disk can be made")

    output, errors = start_python(FILL, tmp_path, num_bytes, prefix=prefix).communicate(timeout=400)

    assert output.startswith(f"The file system at {tmp_path} {what}"), errors


def test_a_quota_is_named_where_the_file_system_has_room(tmp_path):
    error = OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "missing"))

    said = explain_no_space(error)

    assert said.startswith(f"The file system at {mount_of(tmp_path)} has ")
    assert "a quota of user " in said
    assert "of bytes or of inodes: `quota -s`" in said
    assert not explain_no_space(OSError(errno.EACCES, "Permission denied", str(tmp_path)))
