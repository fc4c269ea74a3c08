"""--generate: held-out prompts and the model's answers before and after training, which change nothing of the run."""

import itertools
import json
import re
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from conftest import (
    assert_mistake,
    make_model_dir,
    read_metrics,
    results_of,
    run_recipe_alone,
    run_specs,
    source_of,
    write_jsonl,
)
from test_metric import EXACT, write_module
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from common.data.chats import CHATML
from common.data.mixed import Mixed
from common.data.prompts import Prompt, choose_prompts
from common.data.text import tokenize
from common.errors import UserError
from common.redaction import HIDDEN
from common.report.answers import Answers, _markdown, _read, batch_prompts, start_answers
from common.tasks.dpo.losses import Objective
from common.tasks.dpo.preferences import tokenize_preferences
from common.tasks.dpo.unpaired import tokenize_unpaired
from common.training.process_grid import ProcessGrid

# --- prompts


def texts_of(prompts, tokenizer):
    return [tuple(ids and tokenizer.decode(ids) for ids in prompt) for prompt in prompts]


def test_evenly_spaced_rows_and_documents_are_prompts(tokenizer, cache, tmp_path):
    """Prompts with completions, also packed; documents, also masked, as rows and of several files."""
    eos = tokenizer.eos_token
    pairs = source_of(tmp_path / "pairs.jsonl", [{"prompt": f"a {n} ", "completion": f"b {n}"} for n in range(10, 19)])
    expected = [(f"{eos}a {n} ", f"b {n}{eos}") for n in (10, 14, 18)]
    for shape in ("examples", "packed"):
        samples = tokenize(pairs, tokenizer, 64, shape, cache)
        assert texts_of(choose_prompts(samples, 3, tokenizer), tokenizer) == expected
    assert len(choose_prompts(samples, 99, tokenizer)) == 9
    texts = ["a b c d", "a", "e f g h " * 20]
    file = source_of(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    for shape, mask in (("blocks", False), ("blocks", True), ("examples", None)):
        samples = tokenize(file.__class__(files=file.files, document_mask=mask), tokenizer, 16, shape, cache)
        first, last = choose_prompts(samples, 9, tokenizer)
        for (ids, reference), text in ((first, texts[0]), (last, texts[2])):
            whole = tokenizer(text)["input_ids"]
            assert reference is None and ids == whole[: len(ids)]
            assert len(ids) == min(8, 1 + (len(whole) - 1) // 2)  # with the token before the text
    mixed = Mixed({"pairs": tokenize(pairs, tokenizer, 64, None, cache), "texts": samples})
    assert len(choose_prompts(mixed, 99, tokenizer)) == 11
    assert choose_prompts(mixed, 11, tokenizer)[9:] == [first, last]


def test_the_prompt_of_a_conversation_is_what_its_template_writes_before_the_answer(tokenizer, cache, tmp_path):
    chat = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    chat.chat_template = CHATML.read_text()
    said = [("user", "a b"), ("assistant", "hello"), ("user", "c"), ("assistant", "d e f"), ("user", "g")]
    messages = [{"role": role, "content": text} for role, text in said]
    samples = tokenize(source_of(tmp_path / "chat.jsonl", [{"messages": messages}]), chat, 256, None, cache)
    (prompt,) = choose_prompts(samples, 3, chat)
    text = chat.apply_chat_template(messages[:3], add_generation_prompt=True, tokenize=False)
    assert prompt.ids == chat(text, add_special_tokens=False)["input_ids"]
    assert chat.decode(prompt.reference).rstrip() == "d e f<|im_end|>"


def test_the_reference_of_a_preference_is_the_chosen_answer(tokenizer, cache, tmp_path):
    """All of it, although the loss begins where the answers differ; without a prompt it begins there."""
    eos, user = tokenizer.eos_token, {"role": "user", "content": "hello"}
    chat = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    chat.chat_template = CHATML.read_text()
    turns = [[{"role": "assistant", "content": f"a {one}"}] for one in "bc"]
    asked = chat.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    long = [[user, *turns[0], user, *turn] for turn in turns]
    again = chat.apply_chat_template([user, *turns[0], user], add_generation_prompt=True, tokenize=False)
    rows = {
        "texts": ({"prompt": "a b ", "chosen": "c d", "rejected": "c e"}, f"{eos}a b ", "c d"),
        "one goes on": ({"prompt": "a b ", "chosen": "c d", "rejected": "c d e"}, f"{eos}a b ", "c d"),
        "whole texts": ({"chosen": "a b c d", "rejected": "a b e f"}, f"{eos}a b", " c d"),
        "messages": ({"prompt": [user], "chosen": turns[0], "rejected": turns[1]}, asked, "a b"),
        "turns": ({"chosen": long[0], "rejected": long[1]}, again, "a b"),
    }  # fmt: skip
    for name, (row, prompt, answer) in rows.items():
        source = source_of(tmp_path / f"{name}.jsonl", [row])
        for objective in (Objective("sigmoid"), Objective("simpo")):
            pairs = tokenize_preferences(source, chat, 256, "", cache, objective)
            ((ids, reference),) = texts_of(choose_prompts(pairs, 3, chat), chat)
            assert (ids, re.sub(r"(?s)<\|.*", "", reference)) == (prompt, answer), name
    labelled = [{"prompt": "a ", "completion": f"{n} b", "label": n > 1} for n in range(4)]
    samples = tokenize_unpaired(source_of(tmp_path / "kto.jsonl", labelled), chat, 64, "", cache)
    expected = [(f"{eos}a ", f"{n} b{eos}") for n in (2, 3)]
    assert texts_of(choose_prompts(samples, 9, chat), chat) == expected
    samples = tokenize_unpaired(source_of(tmp_path / "none.jsonl", labelled[:2]), chat, 64, "", cache)
    assert texts_of(choose_prompts(samples, 9, chat), chat) == [(f"{eos}a ", None)] * 2


# --- samples.md


def test_a_reader_sees_any_text_as_it_is():
    """Backticks, HTML and control characters stay inside of their block. Control: a shorter fence would end there."""
    rows = [{"prompt": "a\n```\n<b>|\x1b[1m\u202e", "reference": None, "before": None, "after": "x\n````` y"}]
    rows.append({"prompt": "p", "reference": "", "before": "", "after": "# c"})
    text = "\n".join(_markdown(rows, {"m|`n/share/before": 0.5, "m|`n/share": 1.0, "m|`n/list": [1]}))
    fences = [line for line in text.splitlines() if re.fullmatch("```+(text)?", line)]
    assert fences == ["````text", "```", "````", "``````text", "``````"] + ["```text", "```"] * 2
    assert "<b>|\\x1b[1m\\u202e\n````\n" in text and "\x1b" not in text
    assert text.count("(empty)") == 2 and text.count("(not generated, ") == 1
    assert "| `` m\\|`n/share `` | 0.5000 | 1.0000 |" in text
    assert "| not measured | `[1]` |" in text


@pytest.mark.parametrize("text", ["", "[", "[1]", '{"id": 1}', '[{"id": "a"}]', "[" * 100_000, "\udcff", None])
def test_a_damaged_file_has_no_answers(text, tmp_path):
    if text is not None:
        (tmp_path / "samples.json").write_bytes(text.encode(errors="surrogateescape"))
    assert _read(tmp_path) == {}


def test_metrics_before_and_after_compare_the_same_texts(tokenizer, tmp_path):
    """The answers before training are read from samples.json, which has no secrets. Control: a text without one."""
    texts = ["token = abcdefgh", "hf_" + "a" * 30, "plain"]
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    compared = []
    metrics = SimpleNamespace(compute=lambda *texts: (compared.append(texts), ({}, []))[1])
    run = SimpleNamespace(output_dir=tmp_path, results={}, state=SimpleNamespace(update=0))
    run.accelerator = SimpleNamespace(is_main_process=True)
    run.evaluations = SimpleNamespace(metrics=metrics, lines=[])
    answers = Answers(run, [Prompt([5, 6 + n], ids) for n, ids in enumerate(encoded)], tokenizer)
    answers._generate = lambda model: list(map(answers._decode, encoded))
    for when in ("before", "after"):
        answers.answer(None, when)
    expected = [f"token = {HIDDEN}", HIDDEN, "plain"]
    assert compared == [(expected, expected)] * 2
    assert [row["reference"] for row in json.loads((tmp_path / "samples.json").read_text())] == expected


# --- batches

SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4}
ARCHITECTURES = {
    "llama": {**SIZES, "num_key_value_heads": 2},
    "mistral": {**SIZES, "num_key_value_heads": 2, "sliding_window": 16},
    "opt": {**SIZES, "word_embed_proj_dim": 64, "ffn_dim": 128},  # learned positions, counted from the mask
    "gpt2": {**GPT2, "n_positions": 96},  # positions to spare
    "gpt2-full": {**GPT2, "n_positions": 64},
    "bloom": {**SIZES, "n_layer": 3, "n_head": 4, "tie_word_embeddings": False},  # ALiBi
    "mamba": SIZES,
}
SINGLY = {"gpt2-full", "mamba"}  # only equal lengths together


class Words:
    pad_token_id = 2

    def decode(self, ids, skip_special_tokens):
        return " ".join(str(token) for token in ids if token > 2)


def batch_flags(size=None, tokens=None, checkpointing="none", length=64):
    values = {"micro_batch_size": size, "micro_batch_tokens": tokens, "activation_checkpointing": checkpointing}
    return Namespace(**values, sequence_length=length)


def answer(model, prompts, batches, cover=lambda mask: mask):
    run = SimpleNamespace(args=batch_flags(), device=torch.device("cpu"), is_sharded=False)
    answers, generate = Answers(run, prompts, Words()), model.generate
    asked = SimpleNamespace(
        generate=lambda ids, attention_mask, **more: generate(
            ids, attention_mask=cover(attention_mask), **more | {"max_new_tokens": 24}
        )
    )
    texts = [answers._answer(asked, [prompts[index].ids for index in batch]) for batch in batches]
    return dict(zip(itertools.chain(*batches), itertools.chain(*texts), strict=True))


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_prompts_of_different_lengths_are_answered_together_as_each_alone(name):
    """Control: where they are padded, other answers if the padding is attended to."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.partition("-")[0], vocab_size=384, eos_token_id=1, pad_token_id=2)
    config = config.from_dict(config.to_dict() | ARCHITECTURES[name])
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():  # so that an answer depends on its prompt, and some end early
        parameter.mul_(3 if parameter.dim() > 1 else 1)
    lengths = [3, 30, 7, 12, 29, 5, 5, 8]
    prompts = [Prompt(torch.randint(3, 384, (length,)).tolist(), None) for length in lengths]
    batches = batch_prompts(lengths, batch_flags(tokens=1024), model)
    assert batches == ([[0], [5, 6], [2], [7], [3], [4], [1]] if name in SINGLY else [[0, 5, 6, 2, 7, 3, 4, 1]])
    alone = answer(model, prompts, [[index] for index in range(len(prompts))])
    assert answer(model, prompts, batches) == alone
    assert len(set(map(len, alone.values()))) > 1
    if name not in SINGLY:
        assert answer(model, prompts, batches, torch.ones_like) != alone


def test_a_batch_of_prompts_needs_the_memory_of_micro_batches():
    """32 prompts at most; the number of processes does not count."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=64))
    cases = [({"tokens": 1024}, 32), ({"tokens": 512}, 16), ({"size": 1}, 8), ({"size": 1, "checkpointing": "full"}, 1)]
    for given, expected in cases:
        batches = batch_prompts([9] * 70, batch_flags(**given, length=256), model)
        assert {len(batch) for batch in batches[:-1]} == {expected}, given
        assert sorted(index for batch in batches for index in batch) == list(range(70))


# --- runs

NUMBER = 3  # prompts, no multiple of two ranks


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Training and held-out rows, a module of `evaluate`, and a model whose dropout draws random numbers."""
    directory = tmp_path_factory.mktemp("files")
    for name, numbers in (("train", range(40)), ("held_out", range(40, 40 + NUMBER))):
        rows = [{"prompt": f"{n} + 1 = ", "completion": f"{n + 1}, {'so ' * (n % 4)}it is"} for n in numbers]
        pairs = [row | {"chosen": row["completion"], "rejected": "it is not"} for row in rows]
        write_jsonl(directory / f"{name}.jsonl", rows)
        write_jsonl(directory / f"{name}_pairs.jsonl", pairs)
    write_module(
        directory, "exact", "texts", EXACT.replace("'count'", "'lengths': sum(map(len, predictions)), 'count'")
    )
    make_model_dir(directory / "model", directory / "train.jsonl", attention_dropout=0.1)
    return directory


def flags(files, out, *more, kind=""):
    base = ["--train_file", files / f"train{kind}.jsonl", "--validation_file", files / f"held_out{kind}.jsonl"]
    base += ["--model_name_or_path", files / "model", "--sequence_length", 32, "--num_updates", 6, "--save_every", 3]
    return [*base, "--learning_rate", 1e-2, "--warmup_updates", 0, "--global_batch_size", 8, "--output_dir", out, *more]


def texts_in(out):
    return {when: [row[when] for row in json.loads((out / "samples.json").read_text())] for when in ("before", "after")}


def generated(path, files, length=32, dtype=torch.float32):
    """What transformers itself generates for the held-out prompts, up to `length` tokens with them."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path, dtype=dtype), AutoTokenizer.from_pretrained(path)
    texts = []
    for line in (files / "held_out.jsonl").read_text().splitlines():
        ids = tokenizer(json.loads(line)["prompt"], return_tensors="pt")["input_ids"]
        written = model.eval().generate(ids, max_new_tokens=length - ids.shape[1], do_sample=False)
        texts.append(tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True).strip())
    return texts


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    """What runs of one process print, and their directories: with and without answers, and resumed after update 3."""
    out = tmp_path_factory.mktemp("runs")
    asked = ["--generate", NUMBER, "--metric", files / "exact.py"]
    resumed, late = ({"copy_run": [str(out / one), str(out / name), 3]} for one, name in ORIGINS)
    runs = [
        (flags(files, out / "run", *asked), {}),
        (flags(files, out / "silent"), {}),
        (flags(files, out / "resumed", *asked, "--resume"), resumed),
        (flags(files, out / "late", *asked, "--resume"), late),
    ]
    return run_specs("lm", runs, out).stdout, out


