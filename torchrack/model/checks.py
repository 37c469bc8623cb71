"""One row of preflight: what was looked at, how it stands, why it matters, what to do."""

from __future__ import annotations

from typing import Literal

from torchrack.model.rack import Model

State = Literal["ok", "warn", "fail", "could not run"]
WORST: tuple[State, ...] = ("fail", "could not run", "warn", "ok")


class Check(Model):
    """`node` is a node's name, or "all"; `fix` is empty where nothing is to be done."""

    node: str
    check: str
    state: State
    value: str
    why: str = ""
    fix: str = ""


def worst(rows: tuple[Check, ...]) -> State:
    """The state of the worst row; could not run where there is none: no result is never a pass."""
    return min((row.state for row in rows), key=WORST.index, default="could not run")
