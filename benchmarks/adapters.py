"""Measures full training, an adapter, and an adapter on a 4-bit base: lm.py compared with TRL.

    .venv/bin/python benchmarks/adapters.py                                   110 M parameters; 20 minutes on two cores
    .venv/bin/python benchmarks/adapters.py --quick --output_dir runs/bench   a smoke test with toy models, in seconds

As in benchmarks/throughput.py, which lists what both arms have in common and how throughput and memory are measured,
each run is a new process, the order is ABBA, and ratios are computed within a round. Both arms use peft's adapters with
the same rank, alpha and layers (all linear layers except the head). In bf16, TRL loads the frozen base in bf16, as its
users would, and trains a full model in float32. Blocks of 512 tokens avoid padding.
"""

import argparse
import json
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from flags import output_dir, positive
from machine import describe_machine, device_name
from throughput import ON_GPU, begin, describe_row, num_threads, run_arm, this_command
from throughput_data import ROOT, prepare, settings_of

from common.report.tracking import versions

KINDS = {
    "full": [],
    "LoRA": ["--lora_rank", "16"],
    "LoRA, nf4": ["--lora_rank", "16", "--quantize", "nf4"],
}
ARMS = ("recipe", "sft")


def measure(args, work, results):
    """Measures each kind in each precision, in rounds of both arms; every second round in reverse order."""
    size = "quick" if args.quick else "medium"
    settings = settings_of("blocks", size, ON_GPU) | ({} if args.quick or ON_GPU else {"measured": 2})
    facts = prepare(work, "blocks", size, settings)
    results |= {"parameters": facts["parameters"], "samples": settings["global_batch"]}
    for precision in args.precisions:
        for kind, flags in KINDS.items():
            row = describe_row(args, "blocks", size, precision, settings, facts) | {"more": flags}
            for number in range(args.rounds):
                for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
                    measured = run_arm(args, arm, row, facts, work / f"blocks-{size}", work / "run")
                    results["runs"].append(
                        {"precision": precision, "kind": kind, "arm": arm, "round": number} | measured
                    )
                    values = f"{measured['tokens_per_second']:,.0f} tokens/s, "
                    values += f"{measured['memory_bytes'] / 1e6:,.0f} MB at most"
                    print(f"{precision}, {kind}, round {number + 1}, {arm}: {values}", flush=True)


def table(results):
    """Returns a row per kind: medians of both arms, and of the ratios within a round."""
    yield "| precision | what is trained | lm.py, tokens/s | TRL | lm.py is | lm.py, MB at most | TRL | lm.py is |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for precision, kind in dict.fromkeys((run["precision"], run["kind"]) for run in results["runs"]):
        cells = []
        for key, unit in (("tokens_per_second", 1), ("memory_bytes", 1e6)):
            ours, theirs = (
                [run[key] / unit for run in results["runs"] if (run["precision"], run["kind"], run["arm"]) == one]
                for one in ((precision, kind, arm) for arm in ARMS)
            )
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            cells += [f"{statistics.median(ours):,.0f}", f"{statistics.median(theirs):,.0f}", f"{ratio:.2f} times"]
        yield f"| {precision} | {kind} | {' | '.join(cells)} |"


def page(results):
    """Returns the page as Markdown."""
    paragraphs = [
        "# Adapters and a 4-bit base, compared with TRL",
        f"{results['parameters']:,} parameters, blocks of 512 tokens, {results['samples']} per update. "
        f"`{results['command']}`, {results['date']}, {results['machine']}, {results['threads']} threads.",
        "\n".join(table(results)),
        "Versions: " + ", ".join(f"{name} {number}" for name, number in results["versions"].items()) + ".",
    ]
    return "\n\n".join(paragraphs) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", choices=("float32", "bf16"), default=["float32", "bf16"])
    parser.add_argument("--rounds", type=positive, default=2, help="of both arms of every kind (default: 2)")
    parser.add_argument("--quick", action="store_true", help="seconds, with toy models: shows that it runs, no more")
    parser.add_argument("--output_dir", type=output_dir, default=ROOT / "benchmarks/results")
    args = parser.parse_args()
    args.micro_batch_tokens, args.tuned_tokens = None, 0
    with tempfile.TemporaryDirectory() as temporary:
        work = begin(Path(temporary))
        results = {"machine": describe_machine(), "threads": num_threads(), "date": time.strftime("%Y-%m-%d")}
        results |= {"versions": versions() | {"trl": version("trl")}, "command": this_command(), "runs": []}
        measure(args, work, results)
    data = args.output_dir / f"adapters-{device_name()}.json"
    data.write_text(json.dumps(results, indent=1) + "\n")
    data.with_suffix(".md").write_text(page(results))
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
