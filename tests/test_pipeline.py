"""A model in stages makes the update of one process; what cannot be cut into stages is refused."""

import itertools
import re
import signal
import time
from functools import partial

import pytest
import torch
import yaml
from accelerate import PartialState
from conftest import (
    ROOT,
    assert_refused,
    assert_same_update,
    example_flags,
    launch,
    recipe_arguments,
    relative_difference,
    results_of,
    run_in_float64,
    save_models,
    specs_command,
)
from running import Run, find_rank, wait_for_updates, wait_until
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
    Starcoder2Config,
)

from common.argument_checks import check_arguments
from common.parallel.launch import parse_launch
from common.tasks.pipeline.stages import check_stages, choose_stage_starts
from common.training.process_grid import ProcessGrid
from common.training.recipe_traits import Traits

SIZES = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "pad_token_id": 2}
SIZES |= {"bos_token_id": 0, "eos_token_id": 1, "intermediate_size": 64, "max_position_embeddings": 64}
MODELS = {
    "tied": LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "one key head": LlamaConfig(**SIZES, num_key_value_heads=1),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8),
}
# Two stages; two pipelines of two; the other schedule; four stages.
LAYOUTS = {"2": ("pipeline", 2), "2 x 2": ("pipeline", 4), "gpipe": ("pipeline", 2), "4": ("four", 4)}

# In the place of --micro_batch_size 1.
OTHERS = {
    "tokens": ["--micro_batch_tokens", 100],
    "full": ["--micro_batch_size", 2, "--activation_checkpointing", "full"],
    "selective": ["--micro_batch_size", 2, "--activation_checkpointing", "selective"],
}


