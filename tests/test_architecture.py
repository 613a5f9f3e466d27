"""ARCHITECTURE.md and docs/design name files and objects that exist; walks follow imports."""

import re

import pytest

from tests.test_imports import PACKAGE, imports, modules

PROJECT = PACKAGE.parent
ARCHITECTURE = PROJECT / "ARCHITECTURE.md"

if not ARCHITECTURE.is_file():
    pytest.skip("no ARCHITECTURE.md next to the tests: not a checkout", allow_module_level=True)

DESIGN = sorted((PROJECT / "docs" / "design").glob("*.md"))
FILE = re.compile(r"`([\w/]+\.py)`")
DOTTED = re.compile(r"`([a-z_]\w*(?:\.\w+)+)`")


def section(title):
    _, _, rest = ARCHITECTURE.read_text().partition(f"\n## {title}\n")
    return rest.partition("\n## ")[0]


def walks():
    """Each question, and its files as segments between which nothing is imported."""
    for item in section("Walks").split("\n- ")[1:]:
        question, _, answer = item.partition("?**")
        yield question.strip("*"), [FILE.findall(part) for part in answer.split("‖")]


def module_of(file):
    return "redco_flow." + file.removesuffix(".py").replace("/", ".")


def gaps(segments, graph):
    """Yield a sentence for each file of a walk that no file before it leads to."""
    for files in segments:
        for at, file in enumerate(files):
            before = [module_of(one) for one in files[:at]]
            reached = {target for one in before for target in graph.get(one, ())}
            reached |= {target for one in reached for target in graph[one]}
            if module_of(file) not in graph:
                yield f"redco_flow/{file} does not exist"
            elif before and module_of(file) not in reached:
                yield (
                    f"{file} is imported by none of {', '.join(files[:at])}, nor by a module that "
                    "they import: correct the order, name the file in between, or write ‖ before it"
                )


@pytest.fixture(scope="module")
def graph():
    known = modules()
    return {name: set(imports(path, known)) - {name} for name, path in known.items()}


def test_a_gap_in_a_walk_is_found():
    graph = {"redco_flow.a": {"redco_flow.b"}, "redco_flow.b": {"redco_flow.c"}}
    graph |= {"redco_flow.c": {"redco_flow.d"}, "redco_flow.d": set()}

    assert list(gaps([["a.py", "b.py", "d.py"], ["a.py", "c.py"]], graph)) == []
    assert [text[:4] for text in gaps([["a.py", "d.py"]], graph)] == ["d.py"]
    assert list(gaps([["e.py"]], graph)) == ["redco_flow/e.py does not exist"]


@pytest.mark.parametrize("walk", walks(), ids=lambda walk: walk[0])
def test_the_files_of_a_walk_import_one_another_in_this_order(walk, graph):
    question, segments = walk

    assert 4 <= sum(map(len, segments)) <= 14
    assert list(gaps(segments, graph)) == [], f"ARCHITECTURE.md, walk {question!r}"


def test_there_are_eight_walks_twenty_one_files_to_read_and_at_most_150_lines():
    to_read = FILE.findall(section("Read these, in this order"))

    assert len(list(walks())) >= 8
    assert len(set(to_read)) == 21
    assert [file for file in to_read if not (PACKAGE / file).is_file()] == []
    assert len(ARCHITECTURE.read_text().splitlines()) <= 150


def exists(name):
    """Whether a dotted name is a module of the package, or occurs in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        path = PACKAGE.joinpath(*parts[:count])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                text = file.read_text()
                return all(re.search(rf"\b{word}\b", text) for word in parts[count:])
    return False


@pytest.mark.parametrize("page", [ARCHITECTURE, *DESIGN], ids=lambda page: page.name)
def test_each_dotted_name_of_the_package_exists(page):
    packages = {path.stem for path in PACKAGE.iterdir()}
    dotted = {name for name in DOTTED.findall(page.read_text()) if not name.endswith(".py")}
    names = {name for name in dotted if name.split(".")[0] in packages}

    assert sorted(name for name in names if not exists(name)) == []
