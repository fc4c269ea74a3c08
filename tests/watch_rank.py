"""A rank of tests/test_watch_tree.py: a module of its own with few imports, because a server forks it for each rank."""

import json
import os
import sys
import time

from common.parallel import rank_watch
from common.parallel.channel import TOKEN
from common.training.process_grid import ProcessGrid

FIRST = {0: 0, 1: 0, 2: 2, 3: 2}  # rank to the first rank of its host


def be_rank(rank, port, directory, timeout, mistaken):
    """The process of a rank; its errors and the ranks that it is connected to go to files."""
    sys.stderr = open(directory / f"rank-{rank}", "w")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank - FIRST[rank])}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", TOKEN: "0123456789abcdef"}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    try:
        watch = rank_watch.RankWatch(rank, 4, timeout, "tree", ProcessGrid(4))
    except rank_watch.UserError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(2)
    watch.host = f"host{FIRST[rank]}"
    peers = directory / f"peers-{rank}"
    peers.with_suffix(".new").write_text(json.dumps(sorted(peer for peer, _ in watch.peers.values())))
    peers.with_suffix(".new").rename(peers)
    if rank == mistaken:
        watch.leave("x.json: no such file", 2)
        os._exit(2)
    time.sleep(60)
