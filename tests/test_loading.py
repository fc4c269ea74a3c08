"""FSDP2 from one copy of the weights: it starts as from a whole model on each rank, in less host memory."""

import json
import re
import shutil

import pytest
import torch
from conftest import make_model_dir, run_specs, write_rows
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Ernie4_5_MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from common.tasks.moe import routing
from common.tasks.vision import image_files, image_models, images

SMALL = "--global_batch_size 4 --micro_batch_size 2 --num_updates 2 --warmup_updates 0 --dry_run"
TEXT = "--train_file DIR/rows.jsonl --sequence_length 32"
# Each recipe's models from scratch, and pretrained ones that the fixture makes.
STARTS = {
    "lm": f"lm {TEXT} --model_config tiny",
    "lm-untied": f"lm {TEXT} --model_name_or_path DIR/untied",
    "classify": f"classify {TEXT} --model_config tiny",
    "classify-new-head": f"classify {TEXT} --model_name_or_path DIR/labeller --new_head",
    "seq2seq": f"seq2seq {TEXT} --model_config tiny --target_length 16",
    "seq2seq-pretrained": f"seq2seq {TEXT} --model_name_or_path DIR/pairs --target_length 16",
    "seq2seq-apart": f"seq2seq {TEXT} --model_name_or_path DIR/pairs-apart --target_length 16",
    "moe": f"moe {TEXT} --model_config tiny",
    "moe-pretrained": f"moe {TEXT} --model_name_or_path DIR/mixture",
    "moe-upcycled": f"moe {TEXT} --model_name_or_path DIR/plain --upcycle",
    "long_sequence": f"long_sequence {TEXT} --hidden_size 32 --segments 4",
    "convnet": "vision --model_config convnet",
    "vit": "vision --model_config vit",
    "resnet": "vision --model_config resnet --norm batch",
    "resnet-new-head": "vision --model_name_or_path DIR/resnet",
}
LARGE = f"lm {TEXT} --model_name_or_path DIR/large"


