import os
import subprocess
from dataclasses import replace

import pytest

from redco_flow.tracking.process_identity import ProcessIdentity

WAIT_FOR_STDIN = "import sys; print('ready', flush=True); sys.stdin.read()"


def test_this_process_is_alive():
    assert ProcessIdentity.current().is_alive()
    assert ProcessIdentity.current() == ProcessIdentity.of(os.getpid())


def test_an_ended_process_is_not_alive_even_before_it_is_reaped(start_python):
    process = start_python(WAIT_FOR_STDIN)
    process.stdout.readline()
    identity = ProcessIdentity.of(process.pid)
    assert identity.is_alive()

    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie: ended, not reaped

    assert not identity.is_alive()
    process.wait()
    assert not identity.is_alive()


def test_another_process_with_the_same_pid_is_not_the_same_process():
    earlier = replace(ProcessIdentity.current(), start_time=1)

    assert not earlier.is_alive()


def test_a_process_of_an_earlier_boot_of_this_host_is_not_alive():
    assert not replace(ProcessIdentity.current(), boot_id="an-earlier-boot").is_alive()


def test_a_process_of_another_host_counts_as_alive():
    elsewhere = ProcessIdentity(pid=1, start_time=1, boot_id="other", host="other-host")

    assert elsewhere.is_alive()
    assert not replace(elsewhere, pid=os.getpid()).is_running_here()


def test_a_process_in_another_pid_namespace_may_be_alive_until_the_next_boot_but_never_here():
    """As in a container, or a node of the tests' cluster: its pid is another process's here."""
    elsewhere = replace(ProcessIdentity.current(), pid_namespace="1")

    assert elsewhere.may_be_alive()
    assert not elsewhere.is_alive()
    assert not elsewhere.is_running_here()
    assert not replace(elsewhere, boot_id="an-earlier-boot").may_be_alive()
    assert ProcessIdentity.current().is_running_here()


def test_a_command_with_spaces_and_parentheses_is_read_right(tmp_path):
    program = tmp_path / "a) Z 1 (b"
    program.symlink_to("/bin/cat")
    process = subprocess.Popen([program], stdin=subprocess.PIPE)
    try:
        assert ProcessIdentity.of(process.pid).is_alive()
    finally:
        process.communicate()


def test_identities_survive_json():
    identity = ProcessIdentity.current()

    assert ProcessIdentity.from_json(identity.to_json()) == identity


def test_a_record_that_is_no_identity_is_refused():
    with pytest.raises(ValueError, match="start_time"):
        ProcessIdentity.from_json({"pid": 1})


def test_asking_for_a_process_that_does_not_run_is_an_error():
    with pytest.raises(ProcessLookupError, match="no process"):
        ProcessIdentity.of(2**22 + 1)  # above the kernel's largest pid
