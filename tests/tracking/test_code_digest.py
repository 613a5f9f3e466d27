import hashlib
import subprocess
import sys
import time
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from redco_flow.errors import UsageError
from redco_flow.tracking.code_digest import (
    code_record,
    digests_of,
    git_state,
    module_digests,
    read_script,
)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A function that writes modules into a folder on the path; names are unique to a test."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(**sources: str) -> Path:
        for name, source in sources.items():
            path = tmp_path / f"{name.replace('__', '/').replace('/init', '/__init__')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return tmp_path

    return write


def test_a_module_is_digested_by_its_bytes(project):
    project(alone="x = 1\n")

    assert module_digests(["alone"]) == {"alone": hashlib.sha256(b"x = 1\n").hexdigest()}


def test_imports_are_followed_to_the_end_in_every_form(project):
    project(
        pk1__init="",
        pk1__recipe="import pk1.a\nfrom pk1.b import thing\nfrom pk1 import c\n",
        pk1__a="from . import d\nfrom .e import thing\nimport json, numpy\n",
        pk1__b="",
        pk1__c="from .sub import deep\n",
        pk1__d="",
        pk1__e="",
        pk1__sub__init="from .. import f\n",
        pk1__sub__deep="from ..g import thing\nfrom ... import nothing\n",
        pk1__f="import pk1.recipe\n",
        pk1__g="",
        pk1__unused="",
    )

    names = [f"pk1.{name}" for name in ("a", "b", "c", "d", "e", "f", "g", "recipe")]
    assert list(module_digests(["pk1.recipe"])) == ["pk1", *names, "pk1.sub", "pk1.sub.deep"]


def test_a_script_has_the_modules_beside_it_and_what_the_project_has_elsewhere(project):
    folder = project(
        own4__init="",
        own4__parts="",
        bin__run="import argparse, numpy, nets\nfrom tools import deep\nfrom own4 import parts\n",
        bin__nets="from redco_flow import Trainer\n",
        bin__tools__init="",
        bin__tools__deep="",
        bin__unused="",
    )

    code = read_script(folder / "bin" / "run.py")

    names = ["nets.py", "run.py", "tools/__init__.py", "tools/deep.py"]
    assert sorted(code.files) == names
    assert [code.files[name] for name in names] == [folder / "bin" / name for name in names]
    assert {"own4", "own4.parts", "redco_flow.engine.trainer"} <= set(code.modules)
    assert all(name.split(".")[0] in ("own4", "redco_flow") for name in code.modules)


def test_a_module_beside_a_script_wins_over_one_of_its_name_elsewhere(project):
    folder = project(twin5="", bin5__run="import twin5\n", bin5__twin5="")

    assert sorted(read_script(folder / "bin5" / "run.py").files) == ["run.py", "twin5.py"]


def test_folders_without_init_and_compiled_modules_beside_a_script_are_its_own(project):
    folder = project(bin6__run="import quick6\nfrom parts6.one import x\n", bin6__parts6__one="")
    compiled = f"quick6{EXTENSION_SUFFIXES[0]}"
    (folder / "bin6" / compiled).touch()

    code = read_script(folder / "bin6" / "run.py")

    assert sorted(code.files) == ["parts6/one.py", compiled, "run.py"]


def test_a_compiled_module_wins_over_its_source_whose_imports_are_followed(project):
    folder = project(taker7="import quick7\n", quick7="import needed7\n", needed7="")
    (folder / f"quick7{EXTENSION_SUFFIXES[0]}").write_bytes(b"compiled")

    digests = module_digests(["taker7"])

    assert digests.keys() == {"needed7", "quick7", "taker7"}
    assert digests["quick7"] == hashlib.sha256(b"compiled").hexdigest()


def test_modules_that_are_not_installed_are_followed_from_other_folders_too(project, monkeypatch):
    folder = project(taker8="import far8.part, numpy\n", library8__far8__part="import near8\n")
    project(library8__far8__init="", library8__near8="")
    monkeypatch.syspath_prepend(str(folder / "library8"))

    assert list(module_digests(["taker8"])) == ["far8", "far8.part", "near8", "taker8"]

    # As after `pip install --target library8`; then only an own module there is followed.
    info = folder / "library8" / "far8-1.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text(
        "far8/__init__.py,,\nfar8/part.py,,\nfar8-1.0.dist-info/RECORD,,\n"
    )
    project(taker8="import far8.part, near8\n")
    assert list(module_digests(["taker8"])) == ["near8", "taker8"]


