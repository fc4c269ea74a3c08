"""What was taught is what is used: a run's `model/`, loaded by transformers alone, has the figures that it told."""

import json

import pytest
import torch
import torch.nn.functional as F
from conftest import results_of, run_specs, stdlib_functions, write_jsonl
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)

from common.data.source_types import Source
from common.data.tokenizer import train_tokenizer

LENGTH = 64
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# What `tokenizer(text)` makes of a text, and its bos token: that a tokenizer has one does not say that it uses it.
TOKENIZERS = {
    "bos": ("<s> $A", "<s>"),
    "bos and eos": ("<s> $A <|endoftext|>", "<s>"),
    "eos before": ("<|endoftext|> $A", "<|endoftext|>"),
    "unused bos": ("$A", "<s>"),
    "no bos": ("$A", None),
}
ARCHITECTURES = {
    "llama": "bos",
    "mistral": "bos and eos",
    "gemma2": "bos",
    "gemma3_text": "bos",
    "opt": "eos before",
    "bloom": "unused bos",
    "gpt2": "no bos",
    "gpt_neox": "no bos",
    "qwen2": "no bos",
    "qwen3": "no bos",
    "phi": "no bos",
    "falcon": "no bos",
}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 4,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "word_embed_proj_dim": 32,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": 128,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs, texts, chats and labelled texts: to train on and held out."""
    path = tmp_path_factory.mktemp("data")
    texts = [text.partition("\n") for text in stdlib_functions(60) if "\n" in text][:40]
    pairs = [{"prompt": first[:120], "completion": rest[:120]} for first, _, rest in texts]
    chats = [
        [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair["completion"]}]
        for pair in pairs
    ]
    kinds = {
        "pairs": pairs,
        "texts": [{"text": pair["prompt"] + pair["completion"]} for pair in pairs],
        "chats": [{"messages": chat} for chat in chats],
        "labels": [
            {"text": text * 9, "second": pair["completion"], "label": "return" in pair["completion"] and "yes" or "no"}
            for pair in pairs
            for text in [pair["prompt"]]
        ],
        "named": [{"Instruction": pair["prompt"], "output": pair["completion"]} for pair in pairs],
        "sources": [{"source": pair["completion"], "target": pair["prompt"]} for pair in pairs],
    }
    kinds["pairs"][3]["completion"] = kinds["pairs"][5]["completion"] = ""
    for name, rows in kinds.items():
        write_jsonl(path / f"{name}.jsonl", rows[:32])
        write_jsonl(path / f"{name}-held-out.jsonl", rows[32:])
    return path


def make_tokenizer(data, kind):
    template, bos = TOKENIZERS[kind]
    bpe = train_tokenizer(Source(files=(str(data / "texts.jsonl"),)), 384).backend_tokenizer
    bpe.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    specials = [(token, bpe.token_to_id(token)) for token in ("<s>", "<|endoftext|>")]
    bpe.post_processor = TemplateProcessing(single=template, special_tokens=specials)
    names = {"bos_token": bos} if bos else {}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>", **names)


