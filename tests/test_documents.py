"""Documents of a block do not attend to each other: the gradient of a block is the sum of those of its documents."""

import pickle
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import assert_refused, assert_same_update, read_metrics, run_in_float64, run_specs, source_of
from safetensors.torch import load_file
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    Qwen3Config,
)

from common.data.documents import pack
from common.data.text import tokenize
from common.errors import UserError
from common.models import document_attention
from common.models.document_masks import mask_documents
from common.models.untrained import build_untrained, empty_model
from common.process import this_process
from common.training.batching import collate_tokens
from common.training.losses import sum_token_losses
from common.training.process_grid import ProcessGrid

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 48, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
WINDOW = {"sliding_window": 3}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, **WINDOW),
    "gemma2": Gemma2Config(**SIZES, **WINDOW, query_pre_attn_scalar=8),
    "gemma3": Gemma3TextConfig(**SIZES, **WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, pad_token_id=0),
}


@pytest.fixture
def unmasked(monkeypatch):
    monkeypatch.setattr(this_process(), "has_document_mask", False)


@pytest.fixture
def note_calls(monkeypatch):
    """Returns a list of the lengths of attention calls, in rows that are split into segments of 4 tokens or more."""
    monkeypatch.setattr(document_attention, "LEAST", 4)
    before, lengths = AttentionInterface()["sdpa"], []

    def start():
        attention = AttentionInterface()["sdpa"]

        def counted(module, query, *given, **named):
            lengths.append(query.shape[2])
            return attention(module, query, *given, **named)

        AttentionInterface.register("sdpa", counted)
        document_attention.split_rows()
        document_attention.split_rows()  # has no effect
        return lengths

    yield start
    AttentionInterface.register("sdpa", before)


@pytest.fixture
def in_float64(monkeypatch):
    """Also the parts of a model that compute in float32 by themselves: Gemma's norms and its eager attention."""
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim))
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def document(tokens):
    """A sample of one document."""
    return tokens, tokens[1:], np.arange(len(tokens) - 1), np.arange(len(tokens))


def joined(documents):
    """A sample of a row of several documents."""
    starts = np.cumsum([0, *map(len, documents)])
    ids, targets, rows, positions = zip(*map(document, documents), strict=True)
    rows = [row + start for row, start in zip(rows, starts, strict=False)]
    return tuple(map(np.concatenate, (ids, targets, rows, positions)))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_gradient_of_a_block_is_the_sum_of_those_of_its_documents(name, unmasked, in_float64, note_calls):
    """With attention by segments on a CPU: of the whole row without a mask, of its parts with one."""
    torch.manual_seed(0)
    model = build_untrained(CONFIGS[name], False, AutoModelForCausalLM).eval()  # GPT-2 has dropout
    sum_token_losses(model)
    documents = [np.random.default_rng(n).integers(0, 64, n) for n in (7, 1, 5, 2, 9)]
    documents.insert(2, documents[1])  # two documents of one token in a row

    def gradients(*samples, keeps_positions=True):
        model.zero_grad()
        batch = collate_tokens(list(samples), 0)
        if not keeps_positions:
            del batch["position_ids"]
        model(**batch).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    blocks = joined(documents[:4]), joined(documents[4:])  # of different lengths, so that one is padded
    alone = sum(gradients(document(tokens)) for tokens in documents)
    plain = gradients(*blocks, keeps_positions=False)
    assert (plain - alone).norm() > 0.05 * alone.norm()  # the control
    with pytest.raises(UserError, match="positions restart within a row, but there is no document mask"):
        gradients(*blocks)
    mask_documents(empty_model(CONFIGS[name]), ProcessGrid(1))
    calls = note_calls()
    masked = gradients(*blocks)
    # In each of two layers: 7, then 1, 1 and 5 together; 2 and 9 together, then 3 of padding.
    assert sorted(calls) == ([] if name == "gemma2" else sorted(2 * [7, 7, 11, 3])), calls
    assert masked.dtype == torch.float64 and (masked - alone).norm() < 1e-12 * alone.norm()


def test_only_masks_of_documents_split_a_row(monkeypatch):
    """Other masks, and a position bias, are computed as a whole; so is a plan's row. Control: the mask itself."""
    monkeypatch.setattr(document_attention, "LEAST", 2)
    lengths = []

    def attention(module, query, key, value, mask, **given):
        lengths.append(query.shape[2])
        return query.transpose(1, 2), None

    def call(mask, length=8, rows=1, **given):
        lengths.clear()
        tensors = [torch.zeros(rows, 2, length, 4) for _ in range(3)]
        document_attention.SegmentedAttention(attention)(torch.nn.Module(), *tensors, mask, **given)
        return lengths

    numbers = torch.arange(8) // 4  # two documents of 4 tokens
    mask = (numbers[:, None] == numbers).tril()[None, None]
    assert call(mask) == [4, 4]
    as_float = torch.zeros(1, 1, 8, 8).masked_fill(~mask, -1e9)
    for other in (None, as_float, mask.expand(1, 2, 8, 8), mask[..., :7]):
        assert call(other) == [8]
    assert call(mask, position_bias=as_float) == [8]
    assert call(mask[..., :2, :2], length=2, rows=3) == [2]  # short rows stay together
    monkeypatch.setattr(this_process(), "has_fake_weights", True)
    assert call(mask) == [8]