ORIGINS = [("run", "resumed"), ("silent", "late")]


def test_answers_are_those_of_transformers_and_the_metrics_are_of_them(files, trained):
    printed, out = trained
    found = texts_in(out / "run")
    assert found == {"before": generated(files / "model", files), "after": generated(out / "run/model", files)}
    assert found["before"] != found["after"]
    rows = [json.loads(line)["completion"] for line in (files / "held_out.jsonl").read_text().splitlines()]
    results, text = results_of(out / "run"), (out / "run/samples.md").read_text()
    for when, name in (("before", "/before"), ("after", "")):
        exact = sum(map(str.__eq__, found[when], rows)) / NUMBER
        assert results[f"exact/exact/mean{name}"] == pytest.approx(exact) and results[f"exact/count{name}"] == NUMBER
        assert results[f"exact/lengths{name}"] == sum(map(len, found[when]))
    assert f"samples    {out / 'run/samples.md'}: {NUMBER} held-out prompts with answers\n" in printed
    for part in ("40 + 1 = ", rows[-1], found["after"][0], f"| `exact/count` | `{NUMBER}` | `{NUMBER}` |"):
        assert part in text


def test_answers_do_not_change_the_training(trained):
    """Dropout draws the same random numbers, and all files of the model are equal. Nor do they count as its time."""
    _, out = trained
    losses = [[(line["loss"], line["grad_norm"]) for line in read_metrics(out / name)] for name in ("run", "silent")]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    names = {path.name for path in (out / "run/model").iterdir()} - {"README.md"}
    assert {path.name for path in (out / "silent/model").iterdir()} - {"README.md"} == names
    for name in names:
        assert (out / "run/model" / name).read_bytes() == (out / "silent/model" / name).read_bytes(), name
    assert results_of(out / "run")["evaluation_seconds"] > 0 == results_of(out / "silent")["evaluation_seconds"]


