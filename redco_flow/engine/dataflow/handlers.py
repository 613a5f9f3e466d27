"""The table of all primitives whose dataflow is known."""

from __future__ import annotations

from redco_flow.engine.dataflow import (
    calls,
    elementwise,
    indexing,
    products,
    reductions,
    shaping,
)
from redco_flow.engine.dataflow.trace import Handler

HANDLERS: dict[str, Handler] = {
    **elementwise.HANDLERS,
    **shaping.HANDLERS,
    **indexing.HANDLERS,
    **products.HANDLERS,
    **reductions.HANDLERS,
    **calls.HANDLERS,
}