@pytest.fixture(scope="module")
def models(model_dir, tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"), MODELS, model_dir)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """The shipped config, with four stages."""
    settings = yaml.safe_load((ROOT / "accelerate_configs/pipeline.yaml").read_text())
    settings["parallelism_config"]["parallelism_config_pp_size"] = 4
    path = tmp_path_factory.mktemp("config") / "four.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.fixture(scope="module")
def runs(functions_file, models, four, tmp_path_factory):
    """Of each model and layout; clipping, evaluation, and a short last batch of an epoch that leaves ranks idle."""
    out, cuts = tmp_path_factory.mktemp("runs"), {}
    rows = out / "rows.jsonl"
    rows.write_text("".join(functions_file.read_text().splitlines(keepends=True)[:9]))
    more = ["--num_updates", 3, "--global_batch_size", 8, "--micro_batch_size", 1, "--learning_rate", 1e-3]
    more += ["--warmup_updates", 0, "--max_grad_norm", 0.5, "--validation_file", functions_file]
    for name in MODELS:
        given = example_flags(rows, models / name, out, *more)
        cuts[f"{name}, 1"] = (1, given, {}, "lm")
        for layout, (config, processes) in LAYOUTS.items():
            schedule = ["--schedule", "gpipe"] if layout == "gpipe" else []
            where = (four if config == "four" else config), processes
            cuts[f"{name}, {layout}"] = (where, [*given, *schedule], {})
    given = example_flags(rows, models / "tied", out, *more)
    for control in ("own_ends", "scaled_gradients"):
        cuts[control] = (LAYOUTS["2"], given, {control: 1})
    cuts["alone"] = (1, given, {})
    cuts["not finite"] = (LAYOUTS["2"], given, {"nan_loss": [1, 9]})  # in the second update, on the last stage
    for name, flags in OTHERS.items():
        at = given.index("--micro_batch_size")
        cuts[name] = (LAYOUTS["2"], [*given[:at], *flags, *given[at + 2 :]], {})
    return run_in_float64("pipeline", cuts, out)


@pytest.mark.parametrize("model", MODELS)
def test_a_pipeline_makes_the_update_of_one_process(model, runs):
    """Gradients of the first update to 1e-12, losses, norms and held-out losses of all, and the model that is written.

    Controls: each end keeps its own part of a tied weight's gradient; torch's schedules divide once more.
    """
    others = [f"{model}, {layout}" for layout in LAYOUTS] + ["alone", *OTHERS] * (model == "tied")
    assert_same_update(runs, f"{model}, 1", *others)
    _, metrics, expected = runs[f"{model}, 1"]
    weights = load_file(expected / "model/model.safetensors")
    for name in others:
        _, lines, directory = runs[name]
        for line, other in zip(lines, metrics, strict=True):
            assert line["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-11)
            assert (line["target_tokens"], line["learning_rate"]) == (other["target_tokens"], other["learning_rate"])
        held_out = [results_of(one)["validation_loss"] for one in (directory, expected)]
        assert held_out[0] == pytest.approx(held_out[1], rel=1e-11)
        written = load_file(directory / "model/model.safetensors")
        assert written.keys() == weights.keys()
        assert all((written[key] - weight).abs().max() < 1e-10 for key, weight in weights.items())
        AutoModelForCausalLM.from_pretrained(directory / "model")
    assert 0 < min(line["target_tokens"] for line in metrics) < max(line["target_tokens"] for line in metrics) / 4
    if model == "tied":
        for control in ("own_ends", "scaled_gradients"):
            assert relative_difference(runs[control][0], runs[f"{model}, 1"][0]) > 1e-3


def test_all_stages_skip_an_update_that_is_not_finite(runs):
    _, lines, _ = runs["not finite"]
    assert [line["loss"] is None for line in lines] == [False, True, False]
    assert lines[-1]["skipped_updates"] == 1


def test_a_lost_stage_ends_the_others_and_is_named(functions_file, models, tmp_path):
    """Killed; and one that stands still."""
    for number, what in ((signal.SIGKILL, "was lost"), (signal.SIGSTOP, "stopped answering")):
        out = tmp_path / number.name
        out.mkdir()
        given = example_flags(functions_file, models / "tied", out / "run", "--num_updates", 50_000)
        with Run(out) as run:
            launcher = run.start(specs_command("pipeline", [(given, {"silence": 5})], out, "pipeline"))
            wait_for_updates(out / "run", 3)
            find_rank(launcher, 1).send_signal(number)
            sent = time.monotonic()
            line = rf"error: rank 1 \(stage 2 of 2\) on host \S+ {what} at update \d+; this process \(rank 0\) ends"
            wait_until(lambda: re.search(line, run.output()), seconds=20)  # noqa: B023
            print(f"told {time.monotonic() - sent:.1f} s after {number.name}")
            if number == signal.SIGKILL:  # a launcher waits 30 s for one that stands still
                assert launcher.wait(timeout=20) != 0
            assert len(re.findall(line, run.output())) == 1


def test_the_cuts_are_the_best_of_all():
    """Beside all others, for random sizes. Of equal layers a large head has fewer beside it than the embedding."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        num_layers, num_stages = (
            int(torch.randint(low, high, (), generator=generator)) for low, high in ((4, 9), (1, 5))
        )
        parameters, products = torch.randint(1, 100, (2, num_layers + 2), generator=generator).tolist()

        def largest(cuts, amounts, num_layers=num_layers):
            starts = [0, *(cut + 1 for cut in cuts[1:-1]), num_layers + 2]
            return max(sum(amounts[a:b]) for a, b in itertools.pairwise(starts)) / sum(amounts)

        def size(cuts, parameters=parameters, products=products):
            return max(largest(cuts, parameters), largest(cuts, products))

        inner = itertools.combinations(range(1, num_layers), num_stages - 1)
        best = min(size([0, *cuts, num_layers]) for cuts in inner)
        cuts = choose_stage_starts(parameters, products, num_stages)
        assert len(cuts) == num_stages + 1 and size(cuts) == pytest.approx(best)
    assert choose_stage_starts([40, *[10] * 8, 40], [0, *[10] * 8, 40], 2) == [0, 5, 8]


