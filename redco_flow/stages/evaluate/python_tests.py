"""Test an answer in Python from outside its process, for judges of code: `run_tests`.

The tests run in the calling process. The answer runs in another one, which gets arguments and
returns values as plain data: it can neither end the tests, nor read or change them, nor return an
object that equals everything. Standard library only.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from redco_flow.stages.evaluate import answer_process, plain_data
from redco_flow.stages.evaluate.own_process import command
from redco_flow.stages.evaluate.sandbox import hide_from_other_processes

_DEFINITION = re.compile(r"^(?:@.*\n)*(?:async def|def|class)\b", re.MULTILINE)


class AnswerEnded(BaseException):
    """The answer's process ended, or it broke the protocol; no test can catch it by `Exception`."""


def run_tests(prompt: str, answer: str, test: str) -> None:
    """Run `test` on the names that `prompt + answer` defines.

    What the prompt defines in full, before its last function or class, is the tests' own: an answer
    that defines it again changes nothing. Functions of the answer take and return numbers, texts
    and containers of these, as copies; lists, dicts and sets that they change in place are changed.
    Other objects (instances of the answer's classes, generators) can be called, iterated, indexed,
    compared with each other, and have attributes.

    Raises:
        AssertionError: the answer ended its process, or the tests ended by SystemExit.
        Exception: what the tests or the answer raised, as a built-in exception.
    """
    hide_from_other_processes()
    code = ast.parse(test, "<test>")
    namespace: dict[str, Any] = {"__name__": "__main__", **_finished_part(prompt)}
    wanted = {node.id for node in ast.walk(code) if isinstance(node, ast.Name)} - {*namespace}
    process = _AnswerProcess()
    try:
        namespace |= _needed(process.run(prompt + answer + "\n", wanted))
        exec(compile(code, "<test>", "exec"), namespace)  # noqa: S102 (the tests)
    except AnswerEnded:
        pass  # below, as where the tests caught it
    except SystemExit as error:
        raise AssertionError("the tests ended the program") from error
    process.end()


def _finished_part(prompt: str) -> dict[str, Any]:
    """Return what a prompt of Python defines before the part that the answer continues."""
    starts = [found.start() for found in _DEFINITION.finditer(prompt)]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        code = compile(prompt[: starts[-1]] if starts else "", "<prompt>", "exec")
    except SyntaxError:
        return {}
    exec(code, namespace)  # noqa: S102 (part of the data, like the tests)
    return {name: value for name, value in namespace.items() if not name.startswith("__")}


