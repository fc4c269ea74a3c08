"""Compares packed examples (`--shape packed`) with micro-batches of sorted examples (`--shape examples`).

    .venv/bin/python benchmarks/packing.py            a few minutes; writes benchmarks/results/packing-cpu.json
    .venv/bin/python benchmarks/packing.py --quick    smaller, and writes nothing

Forward and backward of a small Llama over the same examples of random tokens, for three distributions of lengths. The
arms take turns, and the median of the rounds is reported. Times are CPU seconds of one thread, so that other programs
on the machine change them little. `targets_per_cpu_second` counts only targets, so padding lowers it. `unmasked` is the
packed arm without a document mask: it shows the cost of the mask. `saved_mib` is the memory that a forward keeps for
its backward, in the largest micro-batch. `padding` is that of 2,048 examples, in updates of about 64 examples.

`attention` has the CPU seconds of forward and backward of attention alone, 8 heads of 64 over a row of 2,048 tokens, by
number of documents: `whole` with the mask of the row, `segments` as common/models/document_attention.py computes it.
"""

import argparse
import datetime
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from flags import positive  # noqa: E402
from machine import describe_machine  # noqa: E402
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig  # noqa: E402

from common import arguments as arguments  # noqa: E402  # before torch: see common/__init__.py
from common.data.documents import PackedExamples, pack  # noqa: E402
from common.data.text import Samples  # noqa: E402
from common.data.token_store import TokenWriter  # noqa: E402
from common.models.document_attention import SegmentedAttention  # noqa: E402
from common.models.load import attention_length  # noqa: E402
from common.models.untrained import build_untrained  # noqa: E402
from common.process import this_process  # noqa: E402
from common.report.tracking import versions  # noqa: E402
from common.training.batching import GlobalBatches, collate_tokens  # noqa: E402
from common.training.losses import sum_token_losses  # noqa: E402
from common.training.micro_batch_partition import split_global_batch  # noqa: E402

LENGTH, VOCABULARY, WIDTH = 512, 4096, 256
ARMS = ("sorted", "packed", "unmasked")
DOCUMENTS, ROW, HEADS, HEAD_SIZE = (4, 10, 40, 200), 2048, 8, 64  # of the measurement of attention alone


def draw_lengths(name: str, number: int) -> np.ndarray:
    """Lengths of examples in tokens, from 8 to LENGTH: (number,)."""
    generator = np.random.default_rng(0)
    lengths = {
        "uniform": lambda: generator.uniform(8, LENGTH, number),
        "log-normal": lambda: generator.lognormal(math.log(60), 0.8, number),  # short, with a long tail
        "bimodal": lambda: np.where(generator.random(number) < 0.8, 40, 440) + generator.uniform(-20, 20, number),
    }
    return lengths[name]().clip(8, LENGTH).astype(int)


def write_store(directory: Path, lengths: np.ndarray) -> None:
    """Writes examples of random tokens; the first token of each is not a target."""
    generator, targets = np.random.default_rng(1), 0
    with TokenWriter(directory, target_counts=[0]) as writer:
        for length in lengths:
            tokens = generator.integers(0, VOCABULARY, length + 1)
            tokens[0], targets = ~tokens[0], targets + length
            writer.append(tokens, target_counts=[targets])
        counts = Counter(targets=int(targets), dropped=0, max_length=int(lengths.max()), bytes=0)
        writer.finish(counts, whole_text=False, gzip_bytes=None, xz_bytes=None, end_tokens=[])