def test_an_imported_attribute_is_not_taken_for_a_module(project):
    project(pk2__init="", pk2__recipe="from pk2.a import b\n", pk2__a="b = 1\n", pk2__b="")

    assert list(module_digests(["pk2.recipe"])) == ["pk2", "pk2.a", "pk2.recipe"]


def test_imports_inside_functions_and_branches_are_followed(project):
    project(
        pk3__init="",
        pk3__recipe="""
import contextlib
class Recipe:
    def load(self):
        with contextlib.suppress(ValueError):
            for _ in ():
                import pk3.a
        try:
            import pk3.b
        except ImportError:
            import pk3.c
        else:
            import pk3.d
        finally:
            import pk3.e
        match 1:
            case 1:
                import pk3.f
        while False:
            pass
        else:
            import pk3.g
        if x: pass
        elif y:
            import pk3.h
""",
        **{f"pk3__{letter}": "" for letter in "abcdefgh"},
    )

    names = [f"pk3.{letter}" for letter in "abcdefgh"]
    assert list(module_digests(["pk3.recipe"])) == ["pk3", *names, "pk3.recipe"]


@pytest.mark.parametrize(
    "source",
    [
        '"""import this\nnext line"""\nfrom pk7 import a\n\ndef f(): ...\n',
        "from pk7 import (\na,\n)\n\ndef f(): ...\n",
        'from pk7 import a\ntext = """\nno more import\nhere"""\nx = 1\n',
        "x = 1\n\ndef f():\n    import pk7.a\n    return 1\n\n@f\ndef g(): ...\n",
        "from pk7 import a",
        "x = 1; import pk7.a; y = 2\nz = 3\n",
        "from pk7 \\\n    import a\nx = 1\n",
    ],
)
def test_imports_are_found_wherever_they_stand_in_the_file(project, source):
    project(pk7__init="", pk7__recipe=source, pk7__a="")

    assert list(module_digests(["pk7.recipe"])) == ["pk7", "pk7.a", "pk7.recipe"]


def test_imports_for_type_checkers_only_are_left_out(project):
    project(
        pk4__init="",
        pk4__recipe="""
import typing
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import pk4.a
    if True:
        import pk4.a2
else:
    import pk4.b
if typing.TYPE_CHECKING:
    from pk4 import c
if not TYPE_CHECKING:
    import pk4.d
else:
    import pk4.e
""",
        **{f"pk4__{name}": "" for name in ("a", "a2", "b", "c", "d", "e")},
    )

    assert list(module_digests(["pk4.recipe"])) == ["pk4", "pk4.b", "pk4.d", "pk4.recipe"]


def test_a_star_takes_every_submodule(project):
    project(pk5__init="", pk5__recipe="from pk5.sub import *\n")
    project(pk5__sub__init="__all__ = ['a', 'b']", pk5__sub__a="", pk5__sub__b="")

    names = ["pk5", "pk5.recipe", "pk5.sub", "pk5.sub.a", "pk5.sub.b"]
    assert list(module_digests(["pk5.recipe"])) == names


def test_names_that_a_package_imports_on_first_use_are_followed(project):
    project(
        pk6__init="""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from pk6.a import A
    from pk6.b import B
def __getattr__(name): ...
""",
        pk6__a="",
        pk6__b="",
        taker="from pk6 import A\n",
        user="import pk6\n",
    )

    assert list(module_digests(["taker"])) == ["pk6", "pk6.a", "taker"]
    assert list(module_digests(["user"])) == ["pk6", "pk6.a", "pk6.b", "user"]


def test_a_users_module_takes_the_engine_that_it_imports_from_redco_flow(project):
    project(my_recipe="def build():\n    from redco_flow import Trainer\n")

    digests = module_digests(["my_recipe"])

    assert "redco_flow.engine" in digests
    assert "my_recipe" in digests


def test_modules_beside_a_users_module_are_its_own(project):
    project(my_stage="import beside_it\nimport in_folder.part\n", beside_it="", unused_one="")
    project(in_folder__part="")  # a namespace package: no __init__.py

    assert list(module_digests(["my_stage"])) == ["beside_it", "in_folder.part", "my_stage"]


def test_what_only_decides_where_a_stage_runs_is_left_out(project):
    project(
        my_runner="""
import redco_flow.launch, redco_flow.cli, redco_flow.spec.model
from redco_flow import errors, stages
from redco_flow import records
from redco_flow.tracking.artifacts import Artifact
"""
    )

    assert list(module_digests(["my_runner"])) == ["my_runner", "redco_flow.stages"]


