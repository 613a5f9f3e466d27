"""A metric of a user's with two scores."""

KEYS = {"letters": "max", "spaces": "min"}


def compute(predictions, references):
    text = "".join(predictions)
    return {"letters": float(len(text)), "spaces": float(text.count(" "))}
