"""Measures the tokenisation of a large file, next to datasets.map, and starts on many short rows.

    python benchmarks/data.py                                   # 200 MB, three rounds
    python benchmarks/data.py --megabytes 1000 --rounds 1       # 1 GB
    python benchmarks/data.py --parts rows --rows 10_000_000    # runs of one update, with a cold and a warm cache

The files are made from the sources and texts of the installed packages, with changes if they are repeated. Every arm is
a process of its own, and the arms alternate. Its memory is the largest sum over all its processes of their proportional
set sizes (PSS), sampled every 0.1 s. `seconds` of tokenisation exclude imports and, for datasets.map, the time in which
`datasets` converts the file. Results: results/data-cpu.json, one entry per part and size.
"""

import argparse
import json
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import median

import psutil
from flags import positive

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

RESULTS = ROOT / "benchmarks/results/data-cpu.json"
ARMS = ("recipe", "datasets.map, 2 processes")
CHANGED = ("self", "name", "value", "data", "None", "return", "import", "the", "is", "to")


def texts():
    """Yields texts without end; in repetition k, words of CHANGED have a k at their end."""
    root = Path(os.__file__).parent
    paths = sorted(path for kind in ("*.py", "*.md", "*.rst", "*.txt", "*.pyi") for path in root.rglob(kind))
    random.Random(0).shuffle(paths)
    repetition = 0
    while True:
        for path in (one for one in paths if one.is_file()):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if repetition:
                text = re.sub(rf"\b({'|'.join(CHANGED)})\b", rf"\g<1>{repetition}", text)
            if text:
                yield text
        repetition += 1


def write_texts(path, num_bytes):
    with open(path, "w", encoding="utf-8") as file:
        for text in texts():
            file.write(text + "\n" if path.suffix == ".txt" else json.dumps({"text": text}, ensure_ascii=False) + "\n")
            if file.tell() >= num_bytes:
                return


def write_rows(path, num_rows):
    """Writes rows of 45 bytes or so: a sum and its result."""
    draw = random.Random(0)
    with open(path, "w") as file:
        for _ in range(num_rows):
            a, b = draw.randrange(1000), draw.randrange(100)
            file.write(f'{{"prompt": "{a} + {b} =", "completion": " {a + b}"}}\n')


def watch(command, **environment):
    """Runs a command; returns (its last line of output, seconds, largest memory of all its processes in bytes)."""
    started, peak = time.perf_counter(), 0
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([str(word) for word in command], cwd=ROOT, env=variables, stdout=output)
        while process.poll() is None:
            memory = 0
            for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
                try:
                    memory += member.memory_full_info().pss
                except psutil.Error:  # it has ended
                    continue
            peak = max(peak, memory)
            time.sleep(0.1)
        output.seek(0)
        lines = output.read().splitlines()
    if process.returncode:
        sys.exit(f"{shlex.join(map(str, command))} failed")
    return lines[-1] if lines else "", time.perf_counter() - started, peak


def tokenise(file, arm):
    """In its own process: prints the seconds."""
    from common.data.source_types import Source
    from common.data.text import tokenize
    from common.data.tokenizer import encode_plain, train_tokenizer

    tokenizer = train_tokenizer(Source(embedded="train"), 8192)
    with tempfile.TemporaryDirectory() as directory:
        if arm == ARMS[0]:
            started = time.perf_counter()
            tokenize(Source(files=(file,)), tokenizer, 512, cache_dir=directory)
        else:
            import datasets

            kind = "text" if file.endswith(".txt") else "json"
            rows = datasets.load_dataset(kind, data_files=file, split="train", cache_dir=directory)
            started = time.perf_counter()
            rows.map(
                lambda batch: {"input_ids": encode_plain(tokenizer, batch["text"])["input_ids"]},
                batched=True,
                num_proc=2,
                remove_columns=rows.column_names,
            )
        print(time.perf_counter() - started)


def measure_tokenising(args, directory):
    for kind in args.kinds:
        path = directory / f"texts.{kind}"
        write_texts(path, args.megabytes * 1e6)
        for _ in range(args.rounds):
            for arm in args.arms:
                seconds, _, memory = watch([sys.executable, __file__, "--child", path, arm])
                rate = path.stat().st_size / float(seconds) / 1e6
                run = {"part": f"{args.megabytes} MB .{kind}", "arm": arm}
                yield run | {"MB_per_second": rate, "memory_MB": memory / 1e6}
        path.unlink()


def measure_rows(args, directory):
    sizes = {"1,000": 1000, f"{args.rows:,}": args.rows}
    for number in sizes.values():
        write_rows(directory / f"{number}.jsonl", number)
    for _ in range(args.rounds):
        for name, number in sizes.items():
            with tempfile.TemporaryDirectory(dir=directory) as own:
                for cache in ("cold", "warm"):
                    command = [sys.executable, "recipes/lm.py", "--train_file", directory / f"{number}.jsonl"]
                    command += ["--num_updates", 1, "--sequence_length", 64, "--output_dir", f"{own}/{cache}"]
                    _, seconds, memory = watch(command, XDG_CACHE_HOME=f"{own}/cache")
                    yield {"part": f"{name} rows", "arm": cache, "seconds": seconds, "memory_MB": memory / 1e6}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("tokenising", "rows"), default=["tokenising"])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", choices=("jsonl", "txt"), default=["jsonl"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="for the files")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return tokenise(*args.child)
    runs = []
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        for part in args.parts:
            measure = measure_tokenising if part == "tokenising" else measure_rows
            for run in measure(args, Path(directory)):
                print(json.dumps(run), flush=True)
                runs.append(run)
    write(runs)


def write(runs):
    from machine import describe_machine  # imports torch, which would count as memory of the children

    from common.report.tracking import versions

    facts = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for part in dict.fromkeys(run["part"] for run in runs):
        own = [run for run in runs if run["part"] == part]
        medians = {}
        for arm in dict.fromkeys(run["arm"] for run in own):
            of_arm = [run for run in own if run["arm"] == arm]
            medians[arm] = {key: median(run[key] for run in of_arm) for key in of_arm[0] if key not in ("part", "arm")}
        facts[part] = {
            "date": date.today().isoformat(),
            "machine": describe_machine(),
            "versions": versions(),
            "command": shlex.join(["python", "benchmarks/data.py", *sys.argv[1:]]),
            "medians": medians,
            "runs": own,
        }
    RESULTS.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
