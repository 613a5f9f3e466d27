"""A metric whose scores have other names than it declares; one is not defined for every set."""

KEYS = {"right": "max", "varied": "max", "typo": "max"}
READS = "classes"


def compute(predictions, references):
    right = sum(one in true for one, true in zip(predictions, references, strict=True))
    varied = {"varied": 1.0} if len(set(predictions)) > 1 else {}
    return {"right": right / len(predictions), "tpyo": 0.5, **varied}
