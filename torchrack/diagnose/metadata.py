"""Lines that begin with #: what a kit knows about the job, among them those of torchrack's own run record.

# torchrack run=<id> node=node1 rank=1 local_rank=0 world=2         first line of a rank's log
# torchrack run=<id> node=node1 agent nnodes=2 nproc=1 at=10.77.0.11,10.78.0.11     an agent's log
# torchrack exit=<code|null> signal=<n|null> reason=job|deadline|lease|end|signal seconds=<s>     its last line
# torchrack autopsy rank=1 state=S call=all_reduce place=train.py:41 line=<source line>      derive_autopsy.py
# torchrun exit code node0=0 node1=0
# world_size=4
# hostname: node0   hostname -I: 10.0.0.1
"""

from __future__ import annotations

import re

from torchrack.diagnose.derive_autopsy import read_autopsy
from torchrack.diagnose.facts import Facts, Log

_PAIR = re.compile(r"(\w{1,40})=(\S{1,200})")
_HOST = re.compile(r"#\s*hostname: (\S+)\s+hostname -I: ([\d. ]+)")


def read_metadata(facts: Facts, log: Log, text: str, number: int) -> None:
    values = dict(_PAIR.findall(text[:2000]))
    if text.startswith("# torchrack run="):
        _header(facts, log, values, " agent " in text)
    elif text.startswith("# torchrack exit="):
        log.ended, log.reason = _status(values), values.get("reason")
    elif "exit code" in text or "exit status" in text:
        facts.node_status |= {node: int(code) for node, code in values.items() if _number(code)}
    elif text.startswith("# torchrack autopsy "):
        read_autopsy(facts, log, text, number)
    for name in ("world_size", "world"):
        if _number(values.get(name, "")):
            facts.worlds[int(values[name])] += 1
    if host := _HOST.match(text):
        facts.addresses |= dict.fromkeys(host[2].split(), log.node or host[1])


def _header(facts: Facts, log: Log, values: dict[str, str], agent: bool) -> None:
    log.node, log.agent = values.get("node", log.node), agent
    if not agent and _number(values.get("rank", "")):
        log.rank = int(values["rank"])
        facts.rank_node[log.rank] = log.node or ""
    if log.node and values.get("at"):
        facts.addresses |= dict.fromkeys(values["at"].split(","), log.node)
    if _number(values.get("nnodes", "")):
        facts.nodes_wanted = max(facts.nodes_wanted, int(values["nnodes"]))


def _status(values: dict[str, str]) -> int | None:
    """The exit status, a signal as a negative number; None while it is not known."""
    if _number(values.get("exit", "")):
        return int(values["exit"])
    return -int(values["signal"]) if _number(values.get("signal", "")) else None


def _number(text: str) -> bool:
    return re.fullmatch(r"-?\d{1,7}", text, re.ASCII) is not None
