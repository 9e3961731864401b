"""Prompts that have never been sent before, and whose continuation depends on their beginning."""

from __future__ import annotations

import random
from typing import Final

_COMMON: Final = """
air arm art baby bag ball bank bar base bear bed bird blood blue board boat body book box boy brain bread bridge brother brown car card
cat chair child church circle city class clock cloud coat coffee cold color copper corner cotton country cup dance dark day desk doctor
dog door dream dress east egg engine eye face farm father field finger fire fish floor flower food foot forest friend fruit garden gas
girl glass gold grass green ground group hair hand hat head heart hill home horse hospital hotel hour house ice iron island king kitchen
lake lamp land letter light lion market milk mirror moon mother mountain mouth music night north ocean office paper park phone picture
"""
WORDS: Final = tuple(_COMMON.split())
"""Common words, mostly one token each in any tokenizer: 16 of them, the smallest page, can be drawn in 10^33 ways."""
_FRAME: Final = 20
"""Tokens of the prompt outside the list of words."""
_SHOWN: Final = 6
"""Words with which the repetition of the list begins: enough to find the place in it."""


def draw(seed: str, tokens: int) -> str:
    """Return a prompt of about `tokens` tokens; the same seed gives the same prompt.

    The prompt ends in the middle of a repetition of its first words. A model continues with the words that followed there, so its text
    depends on what was restored for the beginning, and each next word is a clear choice: random text would leave near-ties, which rounding
    decides.
    """
    words = random.Random(seed).choices(WORDS, k=tokens - _FRAME)  # noqa: S311  the seed is what nobody must know
    return f"{' '.join(words)}\n\nThe same words once more, from the first one on:\n\n{' '.join(words[:_SHOWN])}"
