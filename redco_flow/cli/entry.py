"""The console script: it answers Ctrl-C quietly from its first import on."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    try:
        # Here, because the import takes longer than a hand on the keyboard.
        from redco_flow.cli.main import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
