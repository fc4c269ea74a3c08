"""--profile: a trace of three updates that Perfetto opens, a table of where their time went, and the same updates."""

import gzip
import json

import pytest
from conftest import assert_mistake, launch, read_metrics, run_recipe_alone, run_specs, write_rows

from common.report.profiling import PHASES, describe, where_time_went

RECIPES = ("classify", "lm", "long_sequence", "moe", "pipeline", "seq2seq", "vision")
RECORDED = [3, 4, 5]
ALWAYS = set(PHASES) - {"communication"}  # whose time is above zero in any run


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Flags for a few small updates with accumulation, and with an evaluation and a save among the recorded ones."""
    place = tmp_path_factory.mktemp("data")
    texts = ["--train_file", write_rows(place / "train.jsonl", 80), "--sequence_length", 64]
    texts += ["--validation_file", write_rows(place / "held_out.jsonl", 8)]
    shared = ["--num_updates", 8, "--eval_every", 5, "--save_every", 5, "--global_batch_size", 8]
    shared += ["--micro_batch_size", 2]
    return lambda recipe: [*shared, *(texts if recipe != "vision" else [])]


def traced(output_dir, rank=0):
    """The events of a rank's trace."""
    with gzip.open(output_dir / f"profile/trace-rank-{rank}.json.gz") as file:
        return json.load(file)["traceEvents"]


def profile_of(output_dir):
    return json.loads((output_dir / "run.json").read_text())["profile"]


def assert_profile(output_dir, printed, processes=1, updates=RECORDED):
    """Traces of all ranks that Perfetto's importer takes, of three updates, and a table that sums to their time."""
    assert len(list((output_dir / "profile").iterdir())) == processes
    for rank in range(processes):
        events = traced(output_dir, rank)
        for event in events:  # what ui.perfetto.dev needs of a slice
            assert event["ph"] != "X" or {"name", "pid", "tid", "ts", "dur"} <= event.keys()
        ranges = [event for event in events if event.get("cat") == "user_annotation"]
        names = [event["name"] for event in ranges]
        assert [name for name in names if name.startswith("Profiler")] == [f"ProfilerStep#{n}" for n in RECORDED]
        assert ALWAYS - {"other"} <= set(names)
    found = profile_of(output_dir)
    steps = [event["dur"] for event in traced(output_dir) if event["name"].startswith("ProfilerStep")]
    assert found["updates"] == updates and list(found["phases"]) == list(PHASES)
    assert sum(found["phases"].values()) == pytest.approx(found["seconds"]) == pytest.approx(sum(steps) / 1e6)
    assert all(found["phases"][phase] > 0 for phase in ALWAYS)
    assert describe(found).lstrip("\n") in printed and f"{output_dir}/profile/trace-rank-0.json.gz" in printed
    return found


def figures(output_dir):
    """What an update computes: every bit of it."""
    return [[line[key] for key in ("loss", "grad_norm", "sample_digest")] for line in read_metrics(output_dir)]


def assert_same_run(profiled, plain):
    assert figures(profiled) == figures(plain) and len(figures(plain)) == 8
    name = "model/model.safetensors"
    assert (profiled / name).read_bytes() == (plain / name).read_bytes()
    assert not (plain / "profile").exists() and "profile" not in json.loads((plain / "run.json").read_text())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_profile_of_each_recipe(recipe, small, tmp_path):
    """On one process nothing is communicated. Control: profiling that draws a random number, where there is dropout."""
    runs = [
        ([*small(recipe), "--profile", "--output_dir", tmp_path / "profiled"], {}),
        ([*small(recipe), "--output_dir", tmp_path / "plain"], {}),
        ([*small(recipe), "--profile", "--output_dir", tmp_path / "draws"], {"draw_in_profile": 1}),
    ]
    has_dropout = recipe == "seq2seq"
    printed = run_specs(recipe, runs[: 2 + has_dropout], tmp_path).stdout
    found = assert_profile(tmp_path / "profiled", printed)
    assert found["phases"]["communication"] == found["hidden_communication"] == 0
    assert_same_run(tmp_path / "profiled", tmp_path / "plain")
    if has_dropout:
        assert figures(tmp_path / "draws") != figures(tmp_path / "plain")


@pytest.mark.parametrize("config", ["multi_cpu", "fsdp2", "zero1", "pipeline", "tensor_parallel"])
def test_communication_of_several_processes(config, small, tmp_path, request):
    """Control: a rank that comes a second late to each update, for which the other one waits."""
    if config == "zero1":
        request.getfixturevalue("extensions")
    recipe = "pipeline" if config == "pipeline" else "lm"
    flags = [*small(recipe), "--profile", "--output_dir"]
    runs = [
        ([*flags, tmp_path / "profiled"], {}),
        ([*flags[:-2], "--output_dir", tmp_path / "plain"], {}),
        ([*flags, tmp_path / "late"], {"slow_phase": ["backward", 1, 1]}),
    ]
    runs = runs[: 2 + (config in ("multi_cpu", "fsdp2"))]
    printed = run_specs(recipe, runs, tmp_path, config, "--mixed_precision", "no").stdout
    found = assert_profile(tmp_path / "profiled", printed, processes=2)
    assert found["phases"]["communication"] > 0
    assert_same_run(tmp_path / "profiled", tmp_path / "plain")
    if len(runs) == 3:
        waited = profile_of(tmp_path / "late")["phases"]["communication"]
        assert waited > 2 > found["phases"]["communication"]


