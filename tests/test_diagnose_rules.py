"""Each rule fires on its own examples and stays silent on its counter-examples; every kind has a text and a way to it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchrack.diagnose import KINDS, Source, diagnose, lookup
from torchrack.diagnose.lines import clean, parse
from torchrack.diagnose.rules import Rule, compile_rules, longest_word, rules
from torchrack.diagnose.shapes import Shapes, shape_of

DIAGNOSE = Path(__file__).parent.parent / "torchrack" / "diagnose"
LAYERS_WITHOUT_RULES = {"none", "mtu", "ipv6"}  # found by comparing nodes: see derive_*.py
OWN_KINDS = {"golden-mismatch", "app-exception", "check-failed", "hang", "point-to-point-deadlock"}
SHARED_KINDS = Path(__file__).parent.parent.parent / "shared" / "cases" / "kinds.tsv"


def matches(rule: Rule, line: str) -> bool:
    """As the reader does it: first by the shape of the line, then by the wording."""
    text = clean(line)
    patterns = Shapes(compile_rules((rule,))).sort(shape_of(text)).patterns
    return any(p.regex.search(text if rule.role == "unexplained" else parse(text).text) for p in patterns)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.id)
def test_a_rule_fires_on_its_examples_only(rule: Rule) -> None:
    assert [line for line in rule.fires if not matches(rule, line)] == []
    assert [line for line in rule.silent if matches(rule, line)] == []


def test_every_rule_says_where_its_words_come_from() -> None:
    assert len({rule.id for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule.source and rule.fires
        assert rule.silent or rule.role == "noise", rule.id
        assert rule.kind is None or rule.kind in KINDS, rule.id
        assert (rule.role == "cause") == (rule.kind is not None), rule.id


@pytest.mark.parametrize("rule", [r for r in rules() if r.kind], ids=lambda rule: rule.id)
def test_a_cause_alone_is_the_verdict(rule: Rule) -> None:
    """One line, nothing else: the kind of its rule, or the kind that a second rule knows better."""
    for line in rule.fires:
        answer = diagnose([Source("log.txt", [line])])
        assert answer.kind == rule.kind, (line, answer.kind)
        assert answer.why and answer.fix and "{" not in answer.why + answer.fix


def test_every_kind_can_be_reached() -> None:
    """A rule names it, or a derivation does; and nothing names a kind that does not exist."""
    code = "\n".join(path.read_text() for path in DIAGNOSE.glob("derive_*.py"))
    named = {rule.kind for rule in rules() if rule.kind} | set(re.findall(r'"([a-z0-9-]+)"', code))
    assert set(KINDS) - named == {"no-fault"}
    for kind in KINDS.values():
        assert kind.why and kind.fix and kind.meaning
        assert "{" not in kind.why[-1].replace("{who}", "") or "{" in kind.why[0]


@pytest.mark.skipif(not SHARED_KINDS.exists(), reason="the shared vocabulary is not beside this checkout")
def test_the_vocabulary_is_the_shared_one_and_our_own_kinds() -> None:
    rows = [line.split("\t") for line in SHARED_KINDS.read_text().splitlines()[1:]]
    assert set(KINDS) == {kind for _, kind, _ in rows} | OWN_KINDS
    assert [kind for layer, kind, _ in rows if KINDS[kind].layer != layer] == []


def test_one_file_a_layer() -> None:
    files = {path.stem for path in (DIAGNOSE / "rules").glob("*.yaml")}
    layers = {kind.layer for kind in KINDS.values()} - LAYERS_WITHOUT_RULES
    assert layers <= files
    assert files - layers == {"kinds", "noise", "signs", "unexplained"}


def test_longest_word() -> None:
    assert longest_word(r"Timed out waiting (?P<ms>\d+)ms for (?:recv|send)") == "Timed out waiting "
    assert longest_word(r"colou?r blind") == "r blind"
    assert longest_word(r"errno[ :=]+24\b") == "errno"
    with pytest.raises(ValueError, match="literal"):
        longest_word(r"a.b.c")
    with pytest.raises(ValueError, match="alternatives"):
        longest_word("first|second")


def test_lookup_explains_a_pasted_line() -> None:
    line = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    (found,) = [one for one in lookup(line) if one.kind]
    assert (found.kind, found.layer) == ("gpu-oom-one-rank", "oom-gpu")
    assert "memory" in found.why and found.fix and found.source
    assert lookup("[c10d] The hostname of the client socket cannot be retrieved. err=-3")[0].role == "noise"
    assert lookup("Connection closed by peer [10.0.0.1]:26542")[0].role == "symptom"
    assert lookup("a line of a song") == []
    assert [one.kind for one in lookup("RuntimeError: No CUDA GPUs are available")] == ["no-gpu-visible"]
    assert [one.role for one in lookup("ZorkError: hm")] == ["unexplained"]
