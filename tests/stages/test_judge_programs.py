"""Programs that judge code: what cheats is not right and leaves nothing; what is right passes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_flow.stages.evaluate import plain_data
from redco_flow.stages.evaluate.judge_program import JudgeProgram

OF_THE_GUIDE = Path(__file__).parents[2] / "docs/examples/judge_python.py"
CHEATS = Path(__file__).with_name("judge_cheats.py")
SECONDS = "5432.75"  # how long the processes sleep that they leave
# Takes the right to make namespaces away, as Docker's and some sites' settings do.
WITHOUT_NAMESPACES = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$0" "$@"'


def judged_cheats(words, tmp_path, places):
    """Run judge_cheats.py on a copy of the guide's judge; return what it prints, by answer."""
    judge = shutil.copy(OF_THE_GUIDE, tmp_path / "judge_python.py")
    canary = tmp_path / f"canary-{os.getpid()}"
    command = [*words, sys.executable, str(CHEATS), str(judge), str(canary), SECONDS, *places]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500)
    assert Path(judge).read_text() == OF_THE_GUIDE.read_text()
    found = [tmp_path / canary.name, *(Path(f, canary.name) for f in ("/dev/shm", "/tmp", "/run"))]
    assert [path for path in found if path.exists()] == []
    return {name: rest for name, *rest in json.loads(done.stdout)}


def left_over():
    """What stays outside of a program's folder: processes, segments, folders in /tmp."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            processes += [path] if SECONDS.encode() in path.read_bytes() else []
        except OSError:
            continue
    segments = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return processes, len(segments), set(Path("/tmp").glob("redco-flow-judge-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "places"),
    [("namespaces", ["function"]), ("without namespaces", ["module"])],
)
def test_programs_that_cheat_are_never_right_and_leave_nothing(tmp_path, mode, places):
    words = ["unshare", "-Ur", "sh", "-c", WITHOUT_NAMESPACES] if mode != "namespaces" else []
    if words and subprocess.run(["unshare", "-Ur", "true"], check=False).returncode:
        words = []  # no user may make namespaces here: the mode is this one anyway
    before = left_over()

    found = judged_cheats(words, tmp_path, places)

    assert len(found) >= 15 + 42 * len(places)
    assert [name for name, (ended, *_) in found.items() if ended == "right"] == []
    if words:
        assert not any(is_apart for _, _, is_apart in found.values())
    assert left_over() == before


RIGHT = {
    "numbers": ("def f(a, b):\n", "    return a + b", "assert f(1, 2) == 3 and f(0.5, 1) == 1.5"),
    "a helper of the prompt": (
        "import math\n\n\ndef poly(xs, x):\n"
        "    return sum(c * math.pow(x, i) for i, c in enumerate(xs))\n\n\ndef zero(xs):\n",
        "    return -xs[0] / xs[1]",
        "def check(candidate):\n    assert math.fabs(poly([1, 2], candidate([1, 2]))) < 1e-4\n"
        "check(zero)",
    ),
    "an argument changed in place": (
        "def f(xs, d):\n",
        "    xs.sort()\n    d['n'] = len(xs)",
        "xs, d = [3, 1], {}\nassert f(xs, d) is None\nassert xs == [1, 3] and d == {'n': 2}",
    ),
    "nested containers": (
        "def f(x):\n",
        "    return {(1, 'a'): [{2, 3}, frozenset(), b'\\0', x, None, True]}",
        "assert f(1j) == {(1, 'a'): [{2, 3}, frozenset(), b'\\0', 1j, None, True]}",
    ),
    "kinds of numbers": (
        "def f(x):\n",
        "    return [x, float('nan'), -float('inf'), 7 ** 9000]",
        "import math\nb, n, i, h = f(True)\nassert b is True and math.isnan(n) and i == -math.inf\n"
        "assert h == 7 ** 9000",
    ),
    "an exception": (
        "def f(x):\n",
        "    raise KeyError(x)",
        "try:\n    f('a')\nexcept LookupError as error:\n    assert 'a' in str(error)\n"
        "else:\n    assert False",
    ),
    "a generator": (
        "def f():\n",
        "    n = 0\n    while True:\n        yield n\n        n += 1",
        "import itertools\nassert list(itertools.islice(f(), 3)) == [0, 1, 2]",
    ),
    "a class": (
        "class Stack:\n",
        "    def __init__(self): self.items = []\n    def __len__(self): return len(self.items)\n"
        "    def push(self, x): self.items.append(x); return self\n"
        "    def __eq__(self, other): return self.items == other.items",
        "s = Stack().push(1)\nassert len(s) == 1 and s.items == [1] and s == Stack().push(1)\n"
        "assert s != Stack() and not Stack()",
    ),
    "a name of Python's": ("", "def sum(a, b):\n    return a * b", "assert sum(3, 4) == 12"),
    "a named tuple": (
        "def f():\n",
        "    import collections\n    return collections.namedtuple('P', 'x y')(1, 2)",
        "assert f() == (1, 2)",
    ),
    "printing": ("def f():\n", "    print('{}', flush=True)\n    return 1", "assert f() == 1"),
}


@pytest.mark.slow
def test_right_answers_pass_as_they_do_in_one_process():
    """The reference is HumanEval's way: prompt, answer and test as one program."""
    ends = {}
    for name, (prompt, answer, test) in RIGHT.items():
        exec(f"{prompt}{answer}\n{test}", {"__name__": "__main__"})
        question = {"prompt": prompt, "answer": answer, "references": [test]}
        ends[name] = JudgeProgram(OF_THE_GUIDE, 120.0, 512).ask(question)

    assert {name: (end.ended, end.said) for name, end in ends.items()} == dict.fromkeys(
        RIGHT, ("right", "")
    )


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = SCALARS | st.tuples(SCALARS, st.binary())
VALUES = st.recursive(
    SCALARS | st.complex_numbers(allow_nan=False) | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(KEYS, inner)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    ),
)


