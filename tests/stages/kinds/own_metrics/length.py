"""A metric as a user writes one: two functions' worth, of the whole set alone."""

KEYS = {"words": "min"}


def compute(predictions, references):
    return {"words": sum(len(text.split()) for text in predictions) / len(predictions)}