REFUSED = {
    "no plan": (GPT2Config(), 2, "transformers has no pipeline plan .base_model_pp_plan. for gpt2"),
    "layers": (LlamaConfig(**SIZES), 8, "8 is more than the model's 4 layers; use at most 4"),
    "router": (MixtralConfig(output_router_logits=True), 2, "mixtral has a router loss .output_router_logits."),
    "images": (Gemma3Config(), 2, "gemma3 has inputs other than text"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_has_no_stages_is_refused(case, monkeypatch):
    config, stages, pattern = REFUSED[case]
    monkeypatch.setattr(PartialState(), "process_grid", ProcessGrid(stages, pipeline=stages), raising=False)
    (line,) = check_stages(config)
    assert re.search(pattern, line)
    monkeypatch.setattr(PartialState(), "process_grid", ProcessGrid(stages), raising=False)
    assert not [*check_stages(config)]


def test_too_few_micro_batches_are_refused_with_the_numbers():
    args = recipe_arguments("--global_batch_size", 8, "--micro_batch_size", 4)
    (line,) = check_arguments(args, True, Traits(size_flags=()), ProcessGrid(4, pipeline=4))
    assert "8 / (4 micro x 1 pipeline of 4 processes) = 2 micro-batches, fewer than the 4 stages" in line
    assert not check_arguments(args, True, Traits(size_flags=()), ProcessGrid(2, pipeline=2))


@pytest.mark.parametrize(("size", "stages", "expected"), [(8, 2, 1), (64, 2, 4), (64, 4, 4), (48, 2, 4), (2, 2, 1)])
def test_without_a_flag_there_are_micro_batches_for_every_stage(size, stages, expected):
    """Four for each, of up to 1024 tokens on a CPU."""
    args = recipe_arguments("--global_batch_size", size)
    args.micro_batch_tokens, args.sequence_length = None, 256
    assert not check_arguments(args, True, Traits(), ProcessGrid(stages, pipeline=stages))
    assert args.micro_batch_size == expected


def test_other_recipes_and_models_that_do_more_are_refused_before_anything_is_written(functions_file, models, tmp_path):
    given = example_flags(functions_file, models / "tied", tmp_path / "run")
    result = launch(*given, config="pipeline", check=False, CUDA_VISIBLE_DEVICES="")
    assert_refused(result, "pp_size to 2, and this recipe has no stages; run recipes/pipeline.py")
    run_pipeline = partial(
        launch, config="pipeline", script="recipes/pipeline.py", check=False, CUDA_VISIBLE_DEVICES=""
    )
    few = run_pipeline(*given, "--global_batch_size", 4, "--micro_batch_tokens", 4096)
    assert_refused(few, "--micro_batch_tokens 4096 makes 1 of a global batch, fewer than the 2 stages")
    # What each stage would do once more: to multiply the embedding, and dropout behind it.
    for config in (GraniteConfig(**SIZES, embedding_multiplier=12.0), Starcoder2Config(**SIZES, embedding_dropout=0.1)):
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / config.model_type)
        AutoTokenizer.from_pretrained(models / "tied").save_pretrained(tmp_path / config.model_type)
        result = run_pipeline(*example_flags(functions_file, tmp_path / config.model_type, tmp_path / "run"))
        assert_refused(result, "pp_size 2: .*ForCausalLM computes more than its embedding, layers", lines=None)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("size", ["pp", "sp", "tp"])
def test_a_number_of_stages_that_is_none_is_refused(size, tmp_path):
    settings = yaml.safe_load((ROOT / "accelerate_configs/pipeline.yaml").read_text())
    settings["parallelism_config"][f"parallelism_config_{size}_size"] = "two"
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(settings))
    launched = parse_launch(["--config_file", str(tmp_path / "two.yaml"), "recipes/lm.py"], environment={})
    assert launched.grid and launched.sizes[size] == 1
    (line,) = launched.file_problems
    assert f"parallelism_config_{size}_size is two; give a whole number" in line
