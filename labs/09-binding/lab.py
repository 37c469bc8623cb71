"""Lab 09, binding: a rank takes the card that its local rank names, of those that it can see.

    torchrun --standalone --nproc-per-node 2 lab.py
    torchrun --standalone --nproc-per-node 2 lab.py --variant rank-as-device     passes: one node hides the mistake

Cards are stood in for by a table that numbers and refuses as CUDA does. A real card, where there is one, is asked too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from datetime import timedelta

import golden
import torch
import torch.distributed as dist

TOO_FAR = "CUDA error: invalid device ordinal"


class Cards:
    """A node's cards as one process sees them, in place of torch.cuda: `seen[i]` is the physical card behind cuda:i."""

    def __init__(self, count: int, visible: str | None) -> None:
        self.seen: list[int] = []
        self.current = 0  # where everything goes that is never told otherwise
        # CUDA's rule for CUDA_VISIBLE_DEVICES: in the order of the list, up to the first entry that names no card.
        for entry in map(str, range(count)) if visible is None else visible.split(","):
            if not entry.isdigit() or int(entry) >= count:
                break
            self.seen.append(int(entry))

    def set_device(self, index: int) -> None:
        if not 0 <= index < len(self.seen):
            raise RuntimeError(f"{TOO_FAR}\nasked for cuda:{index}, this process sees {len(self.seen)} (stand-in)")
        self.current = index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    variants = ["healthy", "rank-as-device", "hard-coded", "not-bound"]
    parser.add_argument("--variant", choices=variants, default="healthy")
    variant = parser.parse_args().variant
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    node, per_node = int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])

    # Bind before the group is made: NCCL makes its communicator on the card that is current.
    mine = []
    for scene in golden.SCENES:
        count, visible = golden.node(scene, per_node)
        cards = Cards(count, visible)
        if variant == "rank-as-device":
            cards.set_device(rank)  # BROKEN: right on node 0, out of range on the others
        elif variant == "hard-coded" and visible:
            cards.set_device(2)  # BROKEN: nvidia-smi's number; this process counts what it sees, from 0
        elif variant != "not-bound":  # BROKEN: nobody says which, so everybody takes cuda:0
            cards.set_device(local_rank)
        mine.append(f"node {node}, card {cards.seen[cards.current]}")
        where = f"{count} cards, CUDA_VISIBLE_DEVICES {visible or 'not set'}"
        print(f"rank {rank}, node {node}, {where}: cuda:{cards.current} is {mine[-1]}", flush=True)

    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    world = dist.get_world_size()
    everyone: list[list[str]] = [[] for _ in range(world)]
    dist.all_gather_object(everyone, mine)
    real = asked_cuda(local_rank) if torch.cuda.is_available() else None

    dist.barrier()  # compare when all communication is over
    golden.check("rank = node * ranks a node + local rank", [rank], [node * per_node + local_rank])
    for scene, bound in zip(golden.SCENES, zip(*everyone, strict=True), strict=True):
        golden.check(f"card of each rank, {scene}", bound, golden.cards(scene, world, per_node))
    for visible, seen in (("0,9,1", 1), ("-1", 0), ("1,0", 2)):
        golden.check(f"cards seen of 2 with {visible}", [len(Cards(2, visible).seen)], [seen])
    if real:
        said, alone, last = real
        golden.check("what CUDA says, and which card is cuda:0 if it alone is visible", [said, alone], [TOO_FAR, last])
        print(f"real card of rank {rank}: {last}, and one number too many gave: {said}", flush=True)
    else:
        print("not run: needs a GPU: the same questions put to CUDA itself", flush=True)
    print(f"golden ok: rank {rank} of {world}, local rank {local_rank}: a card of its own, in {len(mine)} scenes")
    dist.destroy_process_group()


def asked_cuda(local_rank: int) -> tuple[str, str, str]:
    """CUDA's word for a number too many; which card is cuda:0 where only the last one is seen; the last one."""
    said, last = "nothing", torch.cuda.device_count() - 1
    try:
        torch.cuda.set_device(last + 1)
    except RuntimeError as error:
        said = str(error).splitlines()[0]
    torch.cuda.set_device(local_rank % (last + 1))  # fewer cards than ranks: this lab alone may share them
    inherited = os.environ.get("CUDA_VISIBLE_DEVICES")
    name = inherited.split(",")[last] if inherited else str(last)
    ask = "import torch; print(torch.cuda.get_device_properties(0).uuid)"
    child = os.environ | {"CUDA_VISIBLE_DEVICES": name}
    alone = subprocess.run([sys.executable, "-c", ask], env=child, capture_output=True, text=True, timeout=120)
    return said, alone.stdout.strip(), str(torch.cuda.get_device_properties(last).uuid)


if __name__ == "__main__":
    main()
