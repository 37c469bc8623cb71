"""Lab 02, the store: what the ranks know of each other, they read out of one small key-value server.

    torchrun --standalone --nproc-per-node 2 lab.py

Rank 0 hosts the server, everybody is a client. No process group is needed for it; in step 5 one is built from it.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import golden
import torch
import torch.distributed as dist

VARIANTS = ["healthy", "one-too-many", "collide", "nobody-hosts"]


class Barrier:
    """Nobody passes until `size` ranks have come: two store calls and no other magic.

    One counter serves every round: round 3 of 4 ranks is full when it reads 12.
    """

    def __init__(self, store: dist.Store, size: int, timeout: timedelta) -> None:
        self.store, self.size, self.timeout, self.round = store, size, timeout, 0

    def wait(self) -> None:
        self.round += 1
        if self.store.add("barrier/arrived", 1) == self.round * self.size:  # the last to come opens the door
            self.store.set(f"barrier/go{self.round}", "")
        self.store.wait([f"barrier/go{self.round}"], self.timeout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=VARIANTS, default="healthy")
    parser.add_argument("--port", type=int, default=29555, help="where the store listens; MASTER_PORT is torchrun's")
    args = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    # 1. One hosts, all connect. The default timeout is 300 s: a missing host would cost five minutes.
    hosting = rank == 0 and args.variant != "nobody-hosts"  # BROKEN there: every rank is a client
    patience = timedelta(seconds=5 if args.variant == "nobody-hosts" else 60)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], args.port, world, hosting, patience)

    # 2. set and get. get waits until the key is there, so it needs no "are you ready?" before it.
    store.set(f"hello/{rank}", golden.hello(rank))
    neighbour = store.get(f"hello/{(rank + 1) % world}").decode()

    # 3. add is atomic: however the calls fall, no two ranks get the same number.
    ticket = store.add("tickets", 1)
    store.set(f"ticket/{rank}", str(ticket))

    # 4. A barrier from add and wait: behind it, whatever any rank set before it is there.
    too_many = args.variant == "one-too-many"
    comers = world + 1 if too_many else world  # BROKEN there: one of them never comes
    barrier = Barrier(store, comers, timedelta(seconds=5 if too_many else 30))
    barrier.wait()
    keys = store.num_keys()
    drawn = sorted(int(store.get(f"ticket/{r}")) for r in range(world))
    barrier.wait()  # or a quick rank would add the keys of step 5 while a slow one still counts
    print(f"rank {rank} of {world}: read '{neighbour}', drew ticket {ticket}, sees {keys} keys", flush=True)

    # 5. Two users, one key name. A PrefixStore puts the user's name before every key.
    users = ["data", "model"]
    shared = {user: store if args.variant == "collide" else dist.PrefixStore(user, store) for user in users}
    for user in users:
        shared[user].add("seen", 1)  # BROKEN in collide: both users count in the same key
    barrier.wait()
    counts = [shared[user].add("seen", 0) for user in users]  # adding 0 reads a counter

    # 6. A process group needs no more than such a store: ranks leave their addresses in it and read the others'.
    before = store.num_keys()
    barrier.wait()
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=world)
    x = torch.ones(1)
    dist.all_reduce(x)
    kind, added = type(dist.group.WORLD.get_group_store()).__name__, store.num_keys() - before
    print(f"rank {rank} of {world}: the group's store is a {kind}, making the group added {added} keys", flush=True)
    dist.destroy_process_group()

    # 7. The host leaves last, or the others would lose the store in the middle of a call.
    if store.add("bye", 1) == world:
        store.set("bye/all", "")
    if rank == 0:
        store.wait(["bye/all"])

    golden.check("the neighbour's greeting", [neighbour], [golden.hello((rank + 1) % world)])
    golden.check("tickets of all ranks", drawn, golden.tickets(world))
    golden.check("keys in the store", [keys], [len(golden.keys(world))])
    golden.check("counter 'seen' of data and model", counts, golden.counts(world, users))
    golden.check("store of the process group", [kind], ["PrefixStore"])
    golden.check("all_reduce over it", [int(x.item())], [world])
    print(f"golden ok: {world} tickets, {keys} keys, two users with a 'seen' of their own", flush=True)


if __name__ == "__main__":
    main()