def test_a_resumed_run_has_the_answers_before_training(trained):
    """Control: without those of the first start, there are none, because the weights are no longer the same."""
    _, out = trained
    assert texts_in(out / "resumed") == texts_in(out / "run")
    assert (out / "resumed/samples.md").read_text() == (out / "run/samples.md").read_text()
    late, text = texts_in(out / "late"), (out / "late/samples.md").read_text()
    assert late == {"before": [None] * NUMBER, "after": texts_in(out / "run")["after"]}
    assert text.count("(not generated, ") == NUMBER and f"| `exact/count` | not measured | `{NUMBER}` |" in text
    assert "exact/count/before" not in results_of(out / "late") and results_of(out / "late")["exact/count"] == NUMBER


# Batches of one prompt.
ONE_BY_ONE = ["--micro_batch_size", 1, "--activation_checkpointing", "full"]
LONG = 128  # tokens of a prompt and its answer: enough for the rounding of bf16 to change one


def test_each_of_two_processes_answers_a_share(files, trained, tmp_path):
    """Preferences too; and a run that is stopped in its answers before training, and then in those after it."""
    asked, runs = ["--generate", NUMBER, *ONE_BY_ONE], []
    for update, number in ((0, 1), (6, NUMBER // 2 + 1)):  # of the answers of rank 1
        status = [str(tmp_path / "run"), f"stopped after update {update}"]
        stop = {"signal_in_answers": [number, 1, "SIGTERM"], "expect_status": status}
        runs.append((flags(files, tmp_path / "run", *asked, *["--resume"] * (update > 0)), stop))
    runs.append((flags(files, tmp_path / "run", *asked, "--resume"), {}))
    metric = ["--metric", files / "exact.py"]
    asked = ["--generate", NUMBER]  # in one batch, so that one process has nothing to answer
    runs.append((flags(files, tmp_path / "pairs", *asked, *metric, kind="_pairs"), {}, "dpo"))
    run_specs("lm", runs, tmp_path, "multi_cpu")
    before = texts_in(trained[1] / "run")["before"]
    for name in ("run", "pairs"):
        assert texts_in(tmp_path / name) == {"before": before, "after": generated(tmp_path / name / "model", files)}
        assert results_of(tmp_path / name)["num_generated"] == NUMBER
    assert results_of(tmp_path / "pairs")["exact/count"] == NUMBER


@pytest.mark.parametrize("config", ["fsdp2", "zero3"])
def test_processes_with_a_shard_each_answer_together(files, trained, tmp_path, config, request):
    if config == "zero3":
        request.getfixturevalue("extensions")
    run_specs(
        "lm", [(flags(files, tmp_path / "run", "--generate", NUMBER), {})], tmp_path, config, "--mixed_precision", "no"
    )
    before = texts_in(trained[1] / "run")["before"]
    assert texts_in(tmp_path / "run") == {"before": before, "after": generated(tmp_path / "run/model", files)}


# FSDP2 and DeepSpeed hold the weights in bf16 in a forward pass, also those of norms, which autocast leaves in float32.
@pytest.mark.parametrize(("config", "dtype"), [("cpu", "float32"), ("fsdp2", "bfloat16"), ("zero3", "bfloat16")])
def test_answers_are_computed_in_the_precision_of_the_run(files, tmp_path, config, dtype, request):
    """Control: the answers in float32 are others."""
    if config == "zero3":
        request.getfixturevalue("extensions")
    given = flags(files, tmp_path / "run", "--generate", NUMBER, *ONE_BY_ONE, "--sequence_length", LONG)
    run_specs("lm", [(given, {})], tmp_path, config, "--mixed_precision", "bf16")
    models = {"before": files / "model", "after": tmp_path / "run/model"}
    with torch.autocast("cpu", torch.bfloat16):
        expected = {when: generated(model, files, LONG, getattr(torch, dtype)) for when, model in models.items()}
    assert texts_in(tmp_path / "run") == expected
    assert expected != {when: generated(model, files, LONG) for when, model in models.items()}


PROBLEMS = {
    "--metric accuracy": "--metric compares the answers of --generate N with references; pass both, or remove it",
    "--generate 3": "--generate needs held-out data; pass --validation_file, or remove --generate",
    "--generate 0": "--generate: '0' is not an integer > 0",
    "--generate 3 --validation_file held.txt --metric accuracy": "held-out rows have none; remove it",
    "--generate 3 --validation_file short.txt": "no held-out document has two tokens",
}


@pytest.mark.parametrize("words", PROBLEMS)
def test_what_cannot_be_answered_is_one_line(words, files, tmp_path):
    (tmp_path / "held.txt").write_text("a text to continue")
    (tmp_path / "short.txt").write_text("a")
    given = [str(tmp_path / word) if word.endswith(".txt") else word for word in words.split()]
    data = ["--train_file", files / "train.jsonl", "--text_column", "completion", "--shape", "blocks"]
    model = ["--model_name_or_path", files / "model", "--sequence_length", 32, "--output_dir", tmp_path / "out"]
    assert_mistake(run_recipe_alone("lm.py", *data, *model, *given), re.escape(PROBLEMS[words]))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("shared", "flag"), [("sequence", "sp_size"), ("tensor", "tp_size")])
def test_processes_that_share_a_sample_do_not_generate(shared, flag):
    """A tensor group computes a part of the logits each, and a sequence group gets a part of the tokens."""
    grid = ProcessGrid(2, **{shared: 2})
    run = SimpleNamespace(args=SimpleNamespace(generate=3), launch_config=SimpleNamespace(grid=grid))
    with pytest.raises(UserError, match=f"--generate is not supported with parallelism_config_{flag} 2; set it to 1"):
        start_answers(run, None, None)