# Seconds of each call: 3 s in three updates, so that a busy machine does not hide them.
SLOW = {"data": 1, "forward": 0.25, "backward": 0.25, "clipping": 1, "optimizer": 1, "checkpoint": 3, "other": 1}


def test_what_is_slow_is_the_largest_phase(small, model_dir, tmp_path):
    """Each is delayed by 3 s in three updates. Control: without delay none of them takes half of it."""
    flags = [*small("lm"), "--model_name_or_path", model_dir, "--num_updates", 6, "--eval_every", 0, "--profile"]
    flags += ["--output_dir"]
    changes = {name: {"slow_phase": [name, seconds]} for name, seconds in SLOW.items()} | {"none": {}}
    run_specs("lm", [([*flags, tmp_path / name], change) for name, change in changes.items()], tmp_path)
    phases = {name: profile_of(tmp_path / name)["phases"] for name in changes}
    fast = phases.pop("none")
    for name, found in phases.items():
        phase = "optimizer" if name == "clipping" else name
        assert max(found, key=found.get) == phase and found[phase] > 3 > 2 * fast[phase], (name, found)


def test_a_profile_of_a_resumed_run_begins_where_it_resumes(small, tmp_path):
    """And a run that is stopped among the recorded updates says that it has none."""
    flags = [*small("lm"), "--profile", "--num_updates", 12, "--output_dir", tmp_path / "run"]
    printed = run_specs("lm", [(flags, {"signal_at": [4, 0, "SIGTERM", 1]})], tmp_path).stdout
    assert "stopped before three updates were recorded; no trace is written" in printed
    assert not (tmp_path / "run/profile").exists() and len(read_metrics(tmp_path / "run")) == 5
    printed = launch(*flags, "--resume").stdout
    assert_profile(tmp_path / "run", printed, updates=[8, 9, 10])
    assert len(read_metrics(tmp_path / "run")) == 12
    again = run_recipe_alone("lm.py", *flags, "--resume")
    assert_mistake(again, "--profile needs 6 updates, .* --num_updates 12 leaves 0; raise it")


def slice_of(cat, name, start, end, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": end - start, "args": args}


def test_the_time_of_a_gpu_belongs_to_what_launched_its_kernels():
    """Microseconds of a trace as CUDA's look, made by hand: this test needs no GPU, and tests/test_gpu.py takes one."""
    host = [
        slice_of("user_annotation", "ProfilerStep#3", 0, 100),
        slice_of("user_annotation", "data", 0, 10),
        slice_of("user_annotation", "forward", 10, 40),
        slice_of("user_annotation", "backward", 20, 30),
        slice_of("cuda_runtime", "cudaLaunchKernel", 12, 13, correlation=1),
        slice_of("cuda_runtime", "cudaLaunchKernel", 22, 23, tid=2, correlation=2),  # autograd's thread
        slice_of("cuda_runtime", "cudaLaunchKernel", 23, 24, tid=2, correlation=3),
        slice_of("cuda_runtime", "cudaMemcpyAsync", 8, 9, correlation=4),
    ]
    device = [
        slice_of("gpu_memcpy", "Memcpy HtoD", 9, 17, tid=7, correlation=4),
        slice_of("kernel", "gemm", 15, 35, tid=7, correlation=1),
        slice_of("kernel", "gemm", 35, 60, tid=7, correlation=2),
        slice_of("kernel", "ncclDevKernel_AllReduce", 50, 75, tid=8, correlation=3),
        slice_of("gpu_user_annotation", "ProfilerStep#3", 15, 75, tid=7),
    ]
    found = where_time_went([*host, *device])
    phases = {name: round(seconds * 1e6) for name, seconds in found["phases"].items()}
    expected = {"data": 15, "forward": 20, "backward": 25, "communication": 15, "other": 25}
    assert phases == dict.fromkeys(PHASES, 0) | expected
    assert round(found["hidden_communication"] * 1e6) == 10
    kernels = {name: round(seconds * 1e6) for name, seconds in found["kernels"].items() if seconds}
    assert kernels == {"data": 8, "forward": 20, "backward": 25, "communication": 25}
    assert "how long its kernels ran" in describe(found | {"updates": RECORDED})
    assert "kernels" not in where_time_went(host)