def padding(lengths: np.ndarray, budget: int, batch: int) -> float:
    """Returns the padding of samples in updates of `batch` samples, as a share of the computed tokens."""
    computed = 0
    for update in np.array_split(np.random.default_rng(2).permutation(lengths), len(lengths) // batch):
        for micro_batch in split_global_batch(update, 1, None, budget)[0]:
            computed += len(micro_batch) * int(update[micro_batch].max())
    return 1 - int(lengths.sum()) / computed


def step(model, batches: GlobalBatches, arm: str, storages: dict[int, int]) -> dict[str, float]:
    """Forward and backward of all examples, as a single global batch; returns its measurements.

    storages: bytes of each storage that autograd has saved, by its address; filled by a hook.
    """
    batch, saved = batches[0], []
    this_process().has_document_mask = arm == "packed"
    if arm == "unmasked":
        for micro_batch in batch.micro_batches:
            del micro_batch["position_ids"]
    model.zero_grad()
    began = time.process_time()
    for micro_batch in batch.micro_batches:
        storages.clear()
        loss = model(**micro_batch)
        saved.append(sum(storages.values()))
        (loss / batch.num_targets).backward()
    seconds = time.process_time() - began
    return {
        "targets_per_cpu_second": batch.num_targets / seconds,
        "saved_mib": max(saved) / 2**20,
        "micro_batches": len(batch.micro_batches),
    }


def make_batches(directory: Path, lengths: np.ndarray, config: LlamaConfig, budget: int) -> dict[str, GlobalBatches]:
    """The same examples as one global batch of each arm, in micro-batches of at most `budget` tokens."""
    write_store(directory, lengths)
    packed = PackedExamples(Samples(directory, LENGTH))
    return {
        arm: GlobalBatches(
            samples,
            lambda rows: collate_tokens(rows, 0),
            global_batch_size=len(samples),
            micro_batch_size=None,
            micro_batch_tokens=budget,
            rank=0,
            world_size=1,
            seed=0,
            attention_length=attention_length(config),
        )
        for arm, samples in zip(ARMS, (Samples(directory, LENGTH), packed, packed), strict=True)
    }


def measure(name: str, model, config: LlamaConfig, examples: int, rounds: int, budget: int) -> dict[str, dict]:
    """The measurements of each arm for a distribution of lengths; medians of the rounds."""
    storages: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory) / "store"
        store.mkdir()
        batches = make_batches(store, draw_lengths(name, examples), config, budget)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            found = [{arm: step(model, batches[arm], arm, storages) for arm in ARMS} for _ in range(1 + rounds)]
    found = found[1:]  # the first one warms up
    result = {arm: {key: statistics.median(each[arm][key] for each in found) for key in found[0][arm]} for arm in ARMS}
    lengths = draw_lengths(name, 2048)
    blocks = np.bincount(pack(lengths, LENGTH), lengths).astype(int)
    rows_per_block = len(lengths) / len(blocks)
    result["sorted"]["padding"] = padding(lengths, budget, 64)
    result["packed"]["padding"] = padding(blocks, budget, round(64 / rows_per_block))
    result["packed"]["rows_per_block"] = rows_per_block
    return result


def attention_seconds(attention, documents: int, dtype: torch.dtype, rounds: int) -> float:
    """CPU seconds of forward and backward over a row of `documents` documents of random lengths; median of rounds."""
    starts = np.random.default_rng(0).choice(np.arange(1, ROW), documents - 1, replace=False)
    numbers = torch.from_numpy(np.isin(np.arange(ROW), starts)).cumsum(0)
    mask = (numbers[:, None] == numbers).tril()[None, None]
    torch.manual_seed(0)
    inputs = [torch.randn(1, HEADS, ROW, HEAD_SIZE, dtype=dtype, requires_grad=True) for _ in range(3)]
    found = []
    for _ in range(1 + rounds):
        began = time.process_time()
        attention(torch.nn.Module(), *inputs, mask)[0].sum().backward()
        found.append(time.process_time() - began)
    return statistics.median(found[1:])  # the first one warms up


def measure_attention(attention, rounds: int) -> dict[str, dict]:
    """By precision and number of documents, the CPU seconds with the mask of the row and by segments."""
    ways = {"whole": attention, "segments": SegmentedAttention(attention)}
    return {
        str(dtype).removeprefix("torch."): {
            documents: {name: attention_seconds(way, documents, dtype, rounds) for name, way in ways.items()}
            for documents in DOCUMENTS
        }
        for dtype in (torch.float32, torch.bfloat16)
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small, and write nothing")
    parser.add_argument("--examples", type=int, default=48, help="examples of an update (default: 48)")
    parser.add_argument("--rounds", type=positive, default=2, help="measured rounds (default: 2)")
    parser.add_argument("--micro_batch_tokens", type=int, default=2048, help="tokens per micro-batch (default: 2048)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model = build_untrained(config, False, AutoModelForCausalLM)
    sum_token_losses(model)
    attention = AttentionInterface()["sdpa"]
    AttentionInterface.register("sdpa", SegmentedAttention(attention))
    results: dict[str, dict] = {}
    options = model, config, 12 if args.quick else args.examples, args.rounds, args.micro_batch_tokens
    for name in ("uniform", "log-normal", "bimodal"):
        results[name] = measure(name, *options)
        for arm, measured in results[name].items():
            print(f"{name:>10} {arm:>8} ", ", ".join(f"{key} {value:.4g}" for key, value in measured.items()))
    attended = measure_attention(attention, args.rounds)
    for precision, by_number in attended.items():
        for documents, ways in by_number.items():
            print(f"attention, {precision}, {documents} documents:", ways)
    if args.quick:
        return
    command = f"benchmarks/packing.py --examples {args.examples} --rounds {args.rounds}"
    facts = {"command": command, "date": datetime.date.today().isoformat(), "rounds": args.rounds}
    facts |= {"machine": describe_machine(), "threads": 1, "versions": versions()}
    facts |= {
        "examples": args.examples,
        "examples_for_padding": 2048,
        "micro_batch_tokens": args.micro_batch_tokens,
        "sequence_length": LENGTH,
        "model": sizes,
    }
    path = ROOT / "benchmarks/results/packing-cpu.json"
    path.write_text(json.dumps(facts | {"results": results, "attention": attended}, indent=1) + "\n")


if __name__ == "__main__":
    main()
