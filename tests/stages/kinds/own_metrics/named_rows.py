"""A metric of rows: the share of them that have a name."""

KEYS = {"named": "max"}
READS = "rows"


def compute(predictions, rows):
    return {"named": sum("name" in row for row in rows) / len(predictions)}
