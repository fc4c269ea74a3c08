"""Under a limit of memory that is enforced, what --plan advises trains, and too much dies."""

import json
import re
import shlex
import sys
from bisect import bisect_left
from functools import cache

import pytest
from conftest import BIN, ROOT, base_env, run

sys.path.append(str(ROOT / "benchmarks"))
import memory_limit
import plan_limits

# Limits in bytes, above what a process takes that has imported torch: a build for CUDA takes 550 MiB more.
LIMITS = [size * 2**20 for size in (420, 484, 548)]
IMPORTED = "import torch, psutil; print(psutil.Process().memory_info().data)"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA limits mapped memory on Linux only")
def test_what_is_advised_lives_under_a_limit_and_too_much_dies(tmp_path):
    """At the first limit for which the plan has advice, it recomputes. Control: the double without that dies."""
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "README.md").read_text() * 12)
    flags = ["--train_file", text, "--sequence_length", 4096, "--global_batch_size", 2, "--num_updates", 2]
    flags += ["--warmup_updates", 1, "--save_every", 1, "--output_dir", tmp_path / "out"]

    def limited(limit, *command):
        return memory_limit.run_limited([str(word) for word in command], limit, "rlimit", cwd=ROOT, env=base_env())

    @cache
    def advice(limit):
        planned = limited(limit, BIN / "python", "-m", "tools.plan", "recipes/lm.py", *flags)
        assert planned.status == 0, planned.output
        found = re.search(r"^ +(accelerate launch .*)$", planned.output, re.MULTILINE)
        assert found or "nothing fits" in planned.output
        return found and found[1]

    imported = int(run([BIN / "python", "-c", IMPORTED]).stdout)
    limits = [imported + size for size in LIMITS]
    first = bisect_left(limits, True, key=lambda limit: advice(limit) is not None)
    assert first < len(limits), "nothing fits under any of these limits"
    limit = limits[first]
    _, _, *advised = shlex.split(advice(limit))
    assert advised[-1] in ("selective", "full")
    trained = limited(limit, BIN / "accelerate", "launch", *advised)
    assert trained.status == 0 and (tmp_path / "out/model/model.safetensors").is_file(), trained.output
    size = advised.index("--micro_batch_tokens") + 1
    advised[size] = str(2 * int(advised[size]))
    too_much = limited(limit, BIN / "accelerate", "launch", *advised[:-1], "none", "--overwrite")
    assert too_much.status and too_much.died, too_much.output


def test_the_page_is_made_from_its_measurements_and_counts_what_died():
    """Control: another peak is another page."""
    measured = json.loads((ROOT / "benchmarks/results/plan-limits-cpu.json").read_text())
    page = (ROOT / "benchmarks/results/plan-limits-cpu.md").read_text()
    assert plan_limits.page(measured) == page
    advised = [pair for pair in measured["pairs"] if pair["advice"]]
    died = sum(pair["advised"] != "trained" for pair in advised)
    assert f"{died} of {len(advised)} advised runs died" in page
    next(pair for pair in measured["pairs"] if pair["advice"])["peak"] *= 2
    assert plan_limits.page(measured) != page
