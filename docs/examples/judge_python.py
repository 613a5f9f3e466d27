"""A judge of Python functions, as of HumanEval: the answer continues the prompt.

The data's target is the test: it raises an error where the answer is wrong.
"""

import json
import sys

from redco_flow.stages.evaluate.python_tests import run_tests

question = json.load(sys.stdin)
(test,) = question["references"]
run_tests(question["prompt"], question["answer"], test)
print(question["proof"])
