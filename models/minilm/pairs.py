"""Title/passage pairs cut from the documentation text that every CPython carries (`pydoc_data.topics`).

A section is a heading (underlined in that text) or a definition (`object.__init__(self[, ...])` over an
indented description) with the prose below it. Its prose is cut into passages of a few sentences, each of
which makes a pair with the title. Sections, not passages, are held out, so that no held-out title was seen in
training.
"""

from __future__ import annotations

import re
import textwrap
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

_UNDERLINE = re.compile(r"([*=\-~^\"])\1{2,}")
_DEFINITION = re.compile(r"\s*(?:(?:async|class|exception) )?[A-Za-z_][\w.]*\([^()]*\)|\s*[a-z_]+\.[a-z_.]+")
_SENTENCE_END = re.compile(r"(?<=[.:?!])\s+")

PASSAGE_WORDS = 30
"""A passage ends with the sentence that brings it to this many words."""

_SHORTEST_PASSAGE_WORDS = 8
_HELD_OUT_OF_FIVE = 1


@dataclass(frozen=True)
class Pair:
    """One passage and the title of the section that it was cut from."""

    title: str
    passage: str


def cut_pairs(texts: Iterable[str]) -> list[Pair]:
    """All pairs of `texts`, in order, each passage once: the documentation repeats whole sections."""
    pairs: dict[str, Pair] = {}
    for text in texts:
        for title, body in _sections(text):
            for passage in _passages(body):
                pairs.setdefault(passage, Pair(title, passage))
    return list(pairs.values())


def split_pairs(pairs: Iterable[Pair]) -> tuple[list[Pair], list[Pair]]:
    """(training, held out): a fifth of the titles is held out, chosen by a checksum of the title, so that the
    split is the same in every run and every version of the text.
    """
    training: list[Pair] = []
    held_out: list[Pair] = []
    for pair in pairs:
        group = held_out if zlib.crc32(pair.title.encode()) % 5 < _HELD_OUT_OF_FIVE else training
        group.append(pair)
    return training, held_out


def _sections(text: str) -> list[tuple[str, str]]:
    """(title, prose) of every section of one topic, in order."""
    sections: list[tuple[str, list[str]]] = []
    lines = text.split("\n")
    for index, line in enumerate(lines):
        below = lines[index + 1] if index + 1 < len(lines) else ""
        if line.strip() and _UNDERLINE.fullmatch(below):
            sections.append((line.strip(), []))
        elif not below.strip() and _DEFINITION.fullmatch(line):
            sections.append((line.strip(), []))
        elif sections and not _UNDERLINE.fullmatch(line):
            sections[-1][1].append(line)
    return [(_plain(title), textwrap.dedent("\n".join(body))) for title, body in sections]


def _passages(body: str) -> list[str]:
    passages, words = [], []
    for paragraph in re.split(r"\n\s*\n", body):
        if _is_code(paragraph):
            continue
        for sentence in _SENTENCE_END.split(_plain(paragraph)):
            words += sentence.split()
            if len(words) >= PASSAGE_WORDS:
                passages.append(words)
                words = []
    passages.append(words)
    return [
        " ".join(words[: 2 * PASSAGE_WORDS]) for words in passages if len(words) >= _SHORTEST_PASSAGE_WORDS
    ]


def _is_code(paragraph: str) -> bool:
    """Examples and grammar are no prose: few of their words are made of letters."""
    words = paragraph.split()
    return sum(word.strip("\"'.,;:()*").isalpha() for word in words) < 0.6 * len(words)


def _plain(text: str) -> str:
    """`text` on one line, without the marks of emphasis."""
    return " ".join(text.replace("*", "").replace('"', "").split())
