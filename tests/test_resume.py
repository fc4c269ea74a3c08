"""Every config and every recipe resumes bit for bit, in the precision that the config is for.

All is in use at once: an evaluation that falls on the save, --keep_best, dropout, accumulation and clipping. And in
every mode it makes the update of one process.
"""

import itertools
import json
import shutil

import numpy as np
import pytest
from conftest import (
    ROOT,
    assert_same_losses,
    make_model_dir,
    our_collectives,
    read_metrics,
    results_of,
    run_specs,
    write_rows,
)
from safetensors.torch import load_file
from test_checkpoint import manifest_of, outcome
from transformers import (
    AutoTokenizer,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from common.tasks.vision import image_files

pytestmark = pytest.mark.usefixtures("extensions")

# Their flags; ZeRO's files leave the precision to the launch. Those of several machines are run in test_multi_node.py,
# and with files (nvme) there are no checkpoints.
CONFIGS = {
    "cpu": ["--mixed_precision", "no"],
    "cpu_bf16": [],
    "single_gpu": [],
    "multi_cpu": [],
    "multi_gpu": [],
    "fsdp2": [],
    "fsdp2_offload": [],
    "hsdp": [],
    "sequence_parallel": [],
    "fsdp2_sequence_parallel": [],
    "pipeline": [],
    "tensor_parallel": [],
    "fsdp2_tensor_parallel": [],
    "zero1": ["--mixed_precision", "bf16"],
    "zero2": ["--mixed_precision", "bf16"],
    "zero3": ["--mixed_precision", "bf16"],
    "zero3_offload_cpu": ["--mixed_precision", "bf16"],
}
WITHOUT = {"multi_node", "multi_node_zero3", "zero3_offload_nvme"}
SEQ2SEQ = ["--sequence_length", 32, "--target_length", 16, "--generate", 0]
# What a recipe trains: DATA, FEW and MODEL stand for what the fixtures make. Dropout is in WITH_DROPOUT.
TEXT = ["--train_file", "DATA", "--validation_file", "FEW"]
RECIPES = {
    "lm": [*TEXT, "--model_name_or_path", "MODEL", "--shape", "examples", "--sequence_length", 32],
    "classify": [*TEXT, "--model_config", "tiny", "--sequence_length", 32],
    "seq2seq": [*TEXT, "--model_config", "tiny", *SEQ2SEQ],
    "moe": [*TEXT, "--model_config", "tiny", "--sequence_length", 32],
    "long_sequence": [*TEXT, "--hidden_size", 32, "--sequence_length", 256, "--segments", 4],
    "vision": ["--train_dir", "IMAGES", "--validation_dir", "FEW_IMAGES", "--model_config", "convnet"],
    "pipeline": [*TEXT, "--model_name_or_path", "MODEL", "--shape", "examples", "--sequence_length", 32],
    "dpo": [*TEXT, "--model_name_or_path", "MODEL", "--sequence_length", 64],
}
PAIRS = ["--sequence_length", 32, "--learn_temperature"]
REWARD = ["--sequence_length", 64, "--center_rewards", 0.1]
RECIPES["reward"] = [*TEXT, "--model_name_or_path", "MODEL", *REWARD]
RECIPES["embed"] = [*TEXT, "--model_config", "tiny", *PAIRS]
# A network of 2 attention heads; and what can share a sequence among processes, or its layers.
TRANSFORMER = [*TEXT, "--architecture", "transformer", "--num_layers", 2, "--sequence_length", 255]
SHARING = {"lm": RECIPES["lm"], "moe": RECIPES["moe"], "long_sequence": TRANSFORMER}
LLAMA = [*TEXT, "--model_name_or_path", "MODEL", "--sequence_length", 32]
CUT = {"lm": RECIPES["lm"], "classify": LLAMA, "long_sequence": TRANSFORMER, "dpo": RECIPES["dpo"]}
# And adapters of pretrained models; lm.py's and classify.py's drop out.
LORA = ["--lora_rank", 4, "--lora_dropout", 0.1]
ADAPTERS = {
    "lm-lora": [*RECIPES["lm"], *LORA],
    "classify-lora": [*TEXT, "--model_name_or_path", "LLAMA", "--sequence_length", 32, *LORA, "--use_rslora"],
    "seq2seq-lora": [*TEXT, "--model_name_or_path", "T5", *SEQ2SEQ, *LORA[:2]],
    "moe-lora": [*TEXT, "--model_name_or_path", "MIXTRAL", "--sequence_length", 32, *LORA[:2]],
    "embed-lora": [*TEXT, "--model_name_or_path", "LLAMA", *PAIRS, *LORA],
}
# A base in 4 bits, which DeepSpeed does not support.
QUANTIZED = {"lm-nf4": [*RECIPES["lm"], *LORA, "--quantize", "nf4"]}
LOSSES = {f"dpo-{loss}": [*RECIPES["dpo"], "--loss", loss] for loss in ("kto", "orpo")}
DOCUMENTS = {"lm-documents": [*LLAMA, "--document_mask"], "lm-packed": [*LLAMA, "--shape", "packed"]}
TAUGHT = {"lm-teacher": [*LLAMA, "--shape", "packed", "--teacher", "LLAMA"]}
WITH_DROPOUT = ("lm", "classify", "seq2seq", "vision", "embed")
# A plain process, and each way in which weights are held: with all recipes, and the adapters of all. The other configs
# change the precision, the place or the number of the copies of such weights, and of what a checkpoint holds nothing
# that depends on the recipe but the buffers of SOME.
EACH_WAY = ("cpu_bf16", "multi_gpu", "fsdp2", "zero2", "zero3")
SOME = ("lm", "moe", "vision")
ROWS = {"DATA": 40, "HELD_OUT": 7, "FEW": 5}
NUM_UPDATES, SAVED = 3, 2


def test_no_config_and_no_recipe_is_left_out():
    assert {path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")} == CONFIGS.keys() | WITHOUT
    assert {path.stem for path in (ROOT / "recipes").glob("*.py")} == RECIPES.keys()
    assert RECIPES.keys() - EQUAL.keys() == {"lm", "pipeline"} and ADAPTERS.keys() <= EQUAL.keys()


def write_digits(directory):
    """Folders of images, of which as many are held out as rows of a text."""
    digits = image_files.digits("train")
    for index, label in zip(range(ROWS["DATA"] + ROWS["HELD_OUT"]), digits.labels, strict=False):
        path = directory / ("images" if index < ROWS["DATA"] else "few_images") / str(label % 2)
        path.mkdir(parents=True, exist_ok=True)
        digits.read(index).save(path / f"{index}.png")
    return {"IMAGES": directory / "images", "FEW_IMAGES": directory / "few_images"}


@pytest.fixture(scope="module")
def data(functions_file, model_dir, tmp_path_factory):
    """One file for every recipe that reads text, a model with dropout for lm.py, and models without."""
    directory = tmp_path_factory.mktemp("resume")
    texts = {name: write_rows(directory / f"{name}.jsonl", rows) for name, rows in ROWS.items()}
    model = make_model_dir(directory / "model", functions_file, attention_dropout=0.1)
    sizes = {"vocab_size": 384, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    sizes |= {"pad_token_id": 2, "decoder_start_token_id": 2, "dropout_rate": 0.0}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(directory / "t5")
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(directory / "t5")
    sizes = {"vocab_size": 384, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    MixtralForCausalLM(MixtralConfig(**sizes)).save_pretrained(directory / "mixtral")
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(directory / "mixtral")
    texts |= write_digits(directory)
    models = {"MODEL": model, "LLAMA": model_dir, "T5": directory / "t5", "MIXTRAL": directory / "mixtral"}
    return texts | models


def flags(own, data, output_dir, processes, *more):
    own = [data.get(part, part) for part in own]
    base = ["--num_updates", NUM_UPDATES, "--global_batch_size", 8, "--micro_batch_size", 4 // processes or 1]
    base += ["--save_every", SAVED, "--eval_every", SAVED, "--keep_best", "--keep_last", 9, "--warmup_updates", 1]
    return [*own, *base, "--max_grad_norm", 0.5, "--output_dir", output_dir, *more]


def with_optimizers(recipes, *optimizers):
    """Each recipe with each optimizer."""
    pairs = itertools.product(recipes.items(), optimizers)
    return {f"{name}-{optimizer}": [*own, "--optimizer", optimizer] for (name, own), optimizer in pairs}


def recipes_of(config):
    if "sequence" in config or "tensor" in config:
        sharing = SHARING | {"lm-lora": ADAPTERS["lm-lora"]}
        return sharing if "sequence" in config else CUT | with_optimizers({"lm": RECIPES["lm"]}, "muon")
    if config == "pipeline":
        return {"pipeline": RECIPES["pipeline"]} | with_optimizers({"pipeline": RECIPES["pipeline"]}, "muon")
    if config not in EACH_WAY:
        return {name: RECIPES[name] for name in SOME} | {"lm-lora": ADAPTERS["lm-lora"]}
    more, every = {} if config.startswith("zero") else QUANTIZED, RECIPES.keys() - {"pipeline"}
    if config == "fsdp2":  # a recurrent network has no hidden matrix; the ConvNet's blocks would be in two shards
        more = more | {"dpo-nf4": [*RECIPES["dpo"], *LORA[:2], *QUANTIZED["lm-nf4"][-2:]]} | LOSSES | DOCUMENTS | TAUGHT
        # Models of each kind: what a recipe does else is the same with every optimizer.
        split = {name: RECIPES[name] for name in ("lm", "moe", "seq2seq")} | {"long_sequence": TRANSFORMER}
        more = more | with_optimizers(split | {"vision": RECIPES["vision"]}, "muon")
        more = more | with_optimizers(split, "adamw8bit")
    return {name: own for name, own in RECIPES.items() if name in every} | ADAPTERS | more


def run_matrix(config, recipes, data, tmp_path, first=None, second=None):
    """Each recipe runs as a whole, then goes on from a copy of what it had saved; all in one launch.

    With one config they count their FLOPs, which comes between the resume and the first update.

    first, second: changes of tests/run_recipe.py for the two runs.
    """
    alone = ("cpu", "single_gpu", "sequence_parallel", "tensor_parallel", "pipeline")
    shares = {"hsdp": 4} | dict.fromkeys(alone, 1)  # of a global batch
    shares = shares.get(config, 2)
    runs, own = [], recipes_of(config)
    for recipe in recipes:
        whole, again = str(tmp_path / recipe), str(tmp_path / f"{recipe}-again")
        counted = {"flops": 1} if config == "cpu_bf16" else {}
        runs.append((flags(own[recipe], data, whole, shares), counted | (first or {}), recipe.partition("-")[0]))
        changes = counted | {"copy_run": [whole, again, SAVED], **(second or {})}
        runs.append((flags(own[recipe], data, again, shares, "--resume"), changes, recipe.partition("-")[0]))
    run_specs("all", runs, tmp_path, config, *CONFIGS[config])


@pytest.mark.parametrize("config", CONFIGS)
def test_every_recipe_resumes_bit_for_bit(config, data, tmp_path):
    recipes = recipes_of(config)
    run_matrix(config, recipes, data, tmp_path)
    facts = json.loads((tmp_path / f"{next(iter(recipes))}/run.json").read_text())
    modes = dict.fromkeys(("cpu", "cpu_bf16", "single_gpu"), "plain")
    ddp = ("multi_cpu", "multi_gpu", "sequence_parallel", "tensor_parallel", "pipeline")
    modes |= dict.fromkeys(ddp, "DDP")
    mode = modes.get(config)
    assert facts["mode"] == (mode or ("DeepSpeed" if config.startswith("zero") else "FSDP"))
    assert facts["mixed_precision"] == ("no" if config in ("cpu", "multi_cpu") else "bf16")
    ends = [{name: outcome(tmp_path / f"{name}{end}", NUM_UPDATES) for name in recipes} for end in ("", "-again")]
    assert ends[0] == ends[1]
    for name in recipes:
        metrics = read_metrics(tmp_path / name)
        assert ["validation_loss" in line for line in metrics] == [False, True, True], name
        assert manifest_of(tmp_path / name, SAVED)["position"]["best_validation_loss"] is not None, name
        for path in (tmp_path / name).glob("model/tokenizer.json"):  # a tokenizer that truncated the training data
            assert json.loads(path.read_text())["truncation"] is None, name


def test_a_resume_that_forgets_the_random_states_draws_another_dropout(data, tmp_path):
    """The control of the test above: dropout is in use, and the losses show it."""
    run_matrix("cpu_bf16", WITH_DROPOUT, data, tmp_path, second={"forget": "random"})
    for name in WITH_DROPOUT:
        whole, again = (outcome(tmp_path / f"{name}{end}", NUM_UPDATES)[0] for end in ("", "-again"))
        assert whole[:SAVED] == again[:SAVED] and whole[SAVED:] != again[SAVED:], name


# Without dropout, which each rank draws by itself, any number of processes makes the same update; they share 7
# held-out rows, none twice.
UNEVEN = ["--train_file", "DATA", "--validation_file", "HELD_OUT"]
EQUAL = {
    "classify": [*UNEVEN, "--model_name_or_path", "LLAMA", "--sequence_length", 32],
    "seq2seq": [*UNEVEN, "--model_name_or_path", "T5", "--sequence_length", 32, "--target_length", 16],
    "dpo": [*UNEVEN, "--model_name_or_path", "LLAMA", "--sequence_length", 64],
    "dpo-kto": [*UNEVEN, "--model_name_or_path", "LLAMA", "--sequence_length", 64, "--loss", "kto"],
    "dpo-orpo": [*UNEVEN, "--model_name_or_path", "LLAMA", "--sequence_length", 64, "--loss", "orpo"],
    "lm-documents": [*UNEVEN, "--model_name_or_path", "LLAMA", "--sequence_length", 32, "--document_mask"],
    "embed": [*UNEVEN, "--model_name_or_path", "LLAMA", *PAIRS],
    "reward": [*UNEVEN, "--model_name_or_path", "LLAMA", *REWARD],
    "moe": RECIPES["moe"],
    "moe-exact": [*RECIPES["moe"], "--balance", "exact"],
    "long_sequence": RECIPES["long_sequence"],
    "long_sequence-transformer": TRANSFORMER,
    # With Adam, whose steps do not shrink with a gradient, so few images would show the rounding of small gradients.
    "vision": [*RECIPES["vision"][:4], "--model_config", "resnet", "--num_workers", 1, "--optimizer", "sgd"],
    "lm-lora": [*UNEVEN, "--model_name_or_path", "LLAMA", "--sequence_length", 32, "--lora_rank", 4],
    "lm-dora": [*UNEVEN, "--model_name_or_path", "LLAMA", "--sequence_length", 32, "--lora_rank", 4, "--use_dora"],
    "lm-nf4": [
        *UNEVEN,
        "--model_name_or_path",
        "LLAMA",
        "--sequence_length",
        32,
        "--lora_rank",
        4,
        *QUANTIZED["lm-nf4"][-2:],
    ],
    "moe-lora": ADAPTERS["moe-lora"],
    "classify-lora": ADAPTERS["classify-lora"][:-1] + ["--lora_dropout", 0],
    "embed-lora": [*UNEVEN, "--model_name_or_path", "LLAMA", *PAIRS, "--lora_rank", 4],
    "seq2seq-lora": [*UNEVEN, *ADAPTERS["seq2seq-lora"][len(TEXT) :]],
}
FIGURES = {
    "validation_loss": 1e-5,
    "margin": 1e-4,
    "reward": 1e-4,
    "chrf": 1e-6,
}  # how far they may be off; these may not be at all:
FIGURES |= dict.fromkeys(("accuracy", "macro_f1", "examples", "num_generated", "expert_shares", "recall_at_1"), 0)
# Of a weight; of those of the others that were moved by Adam from small gradients, 2e-5.
WEIGHTS = {"classify": 1e-5, "moe": 1e-5, "moe-exact": 1e-5}
# Under ZeRO-3, whose sums are in another order, some processors' rounding sends a token to the other one of two experts
# that are as good. Shares of the tokens then differ by a few, and weights that few tokens move.
FLIPPED = {("zero3", "moe"): 1e-3, ("zero3", "moe-exact"): 2e-5}


def run_equal(config, data, out, names=EQUAL):
    """In float32, and with accumulation and clipping that count."""
    runs = [
        (
            flags(own, data, out / name, 1 if config == "cpu" else 2, "--learning_rate", 1e-3),
            {"count_collectives": str(out / f"{name}-n")},
            name.partition("-")[0],
        )
        for name, own in EQUAL.items()
        if name in names
    ]
    run_specs("equal", runs, out, config, "--mixed_precision", "no")
    return out


@pytest.fixture(scope="module")
def one_process(data, tmp_path_factory):
    return run_equal("cpu", data, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("config", ["multi_cpu", "fsdp2", "zero3", "sequence_parallel", "tensor_parallel"])
def test_every_recipe_makes_the_update_of_one_process(config, one_process, data, tmp_path):
    """Losses, norms, weights and held-out figures; in tests/test_modes.py lm.py does, under every config."""
    some = {"sequence_parallel": {"moe", "moe-exact"}, "tensor_parallel": {"classify", "dpo", "embed", "reward"}}
    names = some[config] | {"long_sequence-transformer"} if config in some else EQUAL.keys()
    names -= QUANTIZED.keys() if config == "zero3" else set()
    run_equal(config, data, tmp_path, names)
    for name in names:
        assert_same_losses(tmp_path / name, one_process / name)
        figures, expected = results_of(tmp_path / name), results_of(one_process / name)
        assert "validation_loss" in figures and figures.get("num_generated", 7) == 7
        for figure in expected.keys() & FIGURES.keys():
            rel = FIGURES[figure]
            if figure == "expert_shares" and (config, name) in FLIPPED:
                assert np.abs(np.subtract(figures[figure], expected[figure])).max() < 1e-2
                continue
            assert figures[figure] == (pytest.approx(expected[figure], rel=rel) if rel else expected[figure]), name
        ours, expected = (next((out / name / "model").glob("*.safetensors")) for out in (tmp_path, one_process))
        weights = load_file(ours)
        for key, weight in load_file(expected).items():
            is_counted = key.endswith("e_score_correction_bias")  # moved by whole numbers of tokens
            most = 0 if is_counted else FLIPPED.get((config, name), WEIGHTS.get(name, 2e-5))
            assert (weight - weights[key]).abs().max() <= most, (name, key)
        # Before the first backward.
        counts = {"moe-exact": ["routing.begin_update"], "dpo-kto": ["baseline._estimate"]}
        counts = counts.get(name, ["replay.embed"] if "embed" in name else [])
        ours = our_collectives(tmp_path / f"{name}-n", 2)
        # The second and the last one are saved.
        assert ours[0] == ours[2][: len(ours[0])] == [*counts, "accumulation.sum_over_ranks"], name


FP16 = {"fp16": 1}


@pytest.mark.parametrize(
    ("config", "changes"), [("fsdp2", FP16), ("multi_gpu", FP16), ("zero1", {}), ("zero3", {})], ids=str
)
def test_a_save_after_a_skipped_update_is_complete(config, changes, data, tmp_path):
    """The update before the save overflows, and the evaluation comes after it. In fp16 the scale is halved too."""
    run_matrix(config, ["lm"], data, tmp_path, changes | {"nan_loss": [0, 3]}, changes)
    assert [line["loss"] is None for line in read_metrics(tmp_path / "lm")] == [False, True, False]
    saved = manifest_of(tmp_path / "lm", SAVED)
    assert saved["identity"]["settings"]["mixed_precision"] == ("fp16" if changes else "bf16")
    assert (saved["position"]["skipped_updates"], saved["untrained"]) == (1, [])
    assert not changes or saved["scaler"]["scale"] == 8 * 2 / 2  # doubled after the first update, then halved
    assert outcome(tmp_path / "lm", NUM_UPDATES) == outcome(tmp_path / "lm-again", NUM_UPDATES)


def test_a_finished_run_keeps_what_its_training_took(data, tmp_path):
    """Resumed with nothing left to train; the best model is measured and written all the same."""
    # At that rate the first checkpoint is the best one.
    given = flags(RECIPES["lm"], data, tmp_path / "run", 1, "--learning_rate", 10)
    run_specs("lm", [(given, {})], tmp_path)
    first = json.loads((tmp_path / "run/run.json").read_text())
    shutil.rmtree(tmp_path / "run/model")
    printed = run_specs("lm", [([*given, "--resume", "--load_best_at_end"], {})], tmp_path).stdout
    assert "nothing was left to train" in printed and "\ntrained in 0 s, 0 tokens" not in printed
    again = json.loads((tmp_path / "run/run.json").read_text())
    took = ["training_seconds", "tokens_per_second", "padding_share", "waiting_for_data", "memory_growth_bytes"]
    assert [again["results"][name] for name in took] == [first["results"][name] for name in took]
    assert again["status"] == "finished" and (tmp_path / "run/model/model.safetensors").exists()
    assert (first["results"]["best"]["is_model"], again["results"]["best"]["is_model"]) == (False, True)
    assert again["results"]["validation_loss"] < first["results"]["validation_loss"]
