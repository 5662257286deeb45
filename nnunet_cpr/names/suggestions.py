"""Suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from nnunet_cpr.names.families import Family
from nnunet_cpr.names.suffixes import Suffix, find_suffix
from nnunet_cpr.spelling import NUMBER_HELP, OTHER_TRAINER, split_word

_SPELLED_OUT = {"warmstart": "ws", "learningrate": "lr", "weightdecay": "wd"}
"""Words that users may write in place of a suffix, which resemble another one."""
_OF_PLANS = ("bs", "batch", "batchsize", "ps", "patch", "patchsize")
"""Words for settings that nnU-Net's plans have, not its trainers."""


def nearest_family(families: Mapping[str, Family], prefix: str, word: str) -> str | None:
    """Return the family that the first part of a name resembles, None if there is none.

    Args:
        families: the known families.
        prefix: their common beginning.
        word: the first part of the name, which begins in the same way.

    Example:
        >>> from nnunet_cpr.names.families import FAMILIES
        >>> nearest_family(FAMILIES, "nnUNetTrainer", "nnUNetTrainerCRP")
        'nnUNetTrainerCPR'
    """
    rest = word[len(prefix) :].lower()
    rests = {family[len(prefix) :].lower(): family for family in families}
    with_cpr = "cpr" in rest
    close = difflib.get_close_matches(rest, rests, n=1, cutoff=0.85 if with_cpr else 0.6)
    if close or not with_cpr:
        return rests[close[0]] if close else None
    # The optimizer decides, since CPRAdam resembles CPR more than AdamCPR.
    optimizer = next((word for word in ("adam", "muon", "timm") if word in rest), "sgd")
    return next(f.name for f in families.values() if f.cpr and f.optimizer == optimizer)


def suggest_suffix(suffixes: Sequence[Suffix], prefix: str, token: str, name: str) -> str:
    """Return advice for an unknown suffix of a name.

    Args:
        suffixes: the known suffixes.
        prefix: beginning of the names of base trainers, empty if names have none.
        token: the unknown suffix, without its underscore.
        name: the whole name.

    Example:
        >>> from nnunet_cpr.names.suffixes import SUFFIXES
        >>> suggest_suffix(SUFFIXES, "nnUNetTrainer", "ws2k", "nnUNetTrainerCPR_ws2k_mu2")
        'did you mean nnUNetTrainerCPR_ws2000_mu2?'
    """
    own, ending, other = name.partition(OTHER_TRAINER)
    family, *tokens = own.split("_")
    letters, number = split_word(token)
    letters = _SPELLED_OUT.get(letters, letters)
    if prefix and letters in _OF_PLANS:
        return (
            f"_{token} is a setting of nnU-Net's plans; change it in a copy of them, and train with -p"
        )
    if (joined := _join(suffixes, tokens)) != tokens:
        return f"did you mean {'_'.join([family, *joined])}{ending}{other}?"
    by_letters = {s.before + s.after: s for s in suffixes if s.field != "on"}
    if prefix and token != token.lower() and letters not in by_letters:
        known = [t for t in tokens if find_suffix(suffixes, t)]
        rest = "_".join(t for t in tokens if t and t not in known).removeprefix(prefix)
        trainer = prefix + ("_" if rest[:1].islower() else "") + rest
        corrected = "_".join([family, *known]) + OTHER_TRAINER + trainer
        return f"write a base trainer last, as {OTHER_TRAINER}<Trainer>, such as {corrected}"
    near = () if letters in _OF_PLANS else by_letters
    for close in difflib.get_close_matches(letters, near, n=3, cutoff=0.5):
        suffix = by_letters[close]
        guess = suffix.before + (number if suffix.placeholder else "") + suffix.after
        if suffix.matches(guess):
            corrected = "_".join([family, *(guess if t == token else t for t in tokens)])
            return f"did you mean {corrected}{ending}{other}?"
        if close == letters:
            return f"write it as {suffix.syntax}, {NUMBER_HELP}"
    return f"choose from {' '.join(suffix.syntax for suffix in suffixes)}, {NUMBER_HELP}"


def _join(suffixes: Sequence[Suffix], tokens: Sequence[str]) -> list[str]:
    """Return tokens in which a word and its number, such as ``ws`` and ``1000``, are one suffix."""
    joined: list[str] = []
    for token in tokens:
        before = joined[-1] if joined else ""
        pairs = (before + token, token + before) if before and not find_suffix(suffixes, before) else ()
        suffix = next((pair for pair in pairs if find_suffix(suffixes, pair)), None)
        joined[len(joined) - (suffix is not None) :] = [suffix or token]
    return joined
