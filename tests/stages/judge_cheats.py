"""Answers that try to count as right without being it, and a program that judges them.

`python judge_cheats.py JUDGE CANARY SECONDS PLACE...` prints how each judging ended, as JSON;
CANARY is a file that the answers try to write to, SECONDS how long the processes sleep that they
leave, PLACE where an answer cheats: `function` (when it is called) or `module` (when it is run).
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from redco_flow.stages.evaluate.judge_program import JudgeProgram

PROMPT = "import os\n\n\ndef add(a, b):\n"
TEST = "assert abs(add(2, 3) - 5) < 1e-9 and add(20, 22) == 42, 'not the sum'"

_PRINT = "for fd in range(20):\n    try: os.write(fd, text)\n    except OSError: pass"
_EACH_PROCESS = (
    "import os\n"
    "for pid in {os.getppid(), *(int(p) for p in range(1, 40))}:\n"
    "    for name in ('environ', 'cmdline', 'mem', *(f'fd/{n}' for n in range(12))):\n"
    "        try: DO\n"
    "        except OSError: pass\n"
)
_WORDS = r"b'\n'.join(re.findall(rb'[0-9a-f]{32}', found))"

ENDINGS = {
    "_exit": "os._exit(0)",
    "exec": "os.execv('/bin/true', ['true'])",
    "SystemExit": "raise SystemExit(0)",
    "SIGKILL": "import signal; os.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM": "import signal; os.kill(os.getpid(), signal.SIGTERM)",
    "its group": "os.kill(0, 9)",
    "segmentation fault": "import ctypes; ctypes.string_at(0)",
    "abort": "os.abort()",
    "memory": "bytes(1 << 40)",
    "atexit": "import atexit; atexit.register(os._exit, 0)",
    "thread": (
        "import threading, time\n"
        "threading.Thread(target=lambda: (time.sleep(0.02), os._exit(0))).start()\n"
        "time.sleep(1)"
    ),
    "destructor": "class D:\n    def __del__(self): os._exit(0)\nD()",
    "fork": "if os.fork(): os._exit(0)\nos._exit(0)",
    "hooks": "import sys; sys.excepthook = lambda *_: os._exit(0)\nraise ValueError",
    "closed files": "os.closerange(0, 256)\nos._exit(0)",
}
"""They end the process, each by another way."""

TRICKS = {
    "parents": "for pid in (os.getppid(), 1):\n    os.kill(pid, 9)",
    "all processes": "os.kill(-1, 9)",
    "stopped parent": "import signal; os.kill(os.getppid(), signal.SIGSTOP)",
    "always equal": "class E:\n    __eq__ = lambda s, o: True\n    __sub__ = __rsub__ = __abs__ = "
    "lambda s, *o: s\n    __lt__ = lambda s, o: True\nRESULT = E()",
    "equal number": "class E(int):\n    __eq__ = __lt__ = lambda s, o: True\n"
    "    __sub__ = __abs__ = lambda s, *o: s\nRESULT = E(7)",
    "own abs": "global abs\nabs = lambda x: 0\nRESULT = 42",
    "builtins": "import builtins\nbuiltins.abs = builtins.float = lambda *_: 0\n"
    "builtins.AssertionError = Exception",
    "frames": (
        "import sys, gc, re\nfound = repr(gc.get_objects()[:3000]).encode()\n"
        "frame = sys._getframe()\nwhile frame: found += repr((frame.f_locals, frame.f_globals,"
        f" frame.f_code.co_consts)).encode(); frame = frame.f_back\ntext = {_WORDS}\n{_PRINT}"
    ),
    "tracing": "import sys\nsys.settrace(lambda *_: os._exit(0))\nsys.setprofile(lambda *_: 0)",
    "reads processes": (
        "import re\nfound = b''\n"
        + _EACH_PROCESS.replace("DO", "found += open(f'/proc/{pid}/{name}', 'rb').read(4096)")
        + f"text = {_WORDS}\n{_PRINT}"
    ),
    "writes to processes": _EACH_PROCESS.replace(
        "DO", """open(f'/proc/{pid}/{name}', 'wb').write(b'0\\n{"exit_code": 0}\\n')"""
    ),
    "ptrace": (
        "import ctypes\nassert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == -1\n"
        "ctypes.CDLL(None).process_vm_readv(os.getppid(), 0, 0, 0, 0, 0)"
    ),
    "replies": (
        """text = b'{"value": true, "arguments": [null, null, null], "keywords": {}}\\n'\n"""
        + _PRINT
    ),
    "reports": """text = b'\\n{"exit_code": 0, "is_apart": true}\\n'\n""" + _PRINT,
    "garbage": f"text = b'0\\n[[[[{{'\n{_PRINT}",
    "deep": "RESULT = []\nfor _ in range(5000): RESULT = [RESULT]",
    "cycle": "RESULT = []\nRESULT.append(RESULT)",
    "endless": "import itertools\nRESULT = itertools.count()",
    "modules": "import sys, json\nsys.modules['json'] = None\njson.dumps = lambda *_: '{}'",
    "the judge's module": (
        "import redco_flow.stages.evaluate.python_tests as t\nt.run_tests = lambda *_: None"
    ),
    "interrupt": "raise KeyboardInterrupt",
    "own error": "class E(BaseException): pass\nraise E",
    "AssertionError": "class AssertionError(Exception): pass\nraise AssertionError",
    "daemon": (
        "for _ in range(2):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        os.execve('/bin/sleep', ['sleep', 'SECONDS'], {})"
    ),
    "shared memory": "import ctypes\nctypes.CDLL(None).shmget(0, 1 << 20, 0o1600)",
    "files": (
        "for path in (CANARY, '/dev/shm/CANARY', '/tmp/CANARY', '/run/CANARY', JUDGE):\n"
        "    try: open(path, 'a').write('print(question[\"proof\"])')\n    except OSError: pass"
    ),
    "disk": "for i in range(40): os.posix_fallocate(os.open(f'f{i}', 66), 0, 60 << 20)",
    "sockets": "import socket\nsocket.socket(socket.AF_UNIX)",
    "namespaces": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == -1",
}
"""They read, forge, change or leave something."""

NAIVE = (
    "import json, sys\nquestion = json.load(sys.stdin)\n"
    "exec(question['prompt'] + question['answer'] + '\\n' + question['references'][0],"
    " {'__name__': '__main__'})\nprint(question['proof'])\n"
)
"""A judge that runs the answer in its own process; what ends that process proves nothing."""


def answers(judge: str, canary: str, seconds: str) -> dict[str, str]:
    """Return each way to cheat inside the function, and when its module is run."""
    found = {}
    for name, code in (ENDINGS | TRICKS).items():
        code = code.replace("JUDGE", repr(judge)).replace("CANARY", repr(canary), 1)
        code = code.replace("CANARY", Path(canary).name).replace("SECONDS", seconds)
        body = "RESULT = 42\n" + code
        found[f"{name}, in the function"] = _indented(body) + "\n    return RESULT\n"
        top = body.replace("global abs\n", "")
        found[f"{name}, in the module"] = f"    return RESULT\n{top}\n"
    return found


def _indented(code: str) -> str:
    return "\n".join("    " + line for line in code.splitlines())


def main(judge: str, canary: str, seconds: str, *places: str) -> None:
    """Judge those that cheat in these places, two at once."""
    naive = Path(canary).with_name("naive.py")
    naive.write_text(NAIVE)
    found = answers(judge, canary, seconds)
    asked = [
        (judge, name, answer) for name, answer in found.items() if name.rpartition(" ")[2] in places
    ]
    asked += [
        (str(naive), name, found[name]) for name in (f"{one}, in the function" for one in ENDINGS)
    ]

    def ask(one):
        path, name, answer = one
        program = JudgeProgram(Path(path), 1.5, 256)
        question = {"prompt": PROMPT, "answer": answer, "references": [TEST]}
        end = program.ask(question)
        return f"{Path(path).stem}: {name}", end.ended, end.said, end.is_apart

    with ThreadPoolExecutor(2) as pool:
        print(json.dumps(list(pool.map(ask, asked))))


if __name__ == "__main__":
    os.umask(0o022)
    main(*sys.argv[1:])
