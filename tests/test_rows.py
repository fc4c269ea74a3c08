"""Everything that a row contains is used, or reported: tools, system texts, earlier turns, weights, columns."""

import copy
import json

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import assert_mistake, run_recipe_alone, source_of, write_jsonl
from test_text import CHAT, PLAIN, TAGGED, same_samples, targets_as_text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from common.data.chats import CHATML
from common.data.source_types import Source
from common.data.text import tokenize
from common.data.tokenizer import train_tokenizer
from common.errors import UserError
from common.tasks.classify.labels import read_examples
from common.tasks.dpo.preferences import tokenize_preferences
from common.tasks.seq2seq.pairs import tokenize_pairs

SPACED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SPACED_TAGGED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}</>\n"
    "{% endgeneration %}{% else %}{{ m.content }}</>\n{% endif %}{% endfor %}"
)
CALLS = (
    "{% if tools %}[{% for t in tools %}{{ t | tojson }}{% endfor %}]{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{{ ARGUMENTS }}{% endfor %}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
AS_JSON, JOINED, PRINTED = (
    CALLS.replace("{{ ARGUMENTS }}", f"{{{{ {one} }}}}")
    for one in ("c.function.arguments | tojson", "' ' + c.function.arguments", "c.function.arguments")
)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A tokenizer with a token for a word behind a space."""
    path = tmp_path_factory.mktemp("words") / "a.txt"
    path.write_text("user: is it so? assistant: yes no maybe\n" * 50)
    return train_tokenizer(Source(files=(str(path),)), 320, path.parent / "cache")


def words_with_marked_spaces():
    """One that puts a space before every text, as SentencePiece does: parts that are tokenised apart are other text."""
    names = ["<unk>", "</s>", "▁", *(f"▁{word}" for word in "user: assistant: it? yes no".split()), "</>", "\n"]
    tokenizer = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


@pytest.fixture
def tokenizer(tokenizer):
    """A copy, which a test may give a template."""
    return copy.deepcopy(tokenizer)


def ask(answer, **more):
    return [{"role": "user", "content": "it?"}, {"role": "assistant", "content": answer} | more]


def samples_of(tmp_path, tokenizer, template, name, *rows):
    """Of rows in a file of this name: JSON Lines, or Parquet."""
    tokenizer.chat_template = template
    path = tmp_path / name
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        write_jsonl(path, rows)
    return tokenize(Source(files=(str(path),)), tokenizer, 500, None, tmp_path / "cache")


# --- answers


@pytest.mark.parametrize("template", [SPACED, SPACED_TAGGED], ids=["prefixes", "generation tags"])
def test_an_answer_behind_a_space_is_learned_as_it_is_asked_for(words, tmp_path, template):
    """Its first token would begin in the prompt. Control: tokenised as one, it does, and then only the end is left."""
    samples = samples_of(tmp_path, words, template, "a.jsonl", *({"messages": ask(one)} for one in ("yes", "no")))
    assert [targets_as_text(words, samples[n]) for n in (0, 1)] == ["yes</>\n", "no</>\n"]
    whole = words("user: it?</>\nassistant: yes</>\n", add_special_tokens=False)["input_ids"]
    assert words.convert_tokens_to_ids("Ġyes") in whole and "of 2 answers" not in samples.describe()
    given, learned = samples[0][0][: samples[0][2][0] + 1].tolist(), samples[0][1][0]
    assert given == words("user: it?</>\nassistant: ", add_special_tokens=False)["input_ids"]
    assert given + [learned] != whole[: len(given) + 1]
    prompt = ask("")[:1]
    row = {"prompt": prompt, "chosen": ask("yes")[1:], "rejected": ask("no")[1:]}
    pair = tokenize_preferences(source_of(tmp_path / "b.jsonl", [row]), words, 90, "", tmp_path / "cache")[0]
    assert [words.decode(stored[stored >= 0]) for stored in pair.answers] == ["yes</>\n", "no</>\n"]


def test_an_answer_that_cannot_be_tokenised_apart_keeps_its_first_token(tmp_path):
    tokenizer = words_with_marked_spaces()
    samples = samples_of(tmp_path, tokenizer, SPACED.replace("</>\n", " "), "a.jsonl", {"messages": ask("yes")})
    assert tokenizer.convert_ids_to_tokens(samples[0][1])[0] == "▁yes"
    assert "of 1 answers" not in samples.describe()


def test_a_first_token_has_something_before_it(words, tmp_path):
    """If the tokenizer puts nothing there: of a completion without a prompt, and of answers that part at once."""
    bare = words.__class__(tokenizer_object=Tokenizer.from_str(words.backend_tokenizer.to_str()), eos_token="</s>")
    bare.backend_tokenizer.post_processor = None
    samples = samples_of(tmp_path, bare, None, "a.jsonl", {"prompt": "", "completion": " yes"})
    assert bare.decode(samples[0][1]) == " yes</s>"
    row = {"chosen": " yes", "rejected": " no"}
    pair = tokenize_preferences(source_of(tmp_path / "b.jsonl", [row]), bare, 90, "", tmp_path / "cache")[0]
    assert [bare.decode(stored[stored >= 0]) for stored in pair.answers] == [" yes</s>", " no</s>"]


def test_answers_without_a_target_are_counted_and_refused_if_they_are_all(words, tmp_path):
    """The template marks what is behind an answer only, or leaves an answer out. Control: it marks all."""
    late = SPACED_TAGGED.replace("{% generation %}{{ m.content }}", "{{ m.content }}{% generation %}")
    rows = [{"messages": ask(one)} for one in ("yes", "no")]
    with pytest.raises(UserError, match="a.jsonl: none of its 2 answers has a target; fix the chat") as error:
        samples_of(tmp_path, words, late, "a.jsonl", *rows)
    assert len(str(error.value).splitlines()) == 1
    some = SPACED_TAGGED.replace("m.role == 'assistant'", "m.content == 'no'")
    told = samples_of(tmp_path, words, some, "b.jsonl", {"messages": [*ask("yes"), *ask("no")]}).describe()
    assert "1 of 2 answers have no targets" in told
    silent = SPACED.replace("m.content", "'' if loop.index == 2 else m.content")
    told = samples_of(tmp_path, words, silent, "c.jsonl", {"messages": [*ask("yes"), *ask("no")]}).describe()
    assert "leaves out content (1 messages, first: " in told and "1 of 2 answers have no targets" in told
    assert "of 2 answers" not in samples_of(tmp_path, words, SPACED_TAGGED, "d.jsonl", *rows).describe()


@pytest.mark.parametrize("template", [PLAIN, TAGGED], ids=["prefixes", "generation tags"])
@pytest.mark.parametrize("key", ["weight", "train", "loss"])
def test_a_turn_of_weight_0_is_context(tokenizer, tmp_path, template, key):
    def samples(name, *flags):
        turns = [turn if flag is None else turn | {key: flag} for turn, flag in zip(CHAT, flags, strict=True)]
        return samples_of(tmp_path, tokenizer, template, f"{name}.jsonl", {"messages": turns})

    both, last = "zwölf 🥊</>\ndef f(x):</>\n", "def f(x):</>\n"
    cases = {last: [(None, 0, None, 1), (0, False, 0, True), (None, 0.0, None, None)]}
    cases[both] = [(None, None, None, None), (None, 1, None, True), (1, 1, 1, 1)]
    for expected, found in cases.items():
        for flags in found:
            made = samples(str(len(list(tmp_path.iterdir()))), *flags)
            assert targets_as_text(tokenizer, made[0]) == expected
            assert ("2 messages of other roles have weight 1: only" in made.describe()) == (flags[0] == 1)
    turns = [turn | {key: 1, "weight": 1} for turn in CHAT]
    for name, wrong, told in (
        ("half", CHAT[1] | {key: 0.5}, f"of assistant with {key} 0.5; only 0 \\(context\\) and 1 \\(learned\\) are"),
        (
            "both",
            CHAT[1] | {key: 1, "loss_mask": 0},
            f"of assistant with {key} 1 and loss_mask 0, which contradict each other",
        ),
    ):
        with pytest.raises(UserError, match=f"line 2: column messages has a message {told}") as error:
            samples_of(
                tmp_path, tokenizer, template, f"{name}.jsonl", {"messages": turns}, {"messages": [CHAT[0], wrong]}
            )
        assert len(str(error.value).splitlines()) == 1


# --- tools


def call(arguments, **more):
    function = {"name": "level", "arguments": arguments}
    return ask(None, tool_calls=[{"id": "c", "type": "function", "function": function} | more])


def test_tools_reach_the_template_as_objects_or_as_json(tokenizer, tmp_path):
    tools = [{"type": "function", "function": {"name": "level", "description": "hello ö", "strict": None}}]
    row = {"messages": CHAT}
    bare, *made = [
        samples_of(tmp_path, tokenizer, AS_JSON, f"{number}.jsonl", row | more)
        for number, more in enumerate([{"tools": []}, {"tools": tools}, {"tools": json.dumps(tools)}])
    ]
    assert same_samples(*made) and not same_samples(bare, made[0])
    text = tokenizer.decode(made[0][0][0])
    assert text.startswith('[{"type": "function", "function": {"name": "level", "description": "hello ö"}}]<user>')
    turns = [{"from": "human", "value": "hello ö"}, {"from": "gpt", "value": "x"}]
    others = {"conversations": turns}, {"instruction": "hello ö", "output": "x"}
    for number, other in enumerate(others):
        found = samples_of(tmp_path, tokenizer, AS_JSON, f"other {number}.jsonl", other | {"tools": tools})
        assert tokenizer.decode(found[0][0]).startswith('[{"type": "function", ')
    told = samples_of(tmp_path, tokenizer, PLAIN, "plain.jsonl", row | {"tools": tools}).describe()
    first = f"first: {tmp_path}/plain.jsonl, line 1"
    assert f"the chat template leaves out tools (1 rows, {first}): the model does not see them" in told
    for number, wrong in enumerate(["level", {"name": "level"}, ["level"], 3]):
        with pytest.raises(UserError, match="line 1: column tools is neither a list of functions nor JSON of one"):
            samples_of(tmp_path, tokenizer, AS_JSON, f"wrong {number}.jsonl", row | {"tools": wrong})
    answers = {"chosen": ask("yes"), "rejected": ask("no"), "tools": tools}
    pairs = tokenize_preferences(
        source_of(tmp_path / "pairs.jsonl", [answers]), chat(tokenizer, AS_JSON), 500, "", tmp_path / "cache"
    )
    stored = pairs[0].answers[0]
    assert tokenizer.decode(np.where(stored < 0, ~stored, stored)).startswith('[{"type": "function", ')


def chat(tokenizer, template):
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [AS_JSON, JOINED, PRINTED], ids=["as JSON", "joined", "printed"])
def test_calls_are_the_same_from_parquet_and_from_json(tokenizer, tmp_path, template):
    """Arrow gives each call the keys of all, and OpenAI has the arguments as JSON. Control: other arguments."""
    given = [{"river": "Aare", "at": {"day": 1}}, {"city": "Bern"}, {}]
    rows = [{"messages": call(one)} for one in given]
    found = {
        name: samples_of(tmp_path, tokenizer, template, name, *some)
        for name, some in {
            "a.jsonl": rows,
            "b.parquet": rows,
            "c.jsonl": [{"messages": call(json.dumps(one, indent=1))} for one in given],
            "d.jsonl": [{"messages": call(one)} for one in [{"river": "Rhine", "at": {"day": 1}}, *given[1:]]],
        }.items()
    }
    expected = found.pop("a.jsonl")
    assert [same_samples(one, expected) for one in found.values()] == [True, True, False]
    assert '{"river": "Aare", "at": {"day": 1}}</>' in tokenizer.decode(expected[0][1]).replace("'", "?")
    assert "nulls inside of messages and tools left out" in found["b.parquet"].describe()
    assert "nulls" not in expected.describe()


def test_what_the_template_does_not_write_is_named(tokenizer, tmp_path):
    """Of each key, in how many messages. Control: a template that writes it."""
    turns = ask("yes", reasoning_content="hm", name="bob") + ask("no", mood="oh", tool_calls=[{"name": "f"}])
    told = samples_of(tmp_path, tokenizer, PLAIN, "a.jsonl", {"messages": turns}, {"messages": CHAT}).describe()
    keys, first = ("mood", "name", "reasoning_content", "tool_calls"), f"first: {tmp_path}/a.jsonl, line 1"
    names = ", ".join(f"{key} (1 messages, {first})" for key in keys)
    assert f"the chat template leaves out {names}: the model does not see them" in told
    thinks = PLAIN.replace("{{ m.content", "{{ m.reasoning_content }}{{ m.name }}{{ m.content")
    told = samples_of(tmp_path, tokenizer, thinks, "a.jsonl", {"messages": turns}).describe()
    assert f"leaves out mood (1 messages, {first}), tool_calls (1 messages, {first})" in told
    deaf = PLAIN.replace("{{ m.content }}", "{{ m.content if m.role != 'system' }}")
    system = {"role": "system", "content": "be kind"}
    told = samples_of(tmp_path, tokenizer, deaf, "c.jsonl", {"messages": [system, *CHAT]}).describe()
    assert "the chat template leaves out content (1 messages, first: " in told
    turned = [{"from": "human", "value": "x", "weight": 0, "lang": "de"}, {"from": "gpt", "value": "y"}]
    told = samples_of(tmp_path, tokenizer, PLAIN, "d.jsonl", {"conversations": turned}).describe()
    assert "leaves out lang (1 messages, first: " in told and "weight" not in told


# --- columns beside messages and instructions


def test_what_a_template_leaves_out_of_an_answer_is_counted(tokenizer, tmp_path):
    """As those do that drop what comes before </think>. Control: one that writes all of it, in another place."""

    def told(template, *answers):
        rows = [{"messages": ask(one)} for one in answers]
        return samples_of(tmp_path, tokenizer, template, "a.jsonl", *rows).describe()

    last = PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
    first = PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[0] }}")
    thought, said = "<think>only thoughts</think>", "<think>deep thoughts good bad</think>yes"
    for template in (last, first):
        with pytest.raises(UserError, match="none of its 2 answers has a target"):
            told(template, *([thought] * 2 if template == last else ["</think>only said"] * 2))
    assert "1 of 2 answers have no targets" in told(last, thought, "yes")
    assert "1 of 2 answers are only partly targets" in told(last, said, "yes")
    apart = "{% set parts = m.content.split('</think>') %}{{ parts[0] }} </think> {{ parts[-1] }}"
    assert "of 2 answers" not in told(PLAIN.replace("{{ m.content }}", apart), said, said)


def test_system_and_history_become_turns(tokenizer, tmp_path):
    system = {"role": "system", "content": "be kind"}
    row = {"instruction": "x", "output": "def f(x):", "system": "be kind", "history": [["hello ö", "zwölf 🥊"]]}
    bare = {"instruction": "x", "output": "y", "system": "", "history": None}
    expected = samples_of(
        tmp_path,
        tokenizer,
        PLAIN,
        "a.jsonl",
        {"messages": [system, *CHAT]},
        {"messages": [CHAT[2], CHAT[3] | {"content": "y"}]},
    )
    for name in ("b.jsonl", "b.parquet"):
        assert same_samples(samples_of(tmp_path, tokenizer, PLAIN, name, row, bare), expected)
    turned = [{"from": "human" if turn["role"] == "user" else "gpt", "value": turn["content"]} for turn in CHAT]
    for name, other in (("c", {"messages": CHAT}), ("d", {"conversations": turned})):
        made = samples_of(tmp_path, tokenizer, PLAIN, f"{name}.jsonl", other | {"system": "be kind"})
        assert all(np.array_equal(a, b) for a, b in zip(made[0], expected[0], strict=True))
    same = {"messages": [system, *CHAT], "system": "be kind"}
    assert samples_of(tmp_path, tokenizer, PLAIN, "e.jsonl", same)[0][0].tolist() == expected[0][0].tolist()
    told = {
        "f": (same | {"system": "be rude"}, "has a system text in column system and another in its messages; keep one"),
        "g": (
            row | {"history": ["hello"]},
            r"column history is not a list of pairs, \[question, answer\]; fix the row",
        ),
        "h": (row | {"system": 3}, "column system is of type int, not a string"),
    }
    for name, (wrong, problem) in told.items():
        with pytest.raises(UserError, match=f"line 1: {problem}"):
            samples_of(tmp_path, tokenizer, PLAIN, f"{name}.jsonl", wrong)
    with pytest.raises(UserError, match="line 1: column history has earlier turns, which need a --chat_template; name"):
        samples_of(tmp_path, tokenizer, None, "i.jsonl", row)
    ids = samples_of(tmp_path, tokenizer, None, "j.jsonl", row | {"history": []})[0][0]
    assert "be kind\n\n### Instruction:\nx\n\n### Response:\n" in tokenizer.decode(ids)


def test_preferences_have_their_context_or_are_refused(tokenizer, tmp_path):
    def pairs(name, row):
        source = source_of(tmp_path / f"{name}.jsonl", [row])
        return tokenize_preferences(source, chat(tokenizer, PLAIN), 500, "", tmp_path / "cache")

    def same(one, other):
        return all(np.array_equal(a, b) for a, b in zip(one[0].answers, other[0].answers, strict=True))

    context = {"system": "be kind", "history": [["hello ö", "zwölf 🥊"]]}
    prompt = [{"role": "system", "content": "be kind"}, *CHAT[:2], *ask("")[:1]]
    answers = {"chosen": ask("yes")[1:], "rejected": ask("no")[1:]}
    expected = pairs("a", {"prompt": prompt} | answers)
    assert same(pairs("b", {"prompt": prompt[3:]} | answers | context), expected)
    assert same(pairs("c", {"chosen": ask("yes"), "rejected": ask("no")} | context), expected)
    assert same(pairs("d", {"prompt": [prompt[0], prompt[3]]} | answers | context), expected)
    assert not same(pairs("e", {"prompt": prompt[3:]} | answers), expected)  # the control
    texts = {"chosen": "yes", "rejected": "no"}
    for number, (wrong, problem) in enumerate(
        [
            ({"prompt": "it?", **texts, "system": "be kind"}, "system: needs a prompt of messages"),
            ({"prompt": "it?", **texts, "tools": [{}]}, "tools: needs a prompt of messages"),
            (
                {"question": "it?", **texts},
                "there is no prompt, and chosen does not contain the text of column question",
            ),
            (
                {"instruction": "it?", **answers},
                "there is no prompt, and chosen does not contain .* column instruction",
            ),
        ]
    ):
        with pytest.raises(UserError, match=f"line 1: {problem}") as error:
            pairs(f"wrong {number}", wrong)
        assert len(str(error.value).splitlines()) == 1
    half = {"chosen": ask("yes", weight=0), "rejected": ask("no")}
    with pytest.raises(
        UserError, match="chosen has an answer of weight 0, but all of an answer is compared; remove its"
    ):
        pairs("half", half)
    earlier = [*ask("so", weight=0), *ask("")[:1]]
    assert len(pairs("earlier", {"prompt": earlier} | answers)) == 1  # is context, as every earlier answer
    fine = pairs("f", {"question": "it?", "chosen": "it? yes", "rejected": "it? no", "score_chosen": 3.5})
    assert fine.describe().endswith("columns not used: score_chosen (all rows have equal weight)")
    said = pairs("g", {"question": "so?", "chosen": ask("yes"), "rejected": ask("no")})
    assert said.describe().endswith("columns not used: question (its text is not trained on)")


KINDS = {
    "text": {"text": "hello"},
    "pair": {"prompt": "a", "completion": "b"},
    "messages": {"messages": CHAT},
    "conversations": {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
    "instruction": {"instruction": "a", "output": "b"},
}


@pytest.mark.parametrize("file", ["a.jsonl", "a.parquet"])
def test_columns_that_nothing_uses_are_named(tokenizer, tmp_path, file):
    """Of every kind of row; those with a meaning elsewhere first. Control: without them, and with nulls, no line."""
    extra, told = (
        {"id": 7, "weight": 0.5, "images": ["a.png"]},
        "images (only text is trained on), weight (all rows have equal weight), id",
    )
    for kind, row in KINDS.items():
        (tmp_path / kind).mkdir()
        plain = samples_of(tmp_path / kind, tokenizer, PLAIN, f"plain {file}", row)
        made = samples_of(tmp_path / kind, tokenizer, PLAIN, file, row, row | extra)
        first = samples_of(tmp_path / kind, tokenizer, PLAIN, f"first {file}", row | extra, row)
        assert "columns not used" not in plain.describe() and "json" not in plain.meta["notes"]
        assert first.meta["notes"] == [f"columns not used: {told}"]
        assert made.meta["notes"] == first.meta["notes"] or file == "a.parquet"  # whose columns are the first row's
        assert first.describe().endswith(f"\n{'':12}columns not used: {told}")
    source = source_of(tmp_path / "pairs.jsonl", [{"source": "a", "target": "b"} | extra])
    pairs = tokenize_pairs(source, ("source", "target"), tokenizer, 9, 9, tmp_path / "cache")
    assert pairs.describe().endswith(f"\n{'':12}columns not used: {told}")
    source = source_of(tmp_path / "labels.jsonl", [{"text": "a", "label": "b"} | extra])
    assert read_examples(source, None, "label")[0].endswith(f"labels.jsonl (columns not used: {told})")


def test_texts_to_classify_that_are_empty_are_left_out_and_counted(tmp_path):
    rows = [{"text": text, "second": second, "label": "x", "id": 1} for text in ("a", "", "b") for second in ("c", " ")]
    name, examples, _ = read_examples(source_of(tmp_path / "rows.jsonl", rows), "second", "label")
    assert name.endswith("rows.jsonl (4 rows with an empty text left out; columns not used: id)")
    assert [example.texts for example in examples] == [("a", "c"), ("b", "c")]


@pytest.mark.parametrize("recipe", ["lm", "classify"])
def test_the_first_block_names_them(recipe, tmp_path):
    rows = [{"text": f"hello {n}", "label": "ab"[n % 2], "sample_weight": 2} for n in range(8)]
    flags = ["--train_file", write_jsonl(tmp_path / "a.jsonl", rows), "--dry_run", "--global_batch_size", 1]
    result = run_recipe_alone(f"{recipe}.py", *flags, "--sequence_length", 32)
    block = result.stdout.partition("output")[0]
    assert result.returncode == 0 and "columns not used: " in block, result.stderr
    assert "sample_weight (all rows have equal weight)" in block


def test_a_weight_that_is_no_switch_ends_a_run_in_one_line(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": ask("yes", weight=2)}])
    flags = ["--train_file", path, "--chat_template", CHATML, "--output_dir", tmp_path / "run"]
    assert_mistake(
        run_recipe_alone("lm.py", *flags), "line 1: column messages has a message of assistant with weight 2;"
    )
    assert not (tmp_path / "run").exists()


def test_parquet_files_need_not_have_the_same_columns(tokenizer, tmp_path):
    """A second file's system text is honoured, its other columns are named. A data set on the disk says the same."""
    rows = [{"messages": CHAT}, {"messages": CHAT, "system": "be kind", "name": "bob"}]
    for number, row in enumerate(rows):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / f"{number}.parquet")
    whole = [{"system": None, "name": None} | row for row in rows]
    datasets.Dataset.from_list(whole).save_to_disk(tmp_path / "saved")
    tokenizer.chat_template, cache = PLAIN, tmp_path / "cache"
    expected = tokenize(source_of(tmp_path / "a.jsonl", rows), tokenizer, 500, None, cache)
    assert "be kind" in tokenizer.decode(expected[1][0])
    for source in (Source(files=(str(tmp_path / "?.parquet"),)), Source(dataset_name=str(tmp_path / "saved"))):
        made = tokenize(source, tokenizer, 500, None, cache)
        assert same_samples(made, expected) and made.meta["notes"] == ["columns not used: name"]