def make_model(path, data, model_type, kind, **settings):
    """A tiny model whose configuration names another end token than its tokenizer."""
    tokenizer = make_tokenizer(data, kind)
    config = AutoConfig.for_model(model_type, vocab_size=len(tokenizer))
    for name, value in SIZES.items():
        if hasattr(config, name) and not isinstance(getattr(type(config), name, None), property):
            setattr(config, name, value)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[-2:]
    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, 7, None
    for name, value in settings.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def flags(data, kind, out, *more):
    base = ["--train_file", data / f"{kind}.jsonl", "--validation_file", data / f"{kind}-held-out.jsonl"]
    base += ["--sequence_length", LENGTH, "--num_updates", 2, "--global_batch_size", 8, "--warmup_updates", 0]
    return [*base, "--save_every", 0, "--output_dir", out, *more]


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """All of them in one launch: where they are, and what was printed."""
    root = tmp_path_factory.mktemp("runs")
    own = ["--learning_rate", 1e-2, "--model_name_or_path"]
    specs = []
    for name, kind in ARCHITECTURES.items():
        model = make_model(root / f"{name}-model", data, name, kind)
        specs.append((flags(data, "pairs", root / name, *own, model), {}))
        if name in ("llama", "gpt2", "mistral", "opt"):
            specs.append((flags(data, "texts", root / f"{name}-blocks", *own, model), {}))
    chat = make_model(root / "chat-model", data, "llama", "bos", eos_token_id=0)
    tokenizer = AutoTokenizer.from_pretrained(chat)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(chat)
    specs.append((flags(data, "chats", root / "chat", *own, chat), {}))
    specs.append((flags(data, "pairs", root / "scratch"), {}))
    columns = ["--prompt_column", "Instruction", "--completion_column", "output"]
    specs.append((flags(data, "named", root / "scratch-moe", *columns), {}, "moe"))
    specs.append((flags(data, "texts", root / "scratch-blocks"), {}, "long_sequence"))
    specs.append((flags(data, "sources", root / "scratch-seq2seq"), {}, "seq2seq"))
    specs.append((flags(data, "labels", root / "scratch-classify", "--pair_column", "second"), {}, "classify"))
    again = flags(data, "labels", root / "again", "--model_name_or_path", root / "scratch-classify/model")
    specs.append(([*again, "--sequence_length", 512], {}, "classify"))
    return root, run_specs("lm", specs, root).stdout


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def load(path, auto=AutoModelForCausalLM):
    return AutoTokenizer.from_pretrained(path / "model"), auto.from_pretrained(path / "model").eval()


@torch.no_grad()
def mean_loss(model, samples):
    """Of (tokens, how many of them are given)."""
    total = count = 0
    for ids, num_given in samples:
        logits = model(torch.tensor([ids[:-1]])).logits[0].float()
        losses = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")[num_given - 1 :]
        total, count = total + losses.sum().item(), count + len(losses)
    return total / count


