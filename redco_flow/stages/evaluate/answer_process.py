"""Run an answer in this process, for the tests in another one (`python_tests`).

Reads requests as lines of JSON from standard input and writes replies to standard output. For the
answer's own code both are /dev/null. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TextIO

from redco_flow.stages.evaluate import plain_data
from redco_flow.stages.evaluate.sandbox import drop_privileges, restrict_files


def _call(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    return function(*arguments, **keywords)


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "call": _call,
    "attribute": getattr,
    "equal": operator.eq,
    "item": operator.getitem,
    "bool": bool,
    "iter": iter,
    "len": len,
    "next": next,
    "repr": repr,
    "str": str,
}
"""What the tests may ask for; the first argument is an object of this process."""


def main() -> None:
    """Run the program of the first request; then do what the further ones ask for."""
    requests, replies = _take_standard_streams()
    # In a Landlock domain below that of the tests, whose process it can neither trace nor signal.
    drop_privileges()
    restrict_files(["/"], ["/"])
    first = json.loads(requests.readline())
    answer = _Answer()
    _reply(replies, lambda: answer.run(first["program"], first["names"]))
    for line in requests:
        request = json.loads(line)
        _reply(replies, lambda request=request: answer.do(request))  # type: ignore[misc]


def _take_standard_streams() -> tuple[TextIO, TextIO]:
    """Return standard input and output, and put /dev/null in their place."""
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(null, descriptor)
    os.close(null)
    return requests, replies


def _reply(replies: TextIO, do: Callable[[], dict[str, Any]]) -> None:
    try:
        text = json.dumps(do())
    except BaseException as error:  # noqa: BLE001 (an answer may raise anything)
        names = [kind.__name__ for kind in type(error).__mro__]
        message = "an error without a text"
        with contextlib.suppress(Exception):
            message = str(error)
        text = json.dumps({"error": names, "message": message})
    replies.write(text + "\n")
    replies.flush()


class _Answer:
    """The answer's global names, and the objects of it that the tests know by a number."""

    def __init__(self) -> None:
        self._objects: list[Any] = []

    def run(self, program: str, names: list[str]) -> dict[str, Any]:
        """Run the program; return those of the names that it defines."""
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(program, "<answer>", "exec"), namespace)  # noqa: S102 (its purpose)
        found = {name: namespace[name] for name in names if name in namespace}
        modules = {k: v.__name__ for k, v in found.items() if isinstance(v, ModuleType)}
        values = {k: self._encode(v) for k, v in found.items() if k not in modules}
        return {"names": values, "modules": modules}

    def do(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request; return the value, and the arguments that may have changed."""
        arguments = [plain_data.decode(one, self._object) for one in request["arguments"]]
        keywords = {
            name: plain_data.decode(one, self._object) for name, one in request["keywords"].items()
        }
        value = OPERATIONS[request["do"]](*arguments, **keywords)
        return {
            "value": self._encode(value),
            "arguments": [self._after(one) for one in arguments],
            "keywords": {name: self._after(one) for name, one in keywords.items()},
        }

    def _after(self, argument: Any) -> Any:
        """Return what may have been changed in place."""
        return self._encode(argument) if isinstance(argument, list | dict | set) else None

    def _encode(self, value: Any) -> Any:
        return plain_data.encode(value, self._number)

    def _number(self, value: Any) -> int:
        self._objects.append(value)
        return len(self._objects) - 1

    def _object(self, number: int) -> Any:
        return self._objects[number]