def _needed(names: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out `abs`, `all` and the like, unless the answer defines nothing else of the tests'."""
    own = {name: value for name, value in names.items() if not hasattr(builtins, name)}
    return own or names


class _Remote:
    """An object of the answer's process."""

    def __init__(self, process: _AnswerProcess, number: int) -> None:
        self._process = process
        self._number = number

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._process.do("call", self, *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._process.do("attribute", self, name)

    def __getitem__(self, key: Any) -> Any:
        return self._process.do("item", self, key)

    def __eq__(self, other: object) -> bool:
        # Its `__eq__` is the answer's code: it decides about objects of the answer only.
        if isinstance(other, _Remote):
            return self._process.do("equal", self, other) is True
        if type(other).__module__ != "builtins":
            raise TypeError(
                f"an object of the answer cannot be compared with one of {type(other)}: results "
                "are compared as numbers, texts and containers of these, such as str(result)"
            )
        return False

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return self._process.do("bool", self) is True

    def __len__(self) -> int:
        length: int = self._process.do("len", self)
        return length

    def __iter__(self) -> Iterator[Any]:
        iterator = self._process.do("iter", self)
        while True:
            try:
                yield self._process.do("next", iterator)
            except StopIteration:
                return

    def __next__(self) -> Any:
        return self._process.do("next", self)

    def __repr__(self) -> str:
        return str(self._process.do("repr", self))

    def __str__(self) -> str:
        return str(self._process.do("str", self))


class _AnswerProcess:
    """The process that runs the answer."""

    def __init__(self) -> None:
        self._ended: str | None = None
        self._process = subprocess.Popen(
            command(answer_process.__name__, has_site_packages=True),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def run(self, program: str, names: set[str]) -> dict[str, Any]:
        """Run the answer; return those of the names that it defines."""
        reply = self._ask({"program": program, "names": sorted(names)})
        with self._protocol():
            found = {name: self._decode(value) for name, value in reply["names"].items()}
            for name, module in reply["modules"].items():
                if module.partition(".")[0] in sys.stdlib_module_names:  # not a file of the answer
                    found[name] = importlib.import_module(module)
        return {name: value for name, value in found.items() if name in names}

    def do(self, operation: str, *arguments: Any, **keywords: Any) -> Any:
        """Do something with an object of the answer's process.

        Raises:
            TypeError: an argument is not plain data.
            AnswerEnded: the process ended or broke the protocol.
        """
        request = {
            "do": operation,
            "arguments": [self._encode(one) for one in arguments],
            "keywords": {name: self._encode(one) for name, one in keywords.items()},
        }
        reply = self._ask(request)
        with self._protocol():
            value = self._decode(reply["value"])
            for argument, after in zip(arguments, reply["arguments"], strict=True):
                _change(argument, self._decode(after))
            for name, argument in keywords.items():
                _change(argument, self._decode(reply["keywords"][name]))
        return value

    def end(self) -> None:
        """End the process.

        Raises:
            AssertionError: it had ended before.
        """
        if self._ended is None:
            self._process.kill()
            return
        self._process.stdin.close()  # type: ignore[union-attr]
        code = self._process.wait()
        if code < 0:  # let this process end by the same signal, which says why
            with suppress(OSError):  # SIGKILL has no other handler
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        raise AssertionError(self._ended)

    def broken(self, reason: str) -> NoReturn:
        """Note that no further reply can be trusted, and raise."""
        self._ended = self._ended or reason
        raise AnswerEnded(self._ended)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._ended is not None:
            self.broken(self._ended)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            self.broken("the answer ended its process")
        with self._protocol():
            reply: dict[str, Any] = json.loads(line)
            names = [str(name) for name in reply.get("error", ())]
        if names:
            self._raise(names, str(reply.get("message", "")))
        return reply

    @contextmanager
    def _protocol(self) -> Iterator[None]:
        """Take every error in the reading of a reply for the answer's."""
        try:
            yield
        except (ValueError, TypeError, LookupError, AttributeError, ImportError, RecursionError):
            self.broken("the answer wrote to the pipe of its process")

    def _raise(self, names: list[str], message: str) -> NoReturn:
        """Raise the built-in exception that is the nearest to the answer's."""
        for name in names:
            kind = getattr(builtins, name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                raise _error(kind, message if name == names[0] else f"{names[0]}: {message}")
        self.broken(f"the answer raised {names[0]}")

    def _encode(self, value: Any) -> Any:
        return plain_data.encode(value, self._number)

    def _decode(self, value: Any) -> Any:
        return plain_data.decode(value, lambda number: _Remote(self, number))

    @staticmethod
    def _number(value: Any) -> int:
        if isinstance(value, _Remote):
            return value._number
        raise TypeError(
            f"an object of {type(value)} cannot be passed to an answer: its functions take "
            "numbers, texts and containers of these"
        )


def _change(argument: Any, after: Any) -> None:
    """Change a list, dict or set in place into what a function of the answer made of its copy."""
    if after is None or after == argument:
        return
    if isinstance(argument, list):
        argument[:] = after
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(after)


def _error(kind: type[Exception], message: str) -> Exception:
    try:
        return kind(message)
    except TypeError:  # some take more than a text
        return RuntimeError(f"{kind.__name__}: {message}")
