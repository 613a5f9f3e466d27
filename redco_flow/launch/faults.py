"""The faults that `redco-flow drill` rehearses, and the variable that names one to a training."""

from __future__ import annotations

FAULT_VARIABLE = "REDCO_FLOW_DRILL_FAULT"
FAULTS = ("preempt", "kill", "stall", "timeout")
