"""A judge of Python functions, as of HumanEval: the answer goes on where the prompt ends.

The data's target is the program that tests it: it ends with an error where the answer is wrong.
"""

import json
import sys

question = json.load(sys.stdin)
(test,) = question["references"]
try:
    program = question["prompt"] + question["answer"] + "\n" + test
    exec(program, {"__name__": "__main__"})  # noqa: S102 (what a judge of code is for)
except SystemExit as error:  # an answer that ends the program has passed no test
    raise AssertionError("the answer ended the program") from error
