"""Try candidates of the mesh search by compiling a training's step with their settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax

from redco_flow.engine.sharding.mesh import FSDP_AXIS, MODEL_AXIS
from redco_flow.engine.step.links import NotPredicted
from redco_flow.engine.step.step_time import USUAL
from redco_flow.stages.train.compiled_steps import (
    MOST_CPU_SECONDS,
    CompiledStep,
    StepCompiler,
    cpu_seconds,
    override,
    predicted_time,
)
from redco_flow.stages.train.mesh_search import (
    AS_FAST,
    Candidate,
    MeshTrial,
    Saving,
    best_of,
    search_mesh,
)

_REMATS = ("none", "minimal", "full")
_MICRO_BATCHES = (1, 2, 4, 8, 16)
_MOST_OF_REASON = 200
_WORTH_SAYING = 0.01
# Products that take this many times as long as reading their kernels gain nothing by smaller ones.
_BOUND_BY_COMPUTING = 4.0


class MeshTrials:
    """Looks for the fastest mesh, and with `--search` for the fastest rematerialisation too.

    That changes results in their last bits and is in fingerprints, so `mesh: auto` leaves it as it
    is written, and takes more micro-batches where nothing fits.
    """

    def __init__(self, stage: str, compiler: StepCompiler, progress: Callable[[str], None]) -> None:
        self.notes: list[str] = []
        self._stage = stage
        self._compiler = compiler
        self._progress = progress
        self._steps: dict[Candidate, CompiledStep] = {}
        self._trials: list[MeshTrial] = []
        self._as_it_is: Candidate | None = None
        recipe, config = compiler.data.recipe, compiler.config
        self._written: dict[str, Any] = {
            "num_model_shards": config.num_model_shards,
            "fsdp": config.fsdp,
        }
        if config.mesh is not None:
            self._written = {}
            num_micro = _MICRO_BATCHES if config.per_device_batch_size is None else (1,)
            self._savings = [Saving(num_micro=number) for number in num_micro]
        elif compiler.follows({"remat": "full"}):
            self._written["remat"] = recipe.model.get("config", {}).get("remat") or _REMATS[0]
            self._savings = [Saving(remat) for remat in _REMATS]
        else:
            self._savings = [Saving()]

    def compile_as_it_is(self) -> CompiledStep:
        """Compile the settings as they are, whatever their estimate says: they may be refused."""
        plan = self._compiler.plan({})
        remat = None if self._savings[0].remat is None else plan.remat
        mesh = plan.mesh.shape
        self._as_it_is = Candidate(mesh[MODEL_AXIS], mesh[FSDP_AXIS], Saving(remat))
        step = self._steps[self._as_it_is] = self._compiler.compile(plan)
        return step

    def run(self) -> CompiledStep:
        """Search; return the best step.

        Raises:
            ValueError: the model and the devices can follow no mesh.
            NotPredicted: the settings are left to the search, and the step time is not known.
        """
        target, num_shards = self._compiler.target, self._compiler.config.num_context_shards
        num_devices, remainder = divmod(target.num_devices, num_shards)
        if remainder or not num_devices:
            raise ValueError(
                f"num_context_shards={num_shards} does not divide the {target.num_devices} devices"
            )
        of_host = max(target.topology[-1] // num_shards, 1)
        sizes = (num_devices, of_host, self._savings, self._compiler.limit_bytes)
        for trial in search_mesh(*sizes, self.attempt):
            self._trials.append(trial)
            if self._compiler.config.mesh is not None and trial.fits and trial.seconds is None:
                raise NotPredicted(f"a search of the mesh needs step times: {trial.refusal}.")
            if cpu_seconds() > MOST_CPU_SECONDS:
                ended = f"the search ended after {MOST_CPU_SECONDS:.0f} s of CPU time"
                self.notes.append(ended)
                break
        best = best_of(self._trials)
        if best is None:
            raise ValueError(f"no mesh can be compiled: {self._trials[0].refusal}")
        return self._steps[best.candidate] if not best.is_estimate else self._compile(best)

    def _compile(self, trial: MeshTrial) -> CompiledStep:
        """Compile the best step where all were only estimated: no estimate alone refuses a run."""
        step = self._compiler.compile(self._steps[trial.candidate].plan)
        self._steps[trial.candidate] = step
        compiled = self._trial(trial.candidate, step)
        self._trials = [compiled if one is trial else one for one in self._trials]
        return step

    @property
    def chosen(self) -> dict[str, Any]:
        """The settings of the best step, in place of `mesh: auto`."""
        best = best_of(self._trials)
        assert best is not None
        return {"mesh": None, **self._changes(best.candidate)}

    def rows(self) -> list[dict[str, Any]]:
        """Return the candidates as overrides, the best first, with the reason why others lost."""
        trials = [one for one in self._trials if one.candidate != self._as_it_is]
        if self._as_it_is is not None:  # it was compiled, also where the search leaves it out
            trials.append(self._trial(self._as_it_is, self._steps[self._as_it_is]))
        best = best_of(trials)
        first = self._savings[0]
        shown = [
            one
            for one in trials
            if one.used_bytes is not None or one.candidate.saving == first
        ]  # fmt: skip
        shown.sort(key=lambda one: (one is not best, not one.fits, one.seconds or math.inf))
        return [self._row(one, best) for one in shown]

    def attempt(self, candidate: Candidate) -> MeshTrial:
        """Compile a candidate, once."""
        if candidate in self._steps:
            return self._trial(candidate, self._steps[candidate])
        try:
            changes = self._changes(candidate)
            self._progress(
                f"trying {' '.join(override(self._stage, *one) for one in changes.items())}"
            )
            plan = self._compiler.plan(changes)
            step = self._compiler.compile_if_it_may_fit(plan)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            return MeshTrial(candidate, refusal=" ".join(str(error).split())[:_MOST_OF_REASON])
        self._steps[candidate] = step
        return self._trial(candidate, step)

    def _changes(self, candidate: Candidate) -> dict[str, Any]:
        """Return a candidate's settings; raises ValueError where rows are not that divisible."""
        found: dict[str, Any] = {
            "num_model_shards": candidate.num_model_shards,
            "fsdp": candidate.fsdp,
        }
        if candidate.saving.remat is not None:
            found["remat"] = candidate.saving.remat
        num_micro = candidate.saving.num_micro or 1
        if num_micro > 1:
            config, devices = self._compiler.config, self._compiler.target.num_devices
            shards = devices // config.num_context_shards // candidate.num_model_shards * num_micro
            if config.global_batch_size % shards:
                rows = f"{config.global_batch_size} rows"
                raise ValueError(f"{rows} are not {num_micro} micro-batches of this mesh")
            found["per_device_batch_size"] = config.global_batch_size // shards
        return found

    def _trial(self, candidate: Candidate, step: CompiledStep) -> MeshTrial:
        if step.memory is None:
            refusal = f"does not fit: {_too_large(step)}" if step.is_estimate else ""
            return MeshTrial(
                candidate,
                step.used_bytes,
                is_estimate=step.is_estimate,
                state_bytes=step.plan.bytes_per_device,
                refusal=refusal,
            )
        seconds, communication, products, refusal = None, 0.0, 0.0, ""
        try:
            time = predicted_time(step, self._compiler.target)
            seconds, communication = time.seconds, time.parts.get("communication", 0.0)
            products = time.parts.get("products", 0.0)
        except NotPredicted as error:
            refusal = f"step time not known: {error}"
        device = self._compiler.target.device
        rate = 1e9 * device.measured.get("hbm_gb_s", USUAL.memory * device.hbm_gb_s)
        # Two bytes in the forward pass, the backward pass, and what that computes again.
        kernels = 3 * 2 * step.plan.num_parameters / candidate.num_model_shards
        reading = kernels * step.plan.layout.num_micro / rate
        return MeshTrial(
            candidate,
            step.used_bytes,
            seconds,
            step.fits,
            step.plan.bytes_per_device,
            communication,
            step.updated_bytes / rate,
            reading if products < _BOUND_BY_COMPUTING * reading else 0.0,
            refusal,
        )

    def _row(self, trial: MeshTrial, best: MeshTrial | None) -> dict[str, Any]:
        candidate = trial.candidate
        try:
            changes = self._changes(candidate)
        except ValueError:
            changes = self._changes(Candidate(candidate.num_model_shards, candidate.fsdp))
        differing = [one for one in changes.items() if one[1] != self._written.get(one[0])]
        if candidate == self._as_it_is:
            differing = []
        if self._compiler.config.mesh is not None:
            differing.insert(0, ("mesh", None))
        return {
            "overrides": [override(self._stage, *one) for one in differing],
            **changes,
            "used_bytes": None if trial.is_estimate else trial.used_bytes,
            "step_seconds": trial.seconds,
            "fits": trial.fits,
            "reason": ""
            if trial is best and trial.fits
            else _reason(trial, best, self._compiler.limit_bytes),
        }


def _reason(trial: MeshTrial, best: MeshTrial | None, limit_bytes: int) -> str:
    """Say why a candidate is not the chosen one."""
    if trial.refusal or trial.used_bytes is None:
        return trial.refusal
    if not trial.fits:
        return f"does not fit by {(trial.used_bytes - limit_bytes) / 2**30:.1f} GiB"
    if best is None or best.seconds is None or trial.seconds is None:
        return ""
    slower = trial.seconds / best.seconds - 1
    if slower <= AS_FAST - 1:
        return "as fast, within 3 %, but less simple"
    waits = (trial.communication - best.communication) / best.seconds
    communication = f"; communication alone {waits:+.0%}" if abs(waits) >= _WORTH_SAYING else ""
    return f"{slower:.0%} slower{communication}".replace("%", " %")


def _too_large(step: CompiledStep) -> str:
    needed, over = (one / 2**30 for one in (step.used_bytes, step.used_bytes - step.limit_bytes))
    return f"needs about {needed:.0f} GiB, {over:.1f} more than there is"
