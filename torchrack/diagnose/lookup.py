"""What a pasted line means, by the same rules."""

from __future__ import annotations

from dataclasses import dataclass

from torchrack.diagnose.lines import clean, parse
from torchrack.diagnose.rules import Rule, kinds, patterns

MEANS = {
    "symptom": "A symptom: a bystander prints this because of a failure elsewhere. Look at the other ranks and nodes.",
    "noise": "Harmless: nothing is wrong because of this line.",
    "sign": "A sign that work went on.",
    "failure": "A failure whose cause only the logs of all ranks together tell: torchrack diagnose FOLDER",
    "unexplained": "An error that no rule knows.",
    "fact": "It says something only together with the logs of the other ranks: torchrack diagnose FOLDER",
}


@dataclass(frozen=True)
class Explanation:
    """One rule that knows the line: `kind` and its texts if it names a failure by itself."""

    rule: str
    role: str
    kind: str | None
    layer: str | None
    why: str
    fix: str
    source: str


def lookup(line: str) -> list[Explanation]:
    """The explanations of every rule that matches `line`, causes first; "no rule knows it" only where that is so."""
    text = parse(clean(line)).text
    found = {
        pattern.rule.id: pattern.rule
        for pattern in patterns()
        if any(word in text for word in pattern.words) and pattern.regex.search(text)
    }
    order = ("cause", "failure", "symptom", "noise", "fact", "sign", "unexplained")
    rules = sorted(found.values(), key=lambda rule: order.index(rule.role))
    known = [rule for rule in rules if rule.role != "unexplained"]
    return [_explain(rule) for rule in known or rules]


def _explain(rule: Rule) -> Explanation:
    if rule.kind is None:
        return Explanation(rule.id, rule.role, None, None, MEANS[rule.role], "", rule.source)
    kind = kinds()[rule.kind]
    fix = next((text for text in reversed(kind.fix)), "")
    return Explanation(rule.id, rule.role, rule.kind, kind.layer, kind.meaning, fix, rule.source)