def test_models_that_cannot_are_rejected_by_name(unmasked):
    mamba = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)
    bloom = BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    for config, why in (
        (mamba, "mamba passes information between tokens outside of attention in its layers of linear_attention; use"),
        (bloom, "bloom computes positions or masks itself"),
        (LlamaConfig(**SIZES, layer_types=["full_attention", "linear_attention"]), "in its layers of linear_attention"),
    ):
        with pytest.raises(UserError, match=f"^--document_mask .*{why}"):
            mask_documents(empty_model(config), ProcessGrid(1))
    for size in ("sequence", "pipeline"):
        with pytest.raises(UserError, match=rf"not supported with parallelism_config_{size[0]}\w_size 2; set it to 1"):
            mask_documents(empty_model(CONFIGS["llama"]), ProcessGrid(2, **{size: 2}))


# --- the samples

TEXTS = ["def f(x):\n    return x", "a", "", "b c", "for i in range(10):\n    print(i, i * i)", "pass"]


def test_blocks_restart_positions_and_targets_at_each_document(tokenizer, tmp_path):
    source = source_of(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    documents = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in TEXTS if text]
    stream = [(token, index) for document in documents for index, token in enumerate(document)]
    for length in (1, 2, 3, 5, 16, 1000):
        samples = tokenize(replace(source, document_mask=True), tokenizer, length, cache_dir=tmp_path / "cache")
        expected = []
        for start in range(0, len(stream) - 1, length):
            block, position, positions = stream[start : start + length + 1], 0, []
            for _, index in block[: min(length, len(block) - 1)]:
                position = position + 1 if index and positions else 0
                positions.append(position)
            rows = [row for row in range(len(block) - 1) if block[row + 1][1]]
            if rows:  # a block that has only the ends of documents is left out
                expected.append(([t for t, _ in block[:-1]], [block[row + 1][0] for row in rows], rows, positions))
        assert [tuple(map(np.ndarray.tolist, samples[i])) for i in range(len(samples))] == expected
        every = np.arange(len(samples))
        assert samples.num_targets(every).tolist() == [len(targets) for _, targets, *_ in expected]
        assert samples.lengths(every).tolist() == [len(ids) for ids, *_ in expected]
        assert samples.num_target_tokens == sum(len(document) - 1 for document in documents)
        assert "from 5 documents, each of which attends only to itself" in samples.describe()
    plain = tokenize(source, tokenizer, 16, cache_dir=tmp_path / "cache")
    assert len(plain[0]) == 3 and "(no document mask)" in plain.describe() and plain.fingerprint != samples.fingerprint


def test_flags_that_contradict_the_rows_are_refused(tokenizer, tmp_path):
    texts = source_of(tmp_path / "texts.jsonl", [{"text": "a b c d"}])
    pairs = source_of(tmp_path / "pairs.jsonl", [{"prompt": "a", "completion": "b"}])
    for source, shape, mask, message in (
        (pairs, None, True, "--document_mask: .*pairs.jsonl has one example per row.*--shape packed"),
        (texts, "examples", True, "--document_mask: .*texts.jsonl has one example per row"),
        (texts, "packed", False, "--no-document_mask and --shape packed are mutually exclusive"),
    ):
        with pytest.raises(UserError, match=message):
            tokenize(replace(source, document_mask=mask), tokenizer, 8, shape, tmp_path / "cache")


@pytest.mark.parametrize("capacity", [1, 7, 100])
def test_packing_splits_nothing_and_is_best_fit_decreasing(capacity):
    lengths = np.random.default_rng(capacity).integers(1, capacity + 1, 300)
    found = pack(lengths, capacity)
    free, expected = [], np.empty(300, np.int64)  # the same, by looking at every block
    for example in sorted(range(300), key=lambda example: -lengths[example]):
        fitting = [block for block, space in enumerate(free) if space >= lengths[example]]
        best = min(fitting, key=lambda block: free[block], default=len(free))
        free += [capacity] * (best == len(free))
        free[best] -= lengths[example]
        expected[example] = best
    totals = np.bincount(found, lengths)
    assert totals.max() <= capacity and len(totals) == len(free)
    assert sorted(totals) == sorted(capacity - np.array(free))


