"""Text that every machine with Python already has: data sources that need no download."""
