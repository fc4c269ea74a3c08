"""--on_too_long: longer rows are truncated and counted, left out, or an error, for each kind of row."""

import copy
from dataclasses import replace

import pytest
from conftest import assert_mistake, launch, read_metrics, run_recipe_alone, source_of, write_jsonl
from test_text import PLAIN

from common.data.text import tokenize
from common.errors import UserError
from common.tasks.classify.labels import LabelledTexts, encode_labels, read_examples
from common.tasks.dpo.preferences import tokenize_preferences
from common.tasks.embed.pairs import Columns
from common.tasks.embed.pairs import tokenize_pairs as tokenize_embedding_pairs
from common.tasks.reward.pairs import tokenize_pairs as tokenize_reward_pairs
from common.tasks.seq2seq.pairs import tokenize_pairs

LENGTH = 32
LONG = "hello " * 40


def turns(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def text_samples(source, tokenizer, cache, shape=None):
    return tokenize(source, tokenizer, LENGTH, shape, cache)


def labelled(source, tokenizer, cache):
    name, examples, _ = read_examples(source, None, "label")
    return LabelledTexts(name, examples, encode_labels(examples, ["a"]), tokenizer, LENGTH, source.on_too_long)


def embedding_pairs(source, tokenizer, cache):
    return tokenize_embedding_pairs(source, Columns("anchor", "positive"), tokenizer, LENGTH, ("", ""), cache)


# Per kind of row: the function that makes samples; a short row, a row that is truncated, and a row that loses all
# targets or None; what is said of them when they are truncated, and when they are left out; the error.
KINDS = {
    "texts": (
        lambda *given: text_samples(*given, "examples"),
        *({"text": "a"}, {"text": LONG}, None),
        *("; 1 truncated at 32", "; 1 of more than 32 tokens left out"),
        r"line 2: \d+ tokens, more than --sequence_length 32; shorten or remove the row, raise --sequence_length, or",
    ),
    "completions": (
        text_samples,
        *({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": LONG}, {"prompt": LONG, "completion": "b"}),
        "; 1 truncated at 32; 1 left out, because all their targets are beyond 32 tokens",
        *("; 2 of more than 32 tokens left out", r"line 2: \d+ tokens, more than --sequence_length 32; "),
    ),
    "chats": (
        text_samples,
        *({"messages": turns("a", "b")}, {"messages": turns("a", LONG)}, {"messages": turns(LONG, "b")}),
        "; 1 truncated at 32; 1 left out, because all their targets are beyond 32 tokens",
        *("; 2 of more than 32 tokens left out", r"line 2: \d+ tokens, more than --sequence_length 32; "),
    ),
    "preferences": (
        lambda source, tokenizer, cache: tokenize_preferences(source, tokenizer, LENGTH, "", cache),
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "c" + LONG},
        {"prompt": LONG, "chosen": "b", "rejected": "c"},
        "; 1 answers truncated at 32; 1 left out, because all their targets are beyond 32 tokens",
        *("; 2 of more than 32 tokens left out", r"line 2: rejected has \d+ tokens, more than --sequence_length 32; "),
    ),
    "rewards": (
        lambda source, tokenizer, cache: tokenize_reward_pairs(source, tokenizer, LENGTH, cache),
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "c" + LONG},
        {"prompt": LONG, "chosen": "b", "rejected": "c"},
        "; 1 answers truncated at 32; 1 left out, because both answers are equal within 32 tokens",
        *("; 2 of more than 32 tokens left out", r"line 2: rejected has \d+ tokens, more than --sequence_length 32; "),
    ),
    "sources": (
        lambda source, tokenizer, cache: tokenize_pairs(source, ("source", "target"), tokenizer, LENGTH, 8, cache),
        *({"source": "a", "target": "b"}, {"source": LONG, "target": "b"}, {"source": "a", "target": LONG}),
        "; 1 source truncated at 32; 1 target truncated at 8",
        *("; 2 pairs of more tokens left out", r"line 2: source has \d+ tokens, more than --sequence_length 32; "),
    ),
    "labels": (
        labelled,
        *({"text": "a", "label": "a"}, {"text": LONG, "label": "a"}, None),
        *("; 1 truncated at 32", "; 1 of more than 32 tokens left out"),
        r"line 2: \d+ tokens, more than --sequence_length 32; ",
    ),
    "embeddings": (
        embedding_pairs,
        *({"anchor": "a", "positive": "b"}, {"anchor": "c", "positive": LONG}, None),
        *("; 1 truncated at 32", "; 1 pairs with longer texts left out"),
        r"line 2: a text has \d+ tokens, more than --sequence_length 32; ",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_long_rows_are_counted_left_out_or_an_error(kind, tokenizer, tmp_path):
    """Control: short rows alone, of which nothing is said and which are no error."""
    make, short, *long, truncated, left_out, error = KINDS[kind]
    tokenizer, rows = copy.deepcopy(tokenizer), [short, *filter(None, long), short | {"id": 1}]
    tokenizer.chat_template = PLAIN
    source = source_of(tmp_path / "a.jsonl", rows)
    shorts = source_of(tmp_path / "short.jsonl", [rows[0], rows[-1]])

    def samples(source, choice, cache="cache"):
        return make(replace(source, on_too_long=choice), tokenizer, tmp_path / cache)

    for choice in (None, "truncate"):
        described = samples(source, choice).describe()
        assert truncated in described and "truncated" not in described.replace(truncated, "")
    dropped, expected = samples(source, "drop"), samples(shorts, "error")
    assert left_out in dropped.describe() and "truncated" not in dropped.describe()
    assert len(dropped) == 2 and dropped.fingerprint == expected.fingerprint != samples(source, None).fingerprint
    assert "truncated" not in expected.describe() and "left out" not in expected.describe()
    with pytest.raises(UserError, match=f"a.jsonl, {error}") as raised:
        samples(source, "error")
    assert "truncate or drop" in str(raised.value) and len(str(raised.value).splitlines()) == 1
    only_long = source_of(tmp_path / "long.jsonl", [long[0]])
    with pytest.raises(UserError, match="long.jsonl"):
        samples(only_long, "drop")


def test_the_length_in_the_error_is_enough(tokenizer, tmp_path):
    """Control: one token less is an error."""
    source = replace(source_of(tmp_path / "a.jsonl", [{"prompt": "a", "completion": LONG}]), on_too_long="error")
    with pytest.raises(UserError) as error:
        tokenize(source, tokenizer, LENGTH, None, tmp_path / "cache")
    length = int(str(error.value).partition("line 1: ")[2].split()[0])
    assert len(tokenize(source, tokenizer, length, None, tmp_path / "cache")) == 1
    with pytest.raises(UserError, match=f"{length} tokens, more than --sequence_length {length - 1};"):
        tokenize(source, tokenizer, length - 1, None, tmp_path / "cache")


def test_a_run_says_so_ends_before_it_writes_and_resumes_only_with_the_same_rows(tmp_path):
    rows = [{"prompt": f"{n} and", "completion": LONG if n % 8 == 7 else "so"} for n in range(16)]
    flags = ["--train_file", write_jsonl(tmp_path / "a.jsonl", rows), "--sequence_length", 32, "--num_updates", 2]
    flags += ["--global_batch_size", 2, "--output_dir", tmp_path / "run"]
    assert_mistake(run_recipe_alone("lm.py", *flags, "--on_too_long", "error"), r"a.jsonl, line 8: \d+ tokens, more")
    assert not (tmp_path / "run").exists()
    result = launch(*flags, "--on_too_long", "drop", config="multi_cpu")
    assert "; 2 of more than 32 tokens left out" in result.stdout.partition("output")[0]
    assert len(read_metrics(tmp_path / "run")) == 2
    more = ["--resume", "--num_updates", 3, "--allow_changed", "num_updates"]
    assert_mistake(run_recipe_alone("lm.py", *flags, *more), "the training data differs")


def test_blocks_are_not_truncated(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(LONG * 40)
    flags = ["--train_file", path, "--output_dir", tmp_path / "run", "--sequence_length", 32]
    for choice in ("truncate", "drop", "error"):
        result = run_recipe_alone("lm.py", *flags, "--on_too_long", choice)
        assert_mistake(result, "a.txt: --on_too_long has no effect on blocks, because documents are split, not")
    result = run_recipe_alone("lm.py", *flags, "--on_too_long", "drop", "--shape", "examples", "--dry_run")
    assert_mistake(result, "no sample with a target in it; 1 of more than 32 tokens left out")
