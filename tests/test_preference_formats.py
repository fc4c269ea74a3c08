"""Preferences in the formats of axolotl and LLaMA-Factory become the rows that one would write by hand."""

import numpy as np
import pytest
from conftest import source_of
from transformers import AutoTokenizer

from common.data.chats import CHATML
from common.errors import UserError
from common.tasks.dpo.preferences import tokenize_preferences
from common.tasks.dpo.unpaired import tokenize_unpaired
from common.tasks.reward.pairs import tokenize_pairs

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Two?"}]
ANSWERS = {name: [{"role": "assistant", "content": text}] for name, text in (("chosen", "2"), ("rejected", "three"))}


def turn(message):
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    return {"from": names[message["role"]], "value": message["content"]}


TURNS = [turn(message) for message in PROMPT]
ROWS = {
    "axolotl": {"messages": PROMPT} | {name: messages[0] for name, messages in ANSWERS.items()},
    "LLaMA-Factory": {"conversations": TURNS} | {name: turn(messages[0]) for name, messages in ANSWERS.items()},
    "with system": {"conversations": TURNS[1:], "system": PROMPT[0]["content"]}
    | {name: turn(messages[0]) for name, messages in ANSWERS.items()},
    "texts": {"messages": PROMPT} | {name: messages[0]["content"] for name, messages in ANSWERS.items()},
}


@pytest.fixture
def chat(tokenizer):
    chat = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    chat.chat_template = CHATML.read_text()
    return chat


def test_a_pair_has_the_tokens_of_a_row_of_messages(chat, cache, tmp_path):
    """And keeps its margin, which is a column of reward.py."""

    def source(name, row):
        return source_of(tmp_path / f"{name}.jsonl", [row | {"margin": 2}])

    def is_equal(ours, theirs):
        return all(np.array_equal(a, b) for a, b in zip(ours.answers, theirs.answers, strict=True))

    sources = {name: source(name, row) for name, row in (ROWS | {"plain": {"prompt": PROMPT} | ANSWERS}).items()}
    pairs = {name: tokenize_preferences(sources[name], chat, 256, "", cache)[0] for name in sources}
    assert any((answer >= 0).any() for answer in pairs["plain"].answers)
    for name in ROWS:
        assert is_equal(pairs[name], pairs["plain"]), name
    found, expected = (tokenize_pairs(sources[name], chat, 256, cache)[0] for name in ("LLaMA-Factory", "plain"))
    assert is_equal(found, expected) and found.margin == expected.margin == 2


def test_a_tag_of_kto_is_a_label(chat, cache, tmp_path):
    rows = [("chosen", True), ("rejected", False)]
    labelled = [{"prompt": PROMPT, "completion": ANSWERS[name], "label": label} for name, label in rows]
    tagged = [{"conversations": [*TURNS, turn(ANSWERS[name][0])], "kto_tag": label} for name, label in rows]
    expected, found = (
        tokenize_unpaired(source_of(tmp_path / f"{number}.jsonl", rows), chat, 256, "", cache)
        for number, rows in enumerate((labelled, tagged))
    )
    for index in range(2):
        assert found[index].label == expected[index].label
        for ours, theirs in zip(found[index].answers, expected[index].answers, strict=True):
            assert np.array_equal(ours, theirs)


def test_what_is_no_pair_is_named(chat, cache, tmp_path):
    answered = [*TURNS, turn(ANSWERS["chosen"][0])]
    for values, problem in (
        ({"conversations": answered}, "line 1: column conversations ends with an answer of the assistant"),
        ({"chosen": {"from": "gpt", "value": 3}}, "line 1: column chosen has a turn of gpt whose value is no text"),
        ({"chosen": None}, "line 1: column chosen is not a list of"),
        ({"chosen": {"from": "human", "value": "a"}}, "line 1: chosen does not end with a message of the assistant"),
    ):
        path = tmp_path / f"{problem[-9:]}.jsonl"
        with pytest.raises(UserError, match=problem):
            tokenize_preferences(source_of(path, [ROWS["LLaMA-Factory"] | values]), chat, 256, "", cache)
