"""Porter's stemmer for English words, with NLTK's extensions, as ROUGE scores are computed.

Source: M. Porter, "An algorithm for suffix stripping", Program 14.3 (1980), and the default mode
of NLTK's `stem`, which adds irregular forms and a few rules.
"""

from __future__ import annotations

from functools import lru_cache

Rules = tuple[tuple[str, str], ...]


def _read_rules(text: str) -> Rules:
    """Read pairs of a suffix and its replacement; a word's first suffix is the one that counts."""
    pairs = (rule.partition(":") for rule in text.split())
    return tuple((suffix, replacement) for suffix, _, replacement in pairs)


_VOWELS = frozenset("aeiou")
_IRREGULAR = dict(
    _read_rules(
        "sky:sky skies:sky dying:die lying:lie tying:tie news:news inning:inning innings:inning "
        "outing:outing outings:outing canning:canning cannings:canning howe:howe proceed:proceed "
        "exceed:exceed succeed:succeed"
    )
)
_STEP_1A = _read_rules("sses:ss ies:i ss:ss s:")
_STEP_2 = _read_rules(
    "ational:ate tional:tion enci:ence anci:ance izer:ize bli:ble alli:al entli:ent eli:e "
    "ousli:ous ization:ize ation:ate ator:ate alism:al iveness:ive fulness:ful ousness:ous "
    "aliti:al iviti:ive biliti:ble fulli:ful"
)
_STEP_3 = _read_rules("icate:ic ative: alize:al iciti:ic ical:ic ful: ness:")
_STEP_4 = _read_rules("al ance ence er ic able ible ant ement ment ent ou ism ate iti ous ive ize")


@lru_cache(maxsize=1 << 16)
def stem(word: str) -> str:
    """Return the stem of a lower-case word of at least three letters."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    word = _step_1c(_step_1b(_step_1a(word)))
    word = _replace_suffix(_step_2(word), _STEP_3, above=0)
    return _step_5(_step_4(word))


def _step_1a(word: str) -> str:
    if word.endswith("ies") and len(word) == 4:
        return word[:-1]
    return _replace_suffix(word, _STEP_1A, above=-1)


def _step_1b(word: str) -> str:
    if word.endswith("ied"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    for suffix in ("ed", "ing"):
        start = word.removesuffix(suffix)
        if start != word and "v" in _letter_kinds(start):
            return _repair_ending(start)
    return word


def _repair_ending(start: str) -> str:
    """Return hop of hopp(ing), file of fil(ing), troubl(ed) with its e."""
    if start.endswith(("at", "bl", "iz")):
        return start + "e"
    if len(start) > 1 and start[-1] == start[-2] and _letter_kinds(start)[-1] == "c":
        return start if start[-1] in "lsz" else start[:-1]
    return start + "e" if _measure(start) == 1 and _is_short(start) else start


def _step_1c(word: str) -> str:
    is_replaced = len(word) > 2 and word[-1] == "y" and _letter_kinds(word)[-2] == "c"
    return word[:-1] + "i" if is_replaced else word


def _step_2(word: str) -> str:
    if word.endswith("alli") and _measure(word[:-4]) > 0:
        return _step_2(word[:-2])
    if word.endswith("logi"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    return _replace_suffix(word, _STEP_2, above=0)


def _step_4(word: str) -> str:
    if word.endswith(("sion", "tion")):
        return word[:-3] if _measure(word[:-3]) > 1 else word
    return _replace_suffix(word, _STEP_4, above=1)


def _step_5(word: str) -> str:
    start = word.removesuffix("e")
    size = _measure(start)
    if start != word and (size > 1 or (size == 1 and not _is_short(start))):
        word = start
    return word[:-1] if word.endswith("ll") and _measure(word[:-1]) > 1 else word


def _replace_suffix(word: str, rules: Rules, *, above: int) -> str:
    for suffix, replacement in rules:
        if word.endswith(suffix):
            start = word[: -len(suffix)]
            return start + replacement if _measure(start) > above else word
    return word


def _letter_kinds(word: str) -> str:
    """Return c for each consonant and v for each vowel; y is a vowel after a consonant."""
    kinds = ""
    for letter in word:
        is_vowel = letter in _VOWELS or (letter == "y" and kinds[-1:] == "c")
        kinds += "v" if is_vowel else "c"
    return kinds


def _measure(word: str) -> int:
    """Return Porter's m: how often a consonant follows a vowel."""
    return _letter_kinds(word).count("vc")


def _is_short(word: str) -> bool:
    """Whether a word ends like hop or fil, or is a vowel and a consonant."""
    kinds = _letter_kinds(word)
    return kinds == "vc" or (kinds.endswith("cvc") and word[-1] not in "wxy")
