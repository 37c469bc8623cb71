"""The answer, as data and as text: verdict, culprit, evidence, why, and the next command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torchrack.diagnose.findings import Who, listed

Verdict = Literal["fault", "healthy", "unknown"]
EXIT = {"healthy": 0, "fault": 1, "unknown": 3}
NOTHING_READABLE = 2
TEXT_SHOWN = 160


@dataclass(frozen=True)
class Evidence:
    file: str
    line: int
    text: str

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "line": self.line, "text": self.text}


@dataclass(frozen=True)
class Other:
    """A second finding or symptom, and whose consequence it is taken to be."""

    kind: str
    who: Who
    evidence: Evidence
    consequence_of: str | None = None

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"kind": self.kind, "node": self.who.node, "rank": self.who.rank}
        return data | {"evidence": [self.evidence.to_json()], "consequence_of": self.consequence_of}


@dataclass(frozen=True)
class Diagnosis:
    """What happened. `lines` is how many were read: 0 means that nothing was readable."""

    verdict: Verdict
    why: str
    kind: str | None = None
    layer: str | None = None
    culprits: Sequence[Who] = ()
    evidence: Sequence[Evidence] = ()
    fix: str = ""
    lab: str | None = None
    others: Sequence[Other] = field(default_factory=tuple)
    lines: int = 0

    @property
    def exit_code(self) -> int:
        return EXIT[self.verdict] if self.lines else NOTHING_READABLE

    def to_json(self) -> dict[str, Any]:
        blamed = [{"node": w.node, "rank": w.rank} for w in self.culprits]
        return {
            "verdict": self.verdict,
            "kind": self.kind,
            "layer": self.layer,
            "culprit": None if not blamed else blamed[0] if len(blamed) == 1 else blamed,
            "evidence": [e.to_json() for e in self.evidence],
            "why": self.why,
            "fix": self.fix,
            "lab": self.lab,
            "others": [o.to_json() for o in self.others],
        }

    def __str__(self) -> str:
        head = f"{self.kind} ({self.layer})" if self.kind and self.verdict == "fault" else self.verdict
        lines = [head + (f": {listed(self.culprits)}" if self.culprits else ""), f"why   {self.why}"]
        lines += [f"      {e.file}:{e.line}: {_short(e.text)}" for e in self.evidence[:3]]
        lines += [f"fix   {self.fix}"] if self.fix else []
        lines += [f"lab   make break LAB={self.lab} shows it"] if self.lab else []
        if self.others:
            named = list(dict.fromkeys(f"{o.kind} of {o.who}" for o in self.others))
            more = f" and {len(named) - 4} more" if len(named) > 4 else ""
            lines.append(f"then  {', '.join(named[:4])}{more} (consequences)")
        return "\n".join(lines)


def _short(text: str) -> str:
    return text if len(text) <= TEXT_SHOWN else text[: TEXT_SHOWN - 1] + "…"
