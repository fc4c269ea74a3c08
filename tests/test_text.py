"""Text becomes the right samples: blocks, examples, pairs and chats, by the tokenizer's own rules."""

import gzip
import json
import lzma
import re
import time

import datasets
import numpy as np
import pytest
from conftest import TEXTS, source_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from common.data.source_types import Source
from common.data.sources import open_source
from common.data.text import tokenize
from common.data.tokenizer import load_tokenizer, train_tokenizer
from common.errors import UserError


def stream_of(samples):
    """The tokens that blocks read, put together, and those that they predict."""
    ids, targets, _ = zip(*(samples[i] for i in range(len(samples))), strict=True)
    return np.concatenate(ids), np.concatenate(targets)


def targets_as_text(tokenizer, sample):
    return tokenizer.decode(sample[1])


# --- the tokenizer ---


def test_every_character_survives_the_tokenizer(tokenizer):
    every = "".join(chr(code) for code in range(0x3000) if not 0xD800 <= code < 0xE000) + "🥊\U0010ffff"
    for text in [every, "", " ", "\r\n\t \x00", "  a  b ", *TEXTS]:
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    used = {i for i in tokenizer(every)["input_ids"]}
    assert len(used) > 150  # and not one unknown token for all of them
    bare = Tokenizer(models.BPE())  # the control: without the alphabet of bytes, what was not seen is lost
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    assert bare.decode(bare.encode("ü").ids) == ""


def test_the_same_text_gives_the_same_tokenizer(tmp_path):
    sources = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        sources.append(source_of(tmp_path / name / "a.jsonl", [{"text": text * 5} for text in TEXTS]))
    one, two = (train_tokenizer(source, 290, tmp_path / "cache").backend_tokenizer.to_str() for source in sources)
    assert one == two and len(list((tmp_path / "cache").glob("tokenizer-*[0-9a-f]"))) == 2
    assert one != train_tokenizer(sources[0], 280, tmp_path / "cache").backend_tokenizer.to_str()


