"""The word somebody probably meant; loaded only after a word was not understood."""

import difflib
from collections.abc import Iterable


def nearest(word: str, choices: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the choice most like `word`, without regard to case, or None when none is like it."""
    known = {choice.casefold(): choice for choice in choices}
    close = difflib.get_close_matches(word.casefold(), known, n=1, cutoff=cutoff)
    return known[close[0]] if close else None
