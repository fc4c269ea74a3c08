"""Measures what grows with the number of ranks: connections, heartbeats, metadata of checkpoints, split of a batch.

    .venv/bin/python benchmarks/scale.py                   # ten minutes on two cores, 64 to 8,192 ranks
    .venv/bin/python benchmarks/scale.py --ranks 2 64      # a minute

Each part runs the code of the training with the inputs that rank 0, or each rank, has in such a run. Only the other
ends of rank 0's connections are simulated (`scale_watch.py`). A checkpoint is written for each rank by `Writer`, with
the shards of a model that has as many tensors as one of 8 B parameters, of 8 elements each, because only metadata is
measured. CPU seconds, so that other programs change them little. Writes results/scale-cpu.json; docs/scale.md explains
the values.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from flags import output_dir
from machine import describe_machine

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common.checkpoint.format import FORMAT, MANIFEST, safetensors_header  # noqa: E402
from common.checkpoint.read import Reader, read_manifest  # noqa: E402
from common.checkpoint.save import random_states  # noqa: E402
from common.checkpoint.training_state import TrainingState  # noqa: E402
from common.checkpoint.write import Writer  # noqa: E402
from common.report.tracking import versions  # noqa: E402
from common.training.batching import sample_ids_of  # noqa: E402
from common.training.micro_batch_partition import split_global_batch  # noqa: E402

PER_HOST = 8  # ranks
NUM_WEIGHTS = 291  # of a Llama with 8 B parameters
LARGEST_CHECKPOINT = 1024  # ranks, because the metadata of 8,192 would be 1.3 GB of JSON
GLOBAL_BATCH_SIZE, NUM_SAMPLES = 65_536, 100_000_000


def cpu_seconds(action: Callable[[], Any]) -> tuple[float, Any]:
    """Returns the CPU seconds of a call, and its result."""
    began = time.process_time()
    result = action()
    return time.process_time() - began, result


def watch(ranks: int) -> list[dict[str, Any]]:
    """Returns the cost of liveness for rank 0, with several ranks per host and with one."""
    hosts = [1, PER_HOST] if ranks > PER_HOST else [1]
    command = [sys.executable, ROOT / "benchmarks/scale_watch.py", str(ranks)]
    return [json.loads(subprocess.check_output([*command, str(per_host)])) for per_host in hosts]


def store() -> dict[str, float]:
    """Returns the cost of a request to torch's key-value store, for the launcher's process and the rank together."""
    num_requests = 20_000
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    seconds, _ = cpu_seconds(lambda: [client.add("scale", 0) for _ in range(num_requests)])
    return {"CPU microseconds per request": 1e6 * seconds / num_requests}


def rank_metadata(rank: int, world_size: int) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Returns what FSDP2's rank `rank` saves: its shard of each weight and of both states of AdamW."""
    shard = {"dtype": "F32", "shape": [8 * world_size], "start": 8 * rank, "elements": 8}
    kinds = ("weight", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    names = [f"{kind}/model.layers.{n // 9}.self_attn.{n}.weight" for kind in kinds for n in range(NUM_WEIGHTS)]
    numbers = {f"optimizer.step/{name.partition('/')[2]}": 1.0 for name in names if name.startswith("weight/")}
    metadata = {"numbers": numbers, "number_dtypes": dict.fromkeys(numbers, "F32")}
    tensors = dict.fromkeys(names, shard)
    return metadata | {"random": random_states(torch.device("cpu")), "tensors": tensors}, [torch.zeros(8)] * len(names)


def checkpoint(ranks: int, directory: Path) -> dict[str, Any]:
    """Returns sizes of a checkpoint's metadata, and CPU seconds to read it."""
    agreement: Any = SimpleNamespace(rank=0, world=ranks, output_dir=directory, directory=directory / "checkpoints")
    writer = Writer(agreement, torch.device("cpu"), keep_last=1, keep_best=False)
    writer.is_awaited.set()
    partial = agreement.directory / "update-000001.partial"
    partial.mkdir(parents=True)
    for rank in range(ranks):
        agreement.rank = rank
        metadata, tensors = rank_metadata(rank, ranks)
        header = safetensors_header(zip(metadata["tensors"], tensors, strict=True))
        writer._write_rank(partial, metadata, [header, *tensors], None)
    identity = {"model": {}, "settings": {"optimizer": "adamw"}, "tokenizer": "", "dataset": "", "validation": None}
    state = TrainingState(update=1, samples=1)
    manifest = {"format": FORMAT, "update": 1, "samples": 1, **state.to_record(), "mode": "FSDP2", "scaler": {}}
    manifest |= {"world_size": ranks, "optimizer": "AdamW", "untrained": [], "identity": identity}
    committing, _ = cpu_seconds(lambda: writer._commit(manifest | {"architecture": "LlamaForCausalLM"}))
    path = agreement.directory / "update-000001"
    reading, manifest = cpu_seconds(lambda: read_manifest(path))
    opening, _ = cpu_seconds(lambda: Reader(path, manifest))
    return {
        "ranks": ranks,
        "files": 1 + len(manifest["files"]),
        "bytes of the manifest": (path / MANIFEST).stat().st_size,
        "bytes of a rank's JSON": (path / "rank-00000.json").stat().st_size,
        "bytes of its RNG states": len(json.dumps(random_states(torch.device("cpu")))),
        "CPU seconds to commit": committing,
        "CPU seconds to read the manifest": reading,
        "CPU seconds to read the JSON of all ranks": opening,
    }


def split(ranks: int) -> dict[str, Any]:
    """Returns CPU seconds per update in which each rank selects and splits a global batch."""
    lengths = np.random.default_rng(0).integers(1, 4097, GLOBAL_BATCH_SIZE)
    selecting, _ = cpu_seconds(lambda: sample_ids_of(7, NUM_SAMPLES, GLOBAL_BATCH_SIZE, 0))
    by_samples, _ = cpu_seconds(lambda: split_global_batch(lengths, ranks, micro_batch_size=4))
    by_tokens, _ = cpu_seconds(lambda: split_global_batch(lengths, ranks, micro_batch_tokens=16_384))
    return {
        "ranks": ranks,
        "CPU seconds to select the samples": selecting,
        "CPU seconds to split with --micro_batch_size 4": by_samples,
        "CPU seconds to split with --micro_batch_tokens 16384": by_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 64, 1024, 8192])
    parser.add_argument("--output_dir", type=output_dir, default=ROOT / "benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        checkpoints = [
            checkpoint(ranks, Path(work) / str(ranks)) for ranks in options.ranks if ranks <= LARGEST_CHECKPOINT
        ]
    report = {
        "command": f"benchmarks/scale.py --ranks {' '.join(map(str, options.ranks))}",
        "date": date.today().isoformat(),
        "machine": describe_machine(),
        "versions": versions(),
        "liveness of rank 0": [result for ranks in options.ranks for result in watch(ranks)],
        "key-value store": store(),
        "checkpoint": checkpoints,
        f"split of {GLOBAL_BATCH_SIZE} samples": [split(ranks) for ranks in options.ranks],
    }
    path = options.output_dir / "scale-cpu.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(path.read_text(), end="")


if __name__ == "__main__":
    main()
