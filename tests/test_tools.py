"""Conversations with tools, in the chat templates of many models: targets, and parts that a template leaves out."""

import json
import re
from collections import Counter

import pytest
from chat_templates import FAMILIES, LLAMA3, PHI3, QWEN2, QWEN3, SMOLLM3
from conftest import launch, read_metrics, source_of, write_jsonl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.data.chat_notes import chat_notes
from common.data.chats import encode_chats, start_rendering
from common.data.source_types import Row
from common.data.text import tokenize
from common.errors import UserError
from common.tasks.dpo.preferences import tokenize_preferences

MARKER = re.compile(r"<\|\w+\|>|<｜[^｜]+｜>|\[/?[A-Z_]{3,}\]|<(?:start|end)_of_turn>")


def function(name, **properties):
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"name": name, "description": f"about {name}", "parameters": schema}


BARE = [function("weather", city="string"), function("add", a="number")]
TOOLS = [{"type": "function", "function": tool} for tool in BARE]
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
OTHER = {"id": "abcdefgh2", "type": "function", "function": {"name": "weather", "arguments": {"city": "Basel"}}}
AS_JSON = CALL | {"function": {"name": "weather", "arguments": json.dumps({"city": "Bern"})}}


def user(text):
    return {"role": "user", "content": text}


def says(text):
    return {"role": "assistant", "content": text}


def calls(*found, **more):
    return {"role": "assistant", "tool_calls": list(found)} | more


def result(text, call=CALL, **more):
    return {"role": "tool", "name": "weather", "content": text, "tool_call_id": call["id"]} | more


ROUND = [user("rain?"), calls(CALL), result("42"), says("It is 42.")]
AGAIN = [user("so?"), calls(CALL, content=None), result("7"), says("seven")]
# Conversations, and the tools that they may call.
CHATS = {
    "rounds": ([user("hi"), says("hello"), user("bye"), says("see you")], None),
    "call": (ROUND, TOOLS),
    "two calls": ([*ROUND, *AGAIN], TOOLS),
    "parallel": ([user("?"), calls(CALL, OTHER), result("42"), result("43", OTHER), says("42, 43")], TOOLS),
}
# Forms of the conversation "call" that make the same text in a template, as messages and tools.
SAME = {
    "JSON": ([ROUND[0], calls(AS_JSON), *ROUND[2:]], json.dumps(TOOLS)),
    "JSON of calls": ([ROUND[0], calls() | {"tool_calls": json.dumps([AS_JSON]), "content": None}, *ROUND[2:]], TOOLS),
    "bare call": ([ROUND[0], calls({"id": "abcdefgh1"} | CALL["function"]), *ROUND[2:]], TOOLS),
    "ipython": ([*ROUND[:2], ROUND[2] | {"role": "ipython"}, ROUND[3]], TOOLS),
    "function": ([*ROUND[:2], ROUND[2] | {"role": "function"}, ROUND[3]], TOOLS),
}
OLD = [ROUND[0], {"role": "assistant", "content": None, "function_call": AS_JSON["function"]}, *ROUND[2:]]
# Which families reject which conversations, with the reason of the template.
REJECTED = {
    ("Llama-3.1", "parallel"): "single tool-calls at once",
    **{("Gemma", name): "must alternate" for name in CHATS if name != "rounds"},
    **{("Phi-3", name): "no attribute 'content'" for name in CHATS if name != "rounds"},
}


def bytes_tokenizer(template):
    """A tokenizer with a token per byte, and one per marker of the template."""
    vocabulary = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    markers = sorted(set(MARKER.findall(template)))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", additional_special_tokens=markers
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def process():
    with start_rendering() as process:
        yield process


