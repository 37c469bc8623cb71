"""Rules as data: rules/<layer>.yaml says which lines mean what, each with its source and its examples.

A rule's role is
  cause    a hit names a kind of failure (`kind`)
  failure  something failed, and why takes reasoning over all logs (derive_*.py)
  fact     a hit is something to reason with; it decides nothing by itself
  symptom  what a failure elsewhere makes a bystander print; never a verdict
  sign     work went on or ended well
  noise    frightens and means nothing; a noise line is not offered to any other rule
  unexplained  says "error", and no other rule knows it
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, field_validator, model_validator

Role = Literal["cause", "failure", "fact", "symptom", "sign", "noise", "unexplained"]
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
SHORTEST_WORD = 4


class Kind(BaseModel):
    """A name for a failure. `depth` orders kinds from root to consequence; texts may use {node}, {rank} and groups.

    `why` and `fix` are lists: the first text whose {names} are all known is the one that is said.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    layer: str
    meaning: str
    depth: int
    why: tuple[str, ...]
    fix: tuple[str, ...]
    lab: str | None = None

    @field_validator("why", "fix", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value


class Rule(BaseModel):
    """One meaning of a line, in all its wordings (`match`, one a version).

    fires, silent   lines that must match and lines that must not; both are tested
    blame           whose fault a hit is: the speaker's, the peer's whose address stands in the line, or nobody's
    words           literals of which a matching line contains one; needed only where a wording has none of its own
    keep_all, last  of a sign normally the last of each rank counts; all of them, or only the last of the source
    code            matches also in the lines of source that a traceback quotes
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    match: tuple[str, ...]
    source: str
    fires: tuple[str, ...]
    silent: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    kind: str | None = None
    role: Role = "fact"
    keep_all: bool = False
    last: bool = False
    code: bool = False
    blame: Literal["speaker", "peer", "nobody"] = "speaker"

    @field_validator("match", "fires", "silent", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="before")
    @classmethod
    def _cause_has_kind(cls, data: Any) -> Any:
        return {"role": "cause", **data} if isinstance(data, dict) and "kind" in data else data


@dataclass(frozen=True, eq=False)
class Pattern:
    """One wording of a rule; every matching line contains one of `words`. Compiled when first needed."""

    rule: Rule
    text: str
    words: tuple[str, ...]

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.text)


def _load(name: str) -> Any:
    text = (files("torchrack.diagnose") / "rules" / name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=_LOADER)


@cache
def kinds() -> dict[str, Kind]:
    """Every kind by name: the whole vocabulary of verdicts."""
    return {name: Kind(**entry) for name, entry in _load("kinds.yaml").items()}


@cache
def rules() -> tuple[Rule, ...]:
    names = sorted(f.name for f in (files("torchrack.diagnose") / "rules").iterdir() if f.name.endswith(".yaml"))
    return tuple(Rule(**entry) for name in names if name != "kinds.yaml" for entry in _load(name))


@cache
def rule_named(name: str) -> Rule:
    return next(rule for rule in rules() if rule.id == name)


def longest_word(regex: str) -> str:
    """The longest literal that every match of `regex` contains, outside groups, classes and alternatives.

    Raises ValueError when that is too short to sort lines by, so that no rule costs time on every line.
    """
    flat = re.sub(r"\\[dwsSDWbB]", "\0", _without_groups(regex))
    flat = re.sub(r"(\\.|[^\\])(?:[*?]|\{[\d,]+\})\??", "\0", flat)
    if re.search(r"(?<!\\)\|", flat):
        raise ValueError(f"alternatives outside a group in {regex!r}")
    words = [re.sub(r"\\(.)", r"\1", piece) for piece in re.split(r"\0|(?<!\\)[.^$+]", flat)]
    word = max(words, key=len)
    if len(word) < SHORTEST_WORD:
        raise ValueError(f"no literal of {SHORTEST_WORD} characters in {regex!r}")
    return word


def _without_groups(regex: str) -> str:
    """`regex` with each (group) and [class] replaced by NUL."""
    out, depth, klass, i = [], 0, False, 0
    while i < len(regex):
        char = regex[i]
        pair = regex[i : i + 2]
        if char == "\\":
            out.append(pair if not depth and not klass else "")
            i += 2
            continue
        if klass:
            klass = char != "]"
        elif char == "[":
            klass = True
            out.append("\0" if not depth else "")
        elif char == "(":
            out.append("\0" if not depth else "")
            depth += 1
        elif char == ")":
            depth -= 1
        elif not depth:
            out.append(char)
        i += 1
    return "".join(out)


@cache
def patterns() -> tuple[Pattern, ...]:
    """The wordings of all rules."""
    return compile_rules(rules())


def compile_rules(chosen: tuple[Rule, ...]) -> tuple[Pattern, ...]:
    return tuple(Pattern(r, text, r.words or (longest_word(text),)) for r in chosen for text in r.match)
