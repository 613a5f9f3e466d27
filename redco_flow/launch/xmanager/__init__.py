"""Stages as work units of XManager."""