def test_nothing_that_is_digested_is_imported(project):
    folder = project(explodes="import explodes_too\nraise SystemExit('imported')\n")
    project(explodes_too="raise SystemExit('imported')\n")

    script = (
        "import sys; from redco_flow.tracking.code_digest import module_digests; "
        "print(list(module_digests(['explodes', 'redco_flow.stages']))); "
        "print('explodes' in sys.modules, 'redco_flow.stages' in sys.modules, 'jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines() == [
        "['explodes', 'explodes_too', 'redco_flow.stages']",
        "False False False",
    ]


def test_a_module_that_does_not_exist_is_named():
    for module in ("no_such_package.x", "redco_flow.no_such_module"):
        with pytest.raises(UsageError, match=f"module '{module}' cannot be found"):
            module_digests([module])


def test_a_named_module_that_is_not_python_is_refused_with_its_file(project):
    project(broken="import (\n")

    with pytest.raises(UsageError, match=r"broken\.py: is not Python"):
        module_digests(["broken"])

    project(taker9="import broken\n")
    assert list(module_digests(["taker9"])) == ["broken", "taker9"]


def test_sixty_modules_take_less_than_a_third_of_a_second(project):
    body = "".join(
        f"def function_{number}(values):\n"
        f"    total = sum(value * {number} for value in values if value > {number})\n"
        f"    return {{'total': total, 'mean': total / max(len(values), 1)}}\n\n"
        for number in range(40)
    )
    imports = "from big import m{next}\nimport json\nfrom big.m0 import function_1\n"
    project(big__init="")
    for number in range(60):
        project(**{f"big__m{number}": imports.format(next=(number + 1) % 60) + body})

    seconds = []
    for _ in range(3):  # of CPU time; the best of three
        start = time.thread_time()
        digests = module_digests(["big.m0"])
        seconds.append(time.thread_time() - start)

    assert len(digests) == 61
    assert digests_of(digests) == digests
    assert min(seconds) < 0.3


def _git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout


@pytest.fixture
def repository(tmp_path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    _git(folder, "init", "--quiet")
    (folder / "recipe.py").write_text("x = 1\n")
    _git(folder, "add", ".")
    _git(folder, "commit", "--quiet", "-m", "first")
    return folder


def test_a_clean_repository_is_its_commit(repository):
    state = git_state(repository)

    commit = _git(repository, "rev-parse", "HEAD").strip()
    assert state == {"commit": commit, "dirty": False, "patch": ""}
    assert code_record(state) == {"commit": commit, "dirty": False, "patch_digest": None}


def test_the_patch_of_a_dirty_repository_gives_the_code_that_ran(repository, tmp_path):
    _git(repository, "config", "color.ui", "always")
    _git(repository, "config", "diff.noprefix", "true")
    (repository / "recipe.py").write_text("x = 'é'\n")
    (repository / "folder").mkdir()
    (repository / "folder" / "new file.py").write_text("y = 2\n")
    (repository / "data.bin").write_bytes(b"\0" * 100)

    state = git_state(repository / "folder")

    assert state["dirty"]
    _git(tmp_path, "clone", "--quiet", "repository", "copy")
    (tmp_path / "patch").write_text(state["patch"])
    _git(tmp_path / "copy", "apply", "../patch")
    assert (tmp_path / "copy" / "recipe.py").read_text() == "x = 'é'\n"
    assert (tmp_path / "copy" / "folder" / "new file.py").read_text() == "y = 2\n"
    assert "data.bin" not in state["patch"]
    digest = hashlib.sha256(state["patch"].encode()).hexdigest()
    assert code_record(state)["patch_digest"] == digest


def test_a_directory_without_a_repository_or_a_commit_has_no_state(tmp_path):
    assert git_state(tmp_path) == {}
    _git(tmp_path, "init", "--quiet")
    assert git_state(tmp_path) == {}
    assert code_record({}) == {}


def test_asking_leaves_the_repository_as_it_was(repository):
    (repository / "recipe.py").write_text("x = 2\n")
    before = {path: path.stat().st_mtime_ns for path in (repository / ".git").rglob("*")}

    git_state(repository)

    after = {path: path.stat().st_mtime_ns for path in (repository / ".git").rglob("*")}
    assert after == before
