"""Nodes that are lost during a run: whether the others go on without them, and when they come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from torchrack.model.job import Job


class Losses:
    """What the job's `lost` means for this run. `full` is the number of ranks that the run begins with."""

    def __init__(self, job: Job, full: int) -> None:
        self.policy, self.full = job.lost, full
        self.lost: set[str] = set()
        self.met: int | None = None
        """The attempt in which the others have met without the lost ones."""
        self.heard = False
        self.lives: Counter[str] = Counter()
        """How often each node was started again."""

    def saw_exit(self, node: str, killed: bool) -> bool:
        """Take note of an agent's end; True when the others go on."""
        if not killed or self.policy == "end":
            return False
        self.lost.add(node)
        return True

    def saw_rank(self, world: int, attempt: int) -> None:
        """Take note of a new rank: that its world is smaller shows that the others have met anew."""
        if self.lost and world < self.full:
            self.met = attempt

    def saw_line(self, attempt: int) -> None:
        """Take note of a rank's output: once the smaller world says something, it is at work."""
        self.heard = self.heard or (self.met is not None and attempt >= self.met)

    def due(self, running: Set[str]) -> list[str]:
        """The nodes to start again now, each once a loss, and not before nothing of it is `running` any more."""
        if self.policy != "return" or not self.heard:
            return []
        back = sorted(self.lost - running)
        self.lost.difference_update(back)
        self.lives.update(back)
        if not self.lost:
            self.met, self.heard = None, False
        return back
