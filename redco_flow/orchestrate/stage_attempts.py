"""What a run has of each stage: its result, or the attempt that is to make it.

Reads attempts that earlier launchers left and judges which of them still hold. Submits nothing,
ends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redco_flow.launch.call import Call, InputReference, read_call
from redco_flow.orchestrate.ingredients import stage_ingredients
from redco_flow.orchestrate.planning import input_ids
from redco_flow.orchestrate.run_context import RunContext
from redco_flow.tracking.attempt import AttemptDirectory
from redco_flow.tracking.fingerprint import fingerprint
from redco_flow.tracking.results import find_result
from redco_flow.tracking.shared_attempt import current_attempt


class StageAttempts:
    """Results and attempts by stage; a stage is looked for after those that it takes from.

    Args:
        context: the run.
        upstream: of each stage of this session, what it takes from.
        judges_ended: an attempt that failed unobserved holds until it has been judged.
    """

    def __init__(
        self,
        context: RunContext,
        upstream: Mapping[str, Sequence[str]],
        *,
        judges_ended: bool,
    ) -> None:
        self.made: dict[str, Mapping[str, str]] = {}
        self.current: dict[str, AttemptDirectory] = {}
        self._found_again: set[AttemptDirectory] = set()
        self._context = context
        self._upstream = upstream
        self._judges_ended = judges_ended

    def find_again(self, stage: str) -> AttemptDirectory | None:
        """Take over what an earlier launcher submitted for the stage, if it still holds.

        Returns:
            An attempt that does not hold and whose job is to be ended, if it has not.
        """
        # Imported here: what only plans or reads never pays for it.
        from redco_flow.launch.executor import reattach

        attempt = current_attempt(self._context.run, stage)
        record = attempt.read_job() if attempt is not None else None
        if attempt is None or record is None:
            return None
        if self.is_of_another_run(attempt):
            # Once it has ended, its result is reused like any other, or this run makes its own.
            if attempt.read_exit() is None:
                self.current[stage] = attempt
            return None
        if not self._takes_from_current(read_call(attempt.call_path)):
            return attempt
        if not self.is_published(attempt) and reattach(record).done() and not self._judges_ended:
            return attempt  # of a lost job, ending it ends what it left behind
        self.current[stage] = attempt
        self._found_again.add(attempt)
        return None

    def is_found_again(self, attempt: AttemptDirectory) -> bool:
        """Whether an earlier launcher submitted it."""
        return attempt in self._found_again

    def reuse(self, stage: str) -> bool:
        """Take a published result, where all inputs are known and it has one."""
        if any(one not in self.made for one in self._upstream[stage]):
            return False
        _, digest = self.ingredients(stage)
        result = find_result(self._context.workspace, digest)
        if result is not None:
            self.made[stage] = result.outputs
        return result is not None

    def is_published(self, attempt: AttemptDirectory) -> bool:
        """Whether the attempt has made its result; what it made is noted."""
        result = attempt.read_result()
        if result is None or not find_result(self._context.workspace, result["fingerprint"]):
            return False
        self.made[attempt.stage] = result["outputs"]
        return True

    def is_of_another_run(self, attempt: AttemptDirectory) -> bool:
        """Whether the attempt is not this run's to end or to judge."""
        return not attempt.path.is_relative_to(self._context.run.path)

    def open_upstream(self, stage: str) -> dict[str, AttemptDirectory] | None:
        """The attempts that `stage` has to wait for; None where it would wait in vain."""
        found = {}
        for one in self._upstream[stage]:
            attempt = self.current.get(one)
            if one in self.made or (attempt is not None and self.is_published(attempt)):
                continue
            if attempt is None:
                return None
            found[one] = attempt
        return found

    def ingredients(self, stage: str) -> tuple[dict[str, Any], str]:
        """What determines the result of a stage whose inputs are known, and its fingerprint."""
        resolved = self._context.pipeline.stages[stage]
        ids = input_ids(resolved, self.made)
        ingredients = stage_ingredients(resolved, ids, self._context.workspace)
        return ingredients, fingerprint(ingredients)

    def _takes_from_current(self, call: Call) -> bool:
        """Whether a call's inputs are those that this run has, or the attempts that make them."""
        for reference in (one for given in call.inputs.values() for one in given):
            made = self.made.get(reference.stage, {}).get(reference.output)
            if reference.id and made != reference.id:
                return False
            if not reference.id and not self._comes_from_current(reference, call, made):
                return False
        return True

    def _comes_from_current(self, reference: InputReference, call: Call, made: str | None) -> bool:
        """Whether the attempt that a call waits for is the current one, or has made what is."""
        path = call.upstream[reference.stage]
        attempt = self.current.get(reference.stage)
        if attempt is not None and path == str(attempt.path):
            return True
        result = AttemptDirectory(Path(path)).read_result()
        return result is not None and result["outputs"].get(reference.output) == made