@pytest.fixture(scope="module")
def directory(functions_file, tmp_path_factory):
    """Rows for every recipe that reads text, and models in whose loading something is special."""
    path = tmp_path_factory.mktemp("loading")
    write_rows(path / "rows.jsonl", 40)
    make_model_dir(path / "plain", functions_file)
    # Its configuration ties what its weights keep apart: they are left apart.
    config = json.loads((make_model_dir(path / "untied", functions_file) / "config.json").read_text())
    (path / "untied/config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tokenizer = AutoTokenizer.from_pretrained(path / "plain")
    # A head for as many labels, of other names: loaded, and drawn again.
    labels = {"id2label": {0: "a", 1: "b"}, "label2id": {"a": 0, "b": 1}}
    labeller = AutoModelForSequenceClassification.from_pretrained(path / "plain", **labels)
    mixture = Ernie4_5_MoeForCausalLM(routing.upcycled_config(LlamaConfig.from_pretrained(path / "plain"), 4, 2))
    for layer in routing.find_layers(mixture):
        torch.nn.init.normal_(layer.bias_holder.e_score_correction_bias)  # what balancing has moved
    # 25 million parameters, 101 MB.
    large = LlamaConfig(
        vocab_size=384,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=6,
        num_attention_heads=8,
        max_position_embeddings=64,
    )
    resnet = image_models.NormResNetConfig(
        norm="batch",
        small_images=True,
        num_channels=1,
        embedding_size=8,
        hidden_sizes=[8],
        depths=[1],
        layer_type="basic",
        **labels,
    )
    resnet = image_models.NormResNet(resnet)
    for buffer in resnet.buffers():
        buffer.copy_(torch.rand(buffer.shape) + 1)
    # Its files say how it generates.
    t5 = T5Config(
        vocab_size=384, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, pad_token_id=2, decoder_start_token_id=2
    )
    pairs = T5ForConditionalGeneration(t5)
    pairs.generation_config.no_repeat_ngram_size = 3
    models = {
        "pairs": pairs,
        "labeller": labeller,
        "mixture": mixture,
        "large": LlamaForCausalLM(large),
        "resnet": resnet,
    }
    for name, model in models.items():
        model.save_pretrained(path / name)
        if name != "resnet":
            tokenizer.save_pretrained(path / name)
    # Its encoder has an embedding of its own, which its configuration ties.
    shutil.copytree(path / "pairs", path / "pairs-apart")
    own = {"encoder.embed_tokens.weight": torch.randn(384, 32)}
    weights = load_file(path / "pairs/model.safetensors") | own
    save_file(weights, path / "pairs-apart/model.safetensors", metadata={"format": "pt"})
    images.preprocess(image_files.digits("train")).save_pretrained(path / "resnet")
    return path


def start(directory, runs):
    """Starts each of `runs` on two processes: {name: (command of a recipe, changes)}; in one launch."""
    specs = []
    for name, (command, changes) in runs.items():
        recipe, *flags = f"{command} {SMALL} --output_dir DIR/out/{name}".replace("DIR", str(directory)).split()
        specs.append((flags, changes | {"no_prediction": 1}, recipe))
    # As a user starts it, who names no number of threads.
    return run_specs("all", specs, directory, "fsdp2_offload", OMP_NUM_THREADS=None)


@pytest.fixture(scope="module")
def started(directory):
    """What each rank has after `prepare`: with one copy of the weights, and with a whole model on each rank.

    And by how many bytes each rank grew until then, for a model of 100 MB; last, when all is imported.
    """
    runs = {"another-seed": (f"{STARTS['lm']} --seed 1", {"save_start": str(directory / "another-seed")})}
    runs["of-eight-cores"] = (STARTS["lm"], {"cores": 8, "save_start": str(directory / "of-eight-cores")})
    for name, command in STARTS.items():
        runs[name] = (command, {"save_start": str(directory / name)})
        whole = str(directory / f"{name}-whole")
        runs[f"{name}-whole"] = (command, {"whole_model_on_each_rank": 1, "save_start": whole})
    sizes = {
        "large": (LARGE, {"measure_start": str(directory / "large")}),
        "large-whole": (LARGE, {"whole_model_on_each_rank": 1, "measure_start": str(directory / "large-whole")}),
    }
    printed = start(directory, runs | sizes).stdout
    starts = {name: [torch.load(directory / f"{name}-{rank}.pt") for rank in range(2)] for name in runs}
    return printed, starts, {name: int((directory / f"{name}-1").read_text()) for name in sizes}


@pytest.mark.parametrize("name", STARTS)
def test_every_start_is_that_of_a_whole_model_on_each_rank(name, started):
    """Weights and buffers bit for bit, what is tied, what is trained, and the optimizer's groups; on both ranks."""
    starts = started[1]
    for one, whole in zip(starts[name], starts[f"{name}-whole"], strict=True):
        assert one["weights"] and one["weights"].keys() == whole["weights"].keys()
        for kind in ("weights", "buffers"):
            assert_close(one[kind], whole[kind], rtol=0, atol=0)
        for kind in ("tied", "trained", "groups", "generation"):
            assert one[kind] == whole[kind]


def test_the_starts_are_those_that_could_go_wrong(started):
    """Tied and untied heads, buffers that are saved and not as they are made, and two groups of the optimizer."""
    starts = {name: ranks[1] for name, ranks in started[1].items()}
    assert not torch.equal(
        *(starts[name]["weights"]["model.layers.0.mlp.up_proj.weight"] for name in ("lm", "another-seed"))
    )
    tied = {name for name, one in starts.items() if len(set(one["tied"].values())) < len(one["tied"])}
    assert {"lm", "seq2seq", "moe"} <= tied and "lm-untied" not in tied
    assert "encoder.embed_tokens.weight" in starts["seq2seq-apart"]["weights"]
    assert starts["seq2seq-pretrained"]["generation"]["no_repeat_ngram_size"] == 3
    assert starts["resnet-new-head"]["buffers"]["resnet.embedder.embedder.normalization.running_var"].min() >= 1
    biases = [b for name, b in starts["moe-pretrained"]["buffers"].items() if name.endswith("e_score_correction_bias")]
    assert biases and all(bias.abs().min() > 0 for bias in biases)
    own_head = {name for name, one in starts.items() if len(one["groups"]) > 2}  # a new head has a rate of its own
    assert {"classify-new-head", "resnet-new-head"} <= own_head and not own_head & {"lm", "moe", "seq2seq"}
    assert all(len(one["groups"]) == 2 for name, one in starts.items() if name not in own_head)


def test_a_rank_that_offloads_has_its_share_of_the_cores(started):
    """torch's AdamW makes the updates; as the launcher starts two processes, each has one thread."""
    assert [one["threads"] for one in started[1]["of-eight-cores"]] == [4, 4]


def test_the_number_of_parameters_that_is_printed_is_the_whole_models(started):
    counts = re.findall(r"model  \w+, [\d,]+ parameters", started[0])[2:]  # the first are of "lm" too
    assert len(counts) == 2 * (len(STARTS) + 1) and counts[::2] == counts[1::2]


def test_a_rank_that_makes_no_model_needs_host_memory_for_its_shards_only(started, directory):
    """The second of two ranks; where it makes a model too, it needs the whole of that as well."""
    size = (directory / "large/model.safetensors").stat().st_size
    assert size > 100e6
    assert started[2]["large"] < 0.7 * size < size < started[2]["large-whole"], (size, started[2])