def pairs_as_used(tokenizer, rows, columns=("prompt", "completion")):
    """A prompt as anybody tokenises it, then what the model is to write."""
    for row in rows:
        given = tokenizer(row[columns[0]])["input_ids"]
        written = tokenizer(row[columns[1]], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        if len(given) <= LENGTH:
            yield (given + written)[: LENGTH + 1], len(given)


@pytest.mark.parametrize("name", [*ARCHITECTURES, "scratch", "scratch-moe"])
def test_the_held_out_loss_of_examples_is_that_of_transformers(name, runs, data):
    root, _ = runs
    tokenizer, model = load(root / name)
    kind, columns = "pairs", ("prompt", "completion")
    if name == "scratch-moe":
        kind, columns = "named", ("Instruction", "output")
    samples = list(pairs_as_used(tokenizer, rows_of(data / f"{kind}-held-out.jsonl"), columns))
    assert results_of(root / name)["validation_loss"] == pytest.approx(mean_loss(model, samples), rel=1e-5)
    wrong = [([tokenizer.eos_token_id, *ids], given + 1) for ids, given in samples]  # the control: one token more
    assert results_of(root / name)["validation_loss"] != pytest.approx(mean_loss(model, wrong), rel=1e-5)


@pytest.mark.parametrize("name", ["llama-blocks", "gpt2-blocks", "mistral-blocks", "opt-blocks", "scratch-blocks"])
def test_the_held_out_loss_of_blocks_is_that_of_transformers(name, runs, data):
    root, _ = runs
    if name == "scratch-blocks":
        from common.tasks.long_sequence import recurrent  # noqa: F401  a model of its own
    tokenizer, model = load(root / name)
    eos, stream = tokenizer.eos_token_id, []
    for row in rows_of(data / "texts-held-out.jsonl"):
        ids = tokenizer(row["text"])["input_ids"]
        if ids[0] == eos and stream:  # the end of the document before is this one's beginning
            ids = ids[1:]
        elif ids[0] not in (eos, tokenizer.bos_token_id) and not stream:
            ids = [eos, *ids]
        stream += ids if ids[-1] == eos else [*ids, eos]
    blocks = [(stream[at : at + LENGTH + 1], 1) for at in range(0, len(stream) - 1, LENGTH)]
    if name == "scratch-blocks":
        with torch.no_grad():
            losses = [
                F.cross_entropy(model(torch.tensor([ids[:-1]]))[0], torch.tensor(ids[1:]), reduction="sum")
                for ids, _ in blocks
            ]
        loss = sum(losses).item() / (len(stream) - 1)
    else:
        loss = mean_loss(model, blocks)
    assert results_of(root / name)["validation_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("name", [*ARCHITECTURES, "scratch", "chat", "scratch-moe", "scratch-seq2seq"])
def test_a_model_stops_where_it_was_taught_to_end(name, runs):
    """Its configuration named another token, 7 (or of the chat model <|endoftext|>, which stays)."""
    root, _ = runs
    tokenizer, model = load(root / name, AutoModelForSeq2SeqLM if "seq2seq" in name else AutoModelForCausalLM)
    taught = tokenizer.convert_tokens_to_ids("<|im_end|>" if name == "chat" else "<|endoftext|>")
    ends = [taught, tokenizer.eos_token_id] if name == "chat" else taught
    assert model.generation_config.eos_token_id == ends and model.config.eos_token_id == taught
    head = model.get_output_embeddings()
    rest = [token for token in range(head.weight.shape[0]) if token != taught]

    def only(module, inputs, logits):  # it writes its end token first, whatever it has learned
        logits[..., rest] = -1e9
        return logits

    head.register_forward_hook(only)
    prompt = tokenizer("def f(x):", return_tensors="pt", return_token_type_ids=False)
    written = model.generate(**prompt, max_new_tokens=9, do_sample=False)
    assert written.shape[1] == (2 if "seq2seq" in name else prompt["input_ids"].shape[1] + 1)
    lengths = {"scratch": 2048, "scratch-moe": 2048, "scratch-seq2seq": LENGTH}
    if name != "bloom":  # which has no positions
        assert tokenizer.model_max_length == lengths.get(name, SIZES["max_position_embeddings"])


def test_empty_completions_are_told(runs):
    _, printed = runs
    lines = [line for line in printed.splitlines() if "empty completion" in line]
    assert len(lines) == len(ARCHITECTURES) + 1  # the runs on pairs; of these two rows, and none that is held out
    assert all("2 rows have an empty completion" in line for line in lines)


def test_a_pipeline_sees_what_the_evaluation_saw(runs, data):
    """Cut at the same token, two texts told apart; with the model's own positions where it is trained on further."""
    root, _ = runs
    rows = rows_of(data / "labels-held-out.jsonl")
    tokenizer, model = load(root / "scratch-classify", AutoModelForSequenceClassification)
    assert tokenizer.model_max_length == LENGTH
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
    inputs = [{"text": row["text"], "text_pair": row["second"]} for row in rows]
    assert max(len(tokenizer(row["text"], row["second"])["input_ids"]) for row in rows) > LENGTH
    answers = classify(inputs, truncation=True, top_k=None)
    scores = [
        next(one["score"] for one in answer if one["label"] == row["label"])
        for answer, row in zip(answers, rows, strict=True)
    ]
    loss = -torch.tensor(scores).log().mean().item()
    assert results_of(root / "scratch-classify")["validation_loss"] == pytest.approx(loss, rel=1e-5)
    types = tokenizer("a", "b", return_tensors="pt")["token_type_ids"]  # the control: without them it is another one
    assert types.sum() > 0
    assert load(root / "again", AutoModelForSequenceClassification)[0].model_max_length == 512
    source = load(root / "scratch-seq2seq", AutoModelForSeq2SeqLM)[0]
    assert len(source("def f(x): return x " * 50, truncation=True)["input_ids"]) == LENGTH