def typed(value):
    """A value with the type of each part: 1, 1.0 and True are equal otherwise."""
    if isinstance(value, dict):
        value = [(typed(key), typed(one)) for key, one in value.items()]
        return ("dict", tuple(value))
    if isinstance(value, set | frozenset):
        return (type(value).__name__, frozenset(map(typed, value)))
    if isinstance(value, list | tuple):
        return (type(value).__name__, tuple(map(typed, value)))
    return (type(value).__name__, value)


@settings(deadline=None, max_examples=50)
@given(VALUES)
def test_plain_data_arrives_as_it_was(value):
    text = json.dumps(plain_data.encode(value, lambda _: 0))

    found = plain_data.decode(json.loads(text), lambda _: None)

    assert typed(found) == typed(value)


@settings(deadline=None, max_examples=50)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["int", "set", "dict", "bytes", "complex", "object", "list"]), inner
            )
        ),
    )
)
def test_forged_data_is_refused_or_plain(forged):
    plain = (type(None), bool, int, float, str, bytes, complex, list, tuple, set, frozenset, dict)
    try:
        found = plain_data.decode(forged, lambda number: number)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
        return

    assert type(found) in plain


def test_an_always_equal_object_is_not_equal_to_plain_data():
    answer = "    class E:\n        def __eq__(self, other): return True\n    return E()"
    question = {"prompt": "def f():\n", "answer": answer, "references": ["assert f() == 3"]}

    assert JudgeProgram(OF_THE_GUIDE, 120.0, 512).ask(question).ended == "wrong"


def test_a_comparison_that_cannot_be_made_is_reported():
    """Both are the same fraction: `wrong` without a reason would blame the answer."""
    answer = "    import fractions\n    return fractions.Fraction(1, 2)"
    test = "from fractions import Fraction\nassert f() == Fraction(1, 2)"
    question = {"prompt": "def f():\n", "answer": answer, "references": [test]}

    end = JudgeProgram(OF_THE_GUIDE, 120.0, 512).ask(question)

    assert "cannot be compared with one of <class 'fractions.Fraction'>" in end.said
