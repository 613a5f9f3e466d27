"""A recipe that cannot be imported here: loading a pipeline must not import it."""

raise ImportError("a recipe needs an accelerator")