@pytest.fixture(scope="module")
def encode(process):
    """Returns (text, targets as text, notes) of a conversation in a template."""

    def encoded(template, messages, tools=None):
        tokenizer, counts = bytes_tokenizer(template), Counter()
        row = Row("a.jsonl, line 3", {"messages": messages, "tools": tools})
        ((ids, is_target, text),) = encode_chats([row], tokenizer, counts, process)
        assert tokenizer.decode(ids) == text
        targets = tokenizer.decode([token for token, mask in zip(ids, is_target, strict=True) if mask])
        return text, targets, "\n".join(chat_notes("a.jsonl", counts))

    return encoded


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CHATS)
def test_the_assistants_turns_with_their_calls_are_the_targets(family, name, encode):
    """The targets equal those that a regular expression finds in the text. Control: results are no targets."""
    (template, pattern), (messages, tools) = FAMILIES[family], CHATS[name]
    if reason := REJECTED.get((family, name)):
        with pytest.raises(UserError, match=f"^a.jsonl, line 3: the chat template cannot be used: .*{reason}"):
            encode(template, messages, tools)
        return
    text, targets, notes = encode(template, messages, tools)
    if tools is None or family not in ("DeepSeek", "Hermes"):  # which read a different form
        assert text == bytes_tokenizer(template).apply_chat_template(messages, tools=tools, tokenize=False)
    assert targets == "".join(re.findall(pattern, text)) != ""
    written = [message["content"] for message in messages if message.get("content")]
    assert all(content in text for content in written)
    number = sum(len(message.get("tool_calls") or []) for message in messages)
    if (family, name) == ("Harmony", "parallel"):
        first = "1 messages, first: a.jsonl, line 3"
        assert f"arguments of tool_calls ({first})" in notes and f"names of tool_calls ({first})" in notes
        number = 1
    else:
        assert re.fullmatch(r"(the chat template leaves out (tool_call_id|name|, |\(.*?\)| )+: the .*)?", notes), notes
    assert targets.count("weather") == number and targets.count('"Bern"') == text.count('"Bern"') - text.count('["Bern')
    assert "43" not in targets.replace("42, 43", "") and "so?" not in targets


@pytest.mark.parametrize("family", [name for name in FAMILIES if (name, "call") not in REJECTED])
def test_each_form_of_a_call_is_the_same_text(family, encode):
    template = FAMILIES[family][0]
    text, targets, _ = encode(template, ROUND, TOOLS)
    for name, (messages, tools) in SAME.items():
        found = encode(template, messages, tools)[:2]
        # This template writes the names of unknown roles.
        assert found == (text, targets) or (family, name, found[1]) == ("Llama-3.1", "function", targets), name
    bare = encode(template, ROUND, BARE)
    assert all(f"about {tool['name']}" in bare[0] for tool in BARE) and bare[1] == targets and "tools" not in bare[2]
    if family != "Mistral":  # calls had no id
        assert encode(template, OLD, TOOLS)[:2] == (text, targets)
    assert (
        encode(template, [ROUND[0], calls(OTHER | {"id": "abcdefgh1"}), *ROUND[2:]], TOOLS)[1] != targets
    )  # the control


