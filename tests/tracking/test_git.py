"""What a repository's own configuration may make git run: nothing."""

import subprocess

import pytest

from redco_flow.git import run_git
from redco_flow.launch.hosts.code_snapshot import _tracked
from redco_flow.tracking.code_digest import git_state


@pytest.fixture
def hostile(tmp_path):
    """A repository that was unpacked: its configuration notes each command that it starts."""
    folder = tmp_path / "repository"
    folder.mkdir()

    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
            cwd=folder,
            check=True,
            capture_output=True,
        )

    git("init", "-b", "main")
    (folder / "code.py").write_text("one = 1\n")
    git("add", ".")
    git("commit", "-m", "first")
    (folder / ".gitattributes").write_text("*.py filter=evil.sub diff=evil\n")
    for key in (
        "core.fsmonitor",
        "core.sshCommand",
        "core.pager",
        "diff.external",
        "diff.evil.command",
        "diff.evil.textconv",
        "filter.evil.sub.clean",
        "filter.evil.sub.smudge",
        "alias.status",
    ):
        git("config", key, f"echo {key} >> {tmp_path / 'EXECUTED'}; cat; false")
    git("config", "filter.evil.sub.required", "true")
    hook = folder / ".git" / "hooks" / "post-index-change"
    hook.write_text(f"#!/bin/sh\necho hook >> {tmp_path / 'EXECUTED'}\n")
    hook.chmod(0o755)
    (folder / "code.py").write_text("one = 2\n")
    return folder


def test_no_command_of_a_repository_is_run(hostile):
    state = git_state(hostile)
    listed = _tracked(hostile)

    assert not (hostile.parent / "EXECUTED").exists()
    assert state["dirty"]
    assert "+one = 2" in state["patch"]
    assert listed == [hostile / "code.py"]


def test_a_filter_that_the_user_has_configured_for_all_repositories_stays(hostile, monkeypatch):
    """Git LFS is one: without it every large file would be another."""
    home = hostile.parent / "home"
    home.mkdir()
    (home / ".gitconfig").write_text('[filter "own"]\n\tclean = sed s/2/1/\n')
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (hostile / ".gitattributes").write_text("*.py filter=own\n")

    done = run_git(hostile, "diff", "--no-ext-diff", "--no-textconv", "--", "code.py")

    assert (done.returncode, done.stdout) == (0, b"")
