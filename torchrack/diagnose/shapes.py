"""Which rules may match a line, by its shape: the line without its digits.

Of a million lines "step 41 loss 0.25" all but the first cost one look-up. A rule's words are compared without digits
as well, so that the answer is the same for all lines of a shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from torchrack.diagnose.lines import clean
from torchrack.diagnose.rules import Pattern
from torchrack.diagnose.sources import LINE_LIMIT

SHAPES_KEPT = 100_000  # about 25 MB; then the memory starts afresh
SHAPE_LENGTH = 512  # bytes; longer lines are rare and sorted anew each time
ORDER = {"noise": 0, "unexplained": 2}  # a noise line is offered to no other rule, an explained one not to the last
_DIGITS = b"0123456789"


@lru_cache(maxsize=2)
def prepared(patterns: tuple[Pattern, ...]) -> tuple[list[tuple[tuple[bytes, ...], Pattern]], re.Pattern[bytes]]:
    """The patterns in order, each with its words without digits; and a regex that finds any of all words."""
    ordered = sorted(patterns, key=lambda p: ORDER.get(p.rule.role, 1))
    by_words = [(tuple(w.encode().translate(None, _DIGITS) for w in p.words), p) for p in ordered]
    return by_words, re.compile(any_of({word for words, _ in by_words for word in words}))


@dataclass(frozen=True, slots=True)
class Sorted:
    """What a shape may match. `look`: a line of it is looked at; `last`: only the last such line of a source is."""

    patterns: tuple[Pattern, ...] = ()
    look: bool = False
    last: bool = False


NOTHING = Sorted()


class Shapes:
    def __init__(self, patterns: tuple[Pattern, ...]) -> None:
        self._patterns, self._any_word = prepared(patterns)
        self.known: dict[bytes, Sorted] = {}

    def sort(self, shape: bytes) -> Sorted:
        """What a line of this shape may match; remembered in `known`, which readers ask first."""
        found = self._sort(shape)
        if len(shape) <= SHAPE_LENGTH:
            if len(self.known) >= SHAPES_KEPT:
                self.known.clear()
            self.known[shape] = found
        return found

    def _sort(self, shape: bytes) -> Sorted:
        metadata = shape.startswith(b"#")
        if not self._any_word.search(shape):
            return Sorted(look=True) if metadata else NOTHING
        found = tuple(p for words, p in self._patterns if any(word in shape for word in words))
        return Sorted(found, bool(found) or metadata, not metadata and all(p.rule.last for p in found))


def any_of(words: Iterable[bytes]) -> bytes:
    """A regex that finds any of the words, with common beginnings written once: faster than a plain a|b|c."""
    by_first: dict[bytes, set[bytes]] = {}
    for word in words:
        by_first.setdefault(word[:1], set()).add(word[1:])
    branches = []
    for first, rests in sorted(by_first.items()):
        if b"" in rests:  # the shorter word is found wherever the longer one is
            branches.append(re.escape(first))
        elif len(rests) == 1:
            branches.append(re.escape(first + rests.pop()))
        else:
            branches.append(re.escape(first) + any_of(rests))
    return b"(?:" + b"|".join(branches) + b")"


def shape_of(text: str) -> bytes:
    return text.encode("utf-8", "replace").translate(None, _DIGITS)


def lines_and_shapes(block: bytes) -> tuple[list[str], list[bytes]]:
    """The cleaned lines of a block, and their shapes."""
    texts = block.decode("utf-8", "replace").split("\n")
    if b"\x1b" in block or b"\r" in block or max(map(len, texts)) > LINE_LIMIT:
        texts = [clean(text)[:LINE_LIMIT] for text in texts]
        return texts, [shape_of(text) for text in texts]
    return texts, block.translate(None, _DIGITS).split(b"\n")


def last_of_each_shape(block: bytes) -> dict[bytes, int]:
    """Shape to the index of its last line in the block."""
    shapes = block.translate(None, _DIGITS).split(b"\n")
    return dict(zip(shapes, range(len(shapes)), strict=True))