THINKING = [user("1"), says("<think>hm</think>one, and more"), user("2"), says("<think>so</think>two, and more")]
REASONED = [user("1"), says("one") | {"reasoning_content": "hm"}, user("2"), says("two") | {"reasoning_content": "so"}]
SYSTEM = {"role": "system", "content": "42"}  # which the answer contains
# What a template leaves out: template, messages, tools and what is said of it.
LEFT_OUT = {
    "tools": (PHI3, CHATS["rounds"][0], TOOLS, "tools (1 rows, FIRST)"),
    "a tool's name": (
        QWEN2.replace("tool | tojson", "tool.function.parameters | tojson"),
        ROUND,
        TOOLS,
        "names of tools",
    ),
    "a tool's text": (QWEN2.replace("tool | tojson", "tool.function.name"), ROUND, TOOLS, "descriptions of tools"),
    "parameters": (QWEN2.replace("tool | tojson", "tool.function.name"), ROUND, TOOLS, "parameters of tools (1 rows,"),
    "results": (QWEN2.replace('message.role == "tool"', "false"), ROUND, TOOLS, "content (1 messages, FIRST)"),
    "arguments": (
        QWEN2.replace("tool_call.arguments", "{}"),
        ROUND,
        TOOLS,
        "arguments of tool_calls (1 messages, FIRST)",
    ),
    "calls": (QWEN2.replace("in message.tool_calls", "in []"), ROUND, TOOLS, "tool_calls (1 messages, FIRST)"),
    "a second call": (
        *(QWEN2.replace("in message.tool_calls", "in message.tool_calls[:1]"), *CHATS["parallel"]),
        "names of tool_calls (1 messages, FIRST)",
    ),
    "text beside calls": (
        LLAMA3,
        [ROUND[0], calls(CALL, content="Let me see."), *ROUND[2:]],
        TOOLS,
        "content (1 messages",
    ),
    "system": (QWEN2.replace("messages[0]['content']", "''"), [SYSTEM, *ROUND], None, "content (1 messages, FIRST)"),
    "thoughts": (QWEN3, THINKING, None, "thoughts in content (1 messages, FIRST)"),
    "reasoning": (QWEN3, REASONED, None, "reasoning_content (1 messages, FIRST)"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_what_a_template_leaves_out_is_named_with_its_row(name, encode):
    """Control: the family's own template, or an own part of it, writes the rest, of which nothing is said."""
    template, messages, tools, expected = LEFT_OUT[name]
    notes = encode(template, messages, tools)[2]
    assert expected.replace("FIRST", "first: a.jsonl, line 3") in notes, notes
    if template not in (PHI3, LLAMA3, QWEN3):
        whole = encode(QWEN2, messages, tools)[2]
        assert re.fullmatch(r"(the chat template leaves out (tool_call_id|name|, |\(.*?\)| )+: the .*)?", whole), whole


def test_marks_of_the_template_are_used(encode):
    """Control: without them the line break behind a turn is a target too."""
    template = SMOLLM3.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert encode(SMOLLM3, ROUND, TOOLS)[1].count("\n") == 0
    assert encode(template, ROUND, TOOLS)[1].count("<|im_end|>\n") == 2


def test_sharegpt_has_the_same_samples(tmp_path):
    """Calls are JSON of one or of several. Control: text that is no JSON is an error with its row."""
    tokenizer, call = bytes_tokenizer(QWEN2), json.dumps(AS_JSON["function"])

    def samples(name, *turns):
        turns = [{"from": "human", "value": "rain?"}, *turns, {"from": "gpt", "value": "It is 42."}]
        source = source_of(tmp_path / f"{name}.jsonl", [{"conversations": turns, "tools": json.dumps(TOOLS)}])
        return tokenize(source, tokenizer, 2000, None, tmp_path / "cache")[0]

    source = source_of(tmp_path / "a.jsonl", [{"messages": ROUND, "tools": TOOLS}])
    expected = tokenize(source, tokenizer, 2000, None, tmp_path / "cache")[0]
    for name, value in (("one", call), ("list", f"[{call}]")):
        observed = {"from": "observation", "value": "42"}
        found = samples(name, {"from": "function_call", "value": value}, observed)
        assert [part.tolist() for part in found] == [part.tolist() for part in expected]
    with pytest.raises(UserError, match="text.jsonl, line 1: column conversations has a turn of function_call whose"):
        samples("text", {"from": "function_call", "value": "rain()"}, {"from": "tool", "value": "42"})


def test_preferences_between_calls(tmp_path):
    """The answers differ in a call. Control: the tools and the result before it are no targets."""
    tokenizer = bytes_tokenizer(QWEN3)
    row = {"prompt": [*ROUND, user("and Basel?")], "chosen": [calls(OTHER)], "rejected": [says("No.")], "tools": TOOLS}
    pairs = tokenize_preferences(source_of(tmp_path / "a.jsonl", [row]), tokenizer, 2000, "", tmp_path / "cache")
    chosen, rejected = (tokenizer.decode(stored[stored >= 0]) for stored in pairs[0].answers)
    assert '{"name": "weather", "arguments": {"city": "Basel"}}\n</tool_call><|im_end|>\n' in chosen
    assert rejected.endswith("No.<|im_end|>\n") and "42" not in chosen + rejected


def test_a_run_trains_on_calls(tmp_path):
    """From scratch, with a template from a file, of which one row loses its results. Control: the loss falls."""
    (tmp_path / "a.jinja").write_text(QWEN3)
    rows = [{"messages": [*ROUND, *AGAIN], "tools": TOOLS}] * 15 + [{"messages": REASONED}]
    flags = ["--train_file", write_jsonl(tmp_path / "a.jsonl", rows), "--chat_template", tmp_path / "a.jinja"]
    flags += ["--sequence_length", 400, "--global_batch_size", 4, "--num_updates", 12, "--output_dir", tmp_path / "run"]
    printed = launch(*flags, config="multi_cpu").stdout.partition("output")[0]
    assert f"reasoning_content (1 messages, first: {tmp_path}/a.jsonl, line 16)" in printed
    losses = [line["loss"] for line in read_metrics(tmp_path / "run")]
    assert losses[-1] < losses[0] / 2