def test_a_saved_tokenizer_loads_and_gets_a_pad_token(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for dropped, pad in (("pad_token", tokenizer.eos_token), ("eos_token", None)):
        del settings[dropped]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        if pad:
            assert load_tokenizer(str(tmp_path)).pad_token == pad
        else:
            with pytest.raises(UserError, match="no eos token.*set eos_token"):
                load_tokenizer(str(tmp_path))


def test_a_name_that_is_nowhere_ends_soon_in_one_line(monkeypatch, cache):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    start = time.monotonic()
    with pytest.raises(UserError, match="no/such-model.*") as error:
        load_tokenizer("no/such-model")
    assert len(str(error.value).splitlines()) == 1
    with pytest.raises(UserError, match="^--dataset_name no/such-data: ") as error:
        open_source(Source(dataset_name="no/such-data"))
    assert len(str(error.value).splitlines()) == 1
    with pytest.raises(UserError, match="neither a directory here nor a valid name"):
        load_tokenizer("./nothing/at/all")
    assert time.monotonic() - start < 10  # the libraries' own patience is 20 to 50 s


# --- blocks ---


@pytest.mark.parametrize("sequence_length", [1, 7, 1000])
def test_blocks_predict_every_token_of_the_stream_once(tokenizer, tmp_path, cache, sequence_length):
    samples = tokenize(
        source_of(tmp_path / "a.jsonl", [{"text": t} for t in TEXTS]), tokenizer, sequence_length, None, cache
    )
    eos = tokenizer.eos_token_id
    stream = [token for text in TEXTS for token in tokenizer(text)["input_ids"]] + [eos]
    assert stream.count(eos) == len(TEXTS) + 1  # the tokenizer puts it before each
    inputs, targets = stream_of(samples)
    assert inputs.tolist() == stream[:-1] and targets.tolist() == stream[1:]
    ids = np.arange(len(samples))
    assert samples.lengths(ids).tolist() == [len(samples[i][0]) for i in ids] == samples.num_targets(ids).tolist()
    assert samples.num_tokens == samples.num_target_tokens == len(stream) - 1 == samples.lengths(ids).sum()
    assert samples.max_length == max(samples.lengths(ids)) and samples[0][0].dtype == np.int64
    assert samples.num_bytes == sum(len(text.encode()) for text in TEXTS)
    with pytest.raises(IndexError):
        samples[len(samples)]
    assert inputs.tolist() != stream[1:]  # the control: shifted by one, it is seen


@pytest.mark.parametrize(
    ("template", "before", "end"),
    [
        ("<s> $A", ["<s>"], []),
        ("$A", [], []),
        ("<|endoftext|> $A", ["<|endoftext|>"], []),
        ("<s> $A <|endoftext|>", ["<s>"], ["<|endoftext|>"]),
        ("<s> <t> $A", ["<s>", "<t>"], []),
    ],
)
def test_the_tokenizer_says_what_stands_around_a_text(tokenizer, tmp_path, cache, work, template, before, end):
    """And eos, which ends what is learned, once. That it has a bos token does not say that it uses it."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    own = load_tokenizer(str(tmp_path / "tokenizer"))
    own.add_special_tokens({"bos_token": "<s>", "extra_special_tokens": ["<t>"]})
    numbers = {name: own.convert_tokens_to_ids(name) for name in ("<s>", "<t>", "<|endoftext|>")}
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=list(numbers.items()))
    before, end, eos = [numbers[name] for name in before], [numbers[name] for name in end], own.eos_token_id
    hello, ab = (own(text, add_special_tokens=False)["input_ids"] for text in ("hello", "a b"))
    assert own("hello")["input_ids"] == before + hello + end
    source = source_of(tmp_path / "a.jsonl", [{"text": "hello"}, {"text": ""}, {"text": "a b"}])
    samples = tokenize(source, own, 100, "blocks", cache)
    stream = samples[0][0].tolist() + [int(samples[0][1][-1])]
    if before and before != [eos]:
        assert stream == [*before, *hello, eos, *before, *ab, eos]
    else:  # the end of one document is the beginning of the next
        assert stream == [eos, *hello, eos, *ab, eos]
    assert samples.meta["dropped"] == 1
    ids, targets, rows = tokenize(source, own, 100, "examples", cache)[1]
    assert ids.tolist() == [*before, *ab] and targets.tolist()[-len(ab) :] == [*ab[1:], eos]
    assert rows.tolist() == list(range(max(0, len(before) - 1), len(ids)))
    pairs = source_of(tmp_path / "b.jsonl", [{"prompt": "hello", "completion": "a b"}])
    ids, targets, rows = tokenize(pairs, own, 100, None, cache)[0]
    given = own("hello")["input_ids"]
    assert ids.tolist() == given + ab and targets.tolist() == [*ab, eos]
    assert rows.tolist() == list(range(len(given) - 1, len(ids)))
    own.backend_tokenizer.post_processor = processors.TemplateProcessing("$A <t>", special_tokens=list(numbers.items()))
    again = tokenize(pairs, own, 100, None, cache)[0][0]  # what the cache has was made by another rule
    assert again.tolist() == [*hello, numbers["<t>"], *ab] and len(work) == 4


def test_a_large_txt_file_is_one_document_read_in_pieces(tokenizer, tmp_path, cache):
    text = "".join(f"line {i} ünï\n" for i in range(60_000))
    (tmp_path / "a.txt").write_text(text)
    source = Source(files=(str(tmp_path / "a.txt"),))
    pieces = list(open_source(source).rows(("text",), True))
    assert len(pieces) > 2 and "".join(piece.values["text"] for piece in pieces) == text
    assert [piece.continues for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    samples = tokenize(source, tokenizer, 512, None, cache)
    targets = stream_of(samples)[1]
    assert (targets == tokenizer.eos_token_id).sum() == 1 and samples.meta["documents"] == 1
    assert tokenizer.decode(targets[:-1]) == text
    (tmp_path / "b.txt").write_text("é" * 900_000)  # one line: cut at a character
    long_line = open_source(Source(files=(str(tmp_path / "b.txt"),))).rows(("text",), True)
    assert "".join(piece.values["text"] for piece in long_line) == "é" * 900_000


def test_compressed_sizes_are_those_of_gzip_and_xz(tokenizer, tmp_path, cache):
    source = source_of(tmp_path / "a.jsonl", [{"text": text * 50} for text in TEXTS])
    everything = "".join(text * 50 for text in TEXTS).encode()
    samples = tokenize(source, tokenizer, 10, None, cache, measure_compression=True)
    assert samples.gzip_bytes == len(gzip.compress(everything, 9))
    assert samples.xz_bytes == len(lzma.compress(everything, preset=9))
    assert tokenize(source, tokenizer, 10, None, cache).gzip_bytes is None


# --- examples ---


def test_only_the_completion_is_predicted(tokenizer, tmp_path, cache):
    token = max((tokenizer.decode([i]) for i in range(1, 300)), key=len)
    rows = [{"prompt": "a b c ", "completion": "hello x"}, {"prompt": token[:1], "completion": token[1:]}]
    samples = tokenize(source_of(tmp_path / "a.jsonl", rows), tokenizer, 100, None, cache)
    eos = tokenizer.eos_token_id
    for row, (ids, targets, target_rows) in zip(rows, [samples[0], samples[1]], strict=True):
        completion = [*tokenizer(row["completion"], add_special_tokens=False)["input_ids"], eos]
        prompt = tokenizer(row["prompt"])["input_ids"]
        assert ids.tolist() == prompt + completion[:-1]
        assert targets.tolist() == completion and target_rows.tolist() == list(range(len(prompt) - 1, len(ids)))
    assert samples.num_targets([0, 1]).tolist() == [len(samples[i][1]) for i in (0, 1)]
    assert samples.num_bytes is None  # the prompts are not paid for
    # the control: tokenised as one, the boundary is gone
    assert len(tokenizer(token, add_special_tokens=False)["input_ids"]) == 1
    assert token not in tokenizer.decode([samples[1][0][1]])
    whole = tokenize(source_of(tmp_path / "b.jsonl", [{"text": "hello"}]), tokenizer, 100, "examples", cache)
    assert len(whole[0][1]) == len(whole[0][0])  # and with a text column nothing is left out


def test_cut_and_empty_rows_are_counted(tokenizer, tmp_path, cache):
    rows = [{"prompt": "a b c d", "completion": text} for text in ("hello " * 9, "x")]
    rows += [{"prompt": "a b " * 20, "completion": "lost"}, {"prompt": "", "completion": ""}]
    samples = tokenize(source_of(tmp_path / "a.jsonl", rows), tokenizer, 12, None, cache)
    assert len(samples) == 2 and samples.max_length == 12 and samples.lengths([0, 1]).max() == 12
    assert (samples.meta["truncated"], samples.meta["dropped"]) == (1, 2)
    said = "1 truncated at 12; 1 left out, because all their targets are beyond 12 tokens; 1 empty or without a target"
    assert said in samples.describe()
    with pytest.raises(UserError, match="no sample with a target.*raise --sequence_length"):
        tokenize(source_of(tmp_path / "b.jsonl", rows[2:]), tokenizer, 12, None, cache)
    assert not list(cache.glob("*.partial"))


def test_rows_with_nothing_to_say_are_told(tokenizer, tmp_path, cache, monkeypatch):
    rows = [{"prompt": "a", "completion": text} for text in ("", "x", "")] + [{"prompt": "", "completion": ""}]
    samples = tokenize(source_of(tmp_path / "a.jsonl", rows), tokenizer, 12, None, cache)
    assert samples.meta["empty"] == 2 and samples.meta["dropped"] == 1
    assert samples[0][1][-1] == tokenizer.eos_token_id  # nothing but its end
    assert samples.describe().splitlines()[1].strip().startswith("2 rows have an empty completion")
    monkeypatch.setattr(tokenizer, "chat_template", PLAIN)
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    chats = [CHAT, [CHAT[0], {"role": "assistant", "content": ""}], [CHAT[0], call]]
    samples = tokenize(source_of(tmp_path / "b.jsonl", [{"messages": c} for c in chats]), tokenizer, 90, None, cache)
    assert samples.meta["empty"] == 1


def test_the_token_that_ends_an_answer_is_found(tokenizer, tmp_path, cache, monkeypatch):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    own = load_tokenizer(str(tmp_path / "tokenizer"))
    own.add_tokens(["<end>"], special_tokens=True)
    end, source = own.convert_tokens_to_ids("<end>"), source_of(tmp_path / "a.jsonl", [{"messages": CHAT}])
    for template, found in ((PLAIN, [end]), (TAGGED, [end]), (PLAIN.replace("</>", "."), [])):
        own.chat_template = template.replace("</>", "<end>")
        samples = tokenize(source, own, 500, None, cache)
        assert samples.end_tokens == found
        assert ("does not learn where to stop" in samples.describe()) == (not found)
    assert tokenize(source_of(tmp_path / "b.jsonl", [{"text": "a"}]), own, 9, None, cache).end_tokens == [0]


NAMELESS = {
    "query, output": "for examples --prompt_column query --completion_column output",
    "id, Question, answer": "for examples --prompt_column Question --completion_column answer",
    "prompt, response": "for examples --prompt_column prompt --completion_column response",
    "body, title": r"\(--text_column\)",
}


@pytest.mark.parametrize("columns", NAMELESS)
def test_columns_of_other_names_are_told_how_to_name(tokenizer, tmp_path, cache, columns):
    row = dict.fromkeys(columns.split(", "), "a")
    source = source_of(tmp_path / "a.jsonl", [row])
    with pytest.raises(UserError, match=NAMELESS[columns]) as error:
        tokenize(source, tokenizer, 9, None, cache)
    assert len(str(error.value).splitlines()) == 1 and f"there are: {columns}" in str(error.value)
    if "output" in columns:
        named = Source(files=source.files, prompt_column="query", completion_column="output")
        assert tokenize(named, tokenizer, 9, None, cache).meta["columns"] == ["query", "output"]
        wrong = Source(files=source.files, prompt_column="query")
        with pytest.raises(UserError, match=r"no column completion; .*\(--prompt_column, --completion_column\)"):
            tokenize(wrong, tokenizer, 9, None, cache)


PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</>\n"
    "{% endgeneration %}{% else %}{{ m.content }}</>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "user", "content": "hello ö"},
    {"role": "assistant", "content": "zwölf 🥊"},
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "def f(x):"},
]


def same_samples(one, other):
    """Whether two tokenised sources have the same tokens and targets."""
    return len(one) == len(other) and all(
        np.array_equal(a, b) for n in range(len(one)) for a, b in zip(one[n], other[n], strict=True)
    )


def test_conversations_are_messages(tokenizer, tmp_path, cache, monkeypatch):
    """ShareGPT's column gives the samples of the same chat as messages. Control: another speaker gives others."""
    monkeypatch.setattr(tokenizer, "chat_template", PLAIN)
    names = {"user": "human", "assistant": "gpt"}
    turns = [{"from": names[turn["role"]], "value": turn["content"]} for turn in CHAT]
    system = {"role": "system", "content": "be kind"}

    def samples(name, *rows):
        return tokenize(source_of(tmp_path / f"{name}.jsonl", rows), tokenizer, 500, None, cache)

    expected = samples("messages", {"messages": CHAT}, {"messages": [system, *CHAT]})
    assert same_samples(samples("a", {"conversations": turns}, {"conversations": turns, "system": "be kind"}), expected)
    assert same_samples(samples("b", {"conversation": CHAT}, {"conversation": [system, *CHAT]}), expected)
    other = [{"from": "system", "value": "be kind"}, {"from": "system", "value": "hello ö"}, *turns[1:]]
    assert not same_samples(samples("c", {"conversations": turns}, {"conversations": other}), expected)
    for wrong, told in (
        ([{"from": "narrator", "value": "x"}], "line 2: column conversations has a turn from 'narrator'; known are"),
        ([{"from": "gpt", "value": None}], "line 2: column conversations has a turn of gpt whose value is no text"),
        ("hello", 'line 2: column conversations is not a list of {"from"'),
    ):
        with pytest.raises(UserError, match=re.escape(told)):
            samples(f"wrong {told[-9:]}".replace('"', ""), {"conversations": turns}, {"conversations": wrong})


def test_instructions_are_examples(tokenizer, tmp_path, cache, monkeypatch):
    """With a chat template as messages, without one as a prompt; an empty input is none."""
    rows = [{"instruction": "sum", "input": "1 2", "output": "3"}, {"instruction": "hi", "input": "", "output": "ho"}]
    source = source_of(tmp_path / "a.jsonl", [row | {"text": "all of it"} for row in rows])
    prompts = ["### Instruction:\nsum\n\n### Input:\n1 2\n\n### Response:\n", "### Instruction:\nhi\n\n### Response:\n"]
    pairs = [{"prompt": prompt, "completion": row["output"]} for prompt, row in zip(prompts, rows, strict=True)]
    expected = tokenize(source_of(tmp_path / "b.jsonl", pairs), tokenizer, 500, None, cache)
    assert same_samples(tokenize(source, tokenizer, 500, None, cache), expected)
    train_tokenizer(source, 300, cache)  # from the same texts
    assert tokenize(source, tokenizer, 500, "blocks", cache).meta["columns"] == ["text"]  # the control
    monkeypatch.setattr(tokenizer, "chat_template", PLAIN)
    asked = ["sum\n\n1 2", "hi"]
    chats = [
        [{"role": "user", "content": one}, {"role": "assistant", "content": row["output"]}]
        for one, row in zip(asked, rows, strict=True)
    ]
    expected = tokenize(source_of(tmp_path / "c.jsonl", [{"messages": c} for c in chats]), tokenizer, 500, None, cache)
    assert same_samples(tokenize(source, tokenizer, 500, None, cache), expected)


@pytest.mark.parametrize("template", [PLAIN, TAGGED], ids=["prefixes", "generation tags"])
def test_only_the_assistant_is_predicted(tokenizer, tmp_path, cache, monkeypatch, template):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    samples = tokenize(source_of(tmp_path / "a.jsonl", [{"messages": CHAT}] * 2), tokenizer, 500, None, cache)
    assert targets_as_text(tokenizer, samples[1]) == "zwölf 🥊</>\ndef f(x):</>\n"
    whole = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    assert samples[0][0].tolist() == whole["input_ids"][:-1]
    if template == TAGGED:  # what transformers computes itself
        assert samples[0][2].tolist() == np.flatnonzero(whole["assistant_masks"][1:]).tolist()
    # the control: without the spans everything would be a target
    everything = source_of(tmp_path / "b.jsonl", [{"text": tokenizer.decode(whole["input_ids"])}])
    assert "hello" in targets_as_text(tokenizer, tokenize(everything, tokenizer, 500, "examples", cache)[0])


def test_messages_from_parquet_have_no_keys_of_other_messages(tokenizer, tmp_path, cache, monkeypatch):
    monkeypatch.setattr(
        tokenizer, "chat_template", PLAIN.replace("</>", "{% if 'name' in m %}{{ m.name }}{% endif %}</>")
    )
    rows = [{"messages": [*CHAT[:2]]}, {"messages": [CHAT[0] | {"name": "Ann"}, CHAT[1]]}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    samples = tokenize(Source(files=(str(tmp_path / "a.parquet"),)), tokenizer, 500, None, cache)
    first, second = (tokenizer.decode(samples[i][0]) for i in (0, 1))
    assert "None" not in first and "Ann" in second


@pytest.mark.parametrize(
    ("template", "chat", "pattern"),
    [
        (None, CHAT, r"a.jsonl, line 1.*chat template"),
        ("{% for m in messages[-1:] %}{{ m.content }}{% endfor %}", CHAT, r"line 1.*generation"),
        ("{{ raise_exception('roles must alternate') }}", CHAT, r"a.jsonl, line 1: .*roles must alternate"),
        (PLAIN, "hello", r"a.jsonl, line 1: column messages is not a list"),
        (PLAIN, [{"content": "x"}], r"a.jsonl, line 1: column messages is not a list"),
        (PLAIN, [{"role": "user", "content": "\ud800"}], r"a.jsonl, line 1: half a surrogate pair"),
    ],
)
def test_chats_that_cannot_be_masked(tokenizer, tmp_path, cache, monkeypatch, template, chat, pattern):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(UserError, match=pattern) as error:
        tokenize(source_of(tmp_path / "a.jsonl", [{"messages": chat}]), tokenizer, 500, None, cache)
    assert len(str(error.value).splitlines()) == 1


def test_lines_of_a_txt_file_are_examples(tokenizer, tmp_path, cache):
    (tmp_path / "a.txt").write_bytes(b"hello\r\n\n  \na\xe2\x80\xa8b\n")
    samples = tokenize(Source(files=(str(tmp_path / "a.txt"),)), tokenizer, 50, "examples", cache)
    assert [targets_as_text(tokenizer, samples[i]) for i in range(len(samples))] == [
        "hello<|endoftext|>",
        "a\u2028b<|endoftext|>",
    ]