def test_packed_examples_keep_their_targets(tokenizer, tmp_path):
    rows = [{"prompt": text[:5], "completion": text[5:]} for text in TEXTS * 3 if text]
    source = source_of(tmp_path / "a.jsonl", rows)
    examples, packed = (tokenize(source, tokenizer, 24, shape, tmp_path / "cache") for shape in ("examples", "packed"))
    assert len(packed) < len(examples) and packed.num_target_tokens == examples.num_target_tokens
    found = []
    for index in range(len(packed)):
        ids, targets, target_rows, positions = packed[index]
        assert len(ids) == len(positions) == packed.lengths(np.array([index])) <= 24
        assert len(targets) == len(target_rows) == packed.num_targets(np.array([index]))
        starts = [*np.flatnonzero(positions == 0), len(ids)]
        for start, end in pairwise(starts):
            own = (start <= target_rows) & (target_rows < end)
            found.append((ids[start:end].tolist(), targets[own].tolist(), (target_rows[own] - start).tolist()))
    assert sorted(found) == sorted(tuple(map(np.ndarray.tolist, examples[i])) for i in range(len(examples)))
    again = pickle.loads(pickle.dumps(packed))
    assert len(again) == len(packed) and again.fingerprint == packed.fingerprint != examples.fingerprint


# --- runs

MASKED, PACKED = ["--shape", "blocks", "--document_mask"], ["--shape", "packed"]


def document_flags(functions_file, model_dir, *more):
    flags = ["--train_file", functions_file, "--model_name_or_path", model_dir, "--sequence_length", 64]
    return [*flags, "--num_updates", 3, "--global_batch_size", 8, "--learning_rate", 1e-3, *more]


def test_every_split_computes_the_same_update(functions_file, model_dir, tmp_path):
    """With the mask and packed, on one and two processes and with shared weights; float64."""
    masked, packed = (document_flags(functions_file, model_dir, *more) for more in (MASKED, PACKED))
    small, tokens = ["--micro_batch_size", 1], ["--micro_batch_tokens", 200]
    runs = run_in_float64(
        "lm",
        {
            "masked": (1, [*masked, "--micro_batch_size", 8], {}),
            "masked small": (2, [*masked, *small], {}),
            "masked sharded": (("fsdp2", 2), [*masked, *tokens], {}),
            "masked cut": (("tensor_parallel", 2), [*masked, *tokens], {}),
            "packed": (1, [*packed, "--micro_batch_size", 8], {}),
            "packed small": (2, [*packed, *tokens], {}),
        },
        tmp_path,
    )
    assert_same_update(runs, "masked", "masked small", "masked sharded", "masked cut")
    assert_same_update(runs, "packed", "packed small")


def test_a_resumed_run_is_the_run_without_a_stop(functions_file, model_dir, tmp_path):
    runs = []
    for name, shape in (("masked", MASKED), ("packed", PACKED)):
        flags = document_flags(functions_file, model_dir, *shape, "--micro_batch_tokens", 200, "--save_every", 2)
        whole, again = str(tmp_path / name), str(tmp_path / f"{name}-again")
        runs.append(([*flags, "--output_dir", whole], {}))
        runs.append(([*flags, "--output_dir", again, "--resume"], {"copy_run": [whole, again, 2]}))
    run_specs("lm", runs, tmp_path)
    for name in ("masked", "packed"):
        first, second = (load_file(tmp_path / f"{name}{end}/model/model.safetensors") for end in ("", "-again"))
        assert all(torch.equal(value, second[key]) for key, value in first.items())
        lines = [read_metrics(tmp_path / f"{name}{end}") for end in ("", "-again")]
        assert [line["loss"] for line in lines[0]] == [line["loss"] for line in lines[1]] and len(lines[0]) == 3


def test_moe_and_pipeline_compute_with_the_mask_too(functions_file, model_dir, tmp_path):
    """The mixture in two splits, and a pipeline of one stage next to lm.py."""
    mixture = ["--train_file", functions_file, "--model_config", "tiny", "--sequence_length", 64, "--num_updates", 2]
    mixture += ["--global_batch_size", 4, *MASKED]
    packed = document_flags(functions_file, model_dir, *PACKED, "--micro_batch_size", 4)
    runs = {
        "moe": ([*mixture, "--micro_batch_size", 4], "moe"),
        "moe small": ([*mixture, "--micro_batch_size", 1], "moe"),
        "lm": (packed, "lm"),
        "pipeline": (packed, "pipeline"),
    }
    specs = [([*flags, "--output_dir", tmp_path / name], {}, recipe) for name, (flags, recipe) in runs.items()]
    run_specs("all", specs, tmp_path)
    losses = {name: [line["loss"] for line in read_metrics(tmp_path / name)] for name in runs}
    assert losses["moe"] == pytest.approx(losses["moe small"], rel=1e-5)
    assert losses["lm"] == pytest.approx(losses["pipeline"], rel=1e-6)


def test_rows_that_a_recipe_packs_by_itself_end_the_run(functions_file, model_dir, tmp_path):
    given = document_flags(functions_file, model_dir, "--shape", "examples", "--output_dir", tmp_path / "run")
    result = run_specs("lm", [(given, {"own_positions": 1})], tmp_path, check=False)
    assert_refused(result, "position_ids: positions restart within a row, but there is no document mask")
