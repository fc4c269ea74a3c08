"""--chat_template: a model from scratch learns to answer in turns, and what is written can be talked to."""

import itertools

import pytest
from conftest import assert_mistake, launch, read_metrics, run_recipe_alone, write_jsonl
from transformers import AutoTokenizer, GenerationConfig

from common.data.chats import CHATML, read_chat_template
from common.data.source_types import Source
from common.data.text import tokenize
from common.data.tokenizer import train_tokenizer
from common.errors import UserError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
CHAT += [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Bye"}]
CHAT += [{"role": "assistant", "content": "See you."}]
TEXT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
    "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\nSee you.<|im_end|>\n"
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    names = ("one", "two", "three", "four")
    rows = [{"messages": [*CHAT, {"role": "user", "content": f"{a} and {b}"}, CHAT[-1]]} for a in names for b in names]
    return write_jsonl(tmp_path_factory.mktemp("chats") / "chats.jsonl", rows)


def test_what_marks_a_turn_is_a_token_and_the_answers_are_learned(tmp_path):
    """Control: without the template it is five tokens, and no sample can be made of messages."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": CHAT}])
    source = Source(files=(str(path),), chat_template=read_chat_template("chatml"))
    tokenizer = train_tokenizer(source, 300, tmp_path / "cache")
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == TEXT
    asked = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert TEXT.startswith(asked) and asked.endswith("<|im_start|>assistant\n")
    marks = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert len(tokenizer("<|im_start|><|im_end|>", add_special_tokens=False)["input_ids"]) == 2
    samples = tokenize(source, tokenizer, 200, None, tmp_path / "cache")
    assert samples.end_tokens == marks[1:]
    learned = tokenizer.decode(samples[0][1])
    assert learned == "Hello.<|im_end|>\nSee you.<|im_end|>\n"
    path = write_jsonl(tmp_path / "b.jsonl", [{"messages": CHAT[2:]}])  # the assistant begins
    samples = tokenize(Source(files=(str(path),)), tokenizer, 200, None, tmp_path / "cache")
    assert tokenizer.decode(samples[0][1]) == learned
    bare = train_tokenizer(Source(files=source.files), 300, tmp_path / "cache")
    assert bare.chat_template is None and len(bare("<|im_start|>", add_special_tokens=False)["input_ids"]) > 1


@pytest.mark.parametrize("recipe", ["lm", "moe"])
def test_a_model_from_scratch_is_trained_on_chats(recipe, chats, tmp_path):
    """Tokenizer and end of an answer are in model/. Control: another template is another tokenizer to a resume."""
    flags = ["--train_file", chats, "--num_updates", 2, "--global_batch_size", 4, "--sequence_length", 128]
    flags += ["--output_dir", tmp_path / "run"]
    script = f"recipes/{recipe}.py"
    launch(*flags, "--chat_template", "chatml", config="multi_cpu", script=script)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == TEXT
    ends = GenerationConfig.from_pretrained(tmp_path / "run/model").eos_token_id
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in (ends if isinstance(ends, list) else [ends])
    assert len(read_metrics(tmp_path / "run")) == 2
    other = tmp_path / "other.jinja"
    other.write_text(CHATML.read_text().replace("<|im_end|>", "<|end|>"))
    more = ["--resume", "--num_updates", 3, "--allow_changed", "num_updates", "--chat_template", other]
    assert_mistake(run_recipe_alone(f"{recipe}.py", *flags, *more), "the tokenizer differs")


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for m in messages %}", r"--chat_template .*bad.jinja, line 1: .*endfor"),
        ("", "--chat_template .*bad.jinja: it writes nothing of a message; loop over `messages` in it"),
        ("hello", "--chat_template .*bad.jinja: it writes nothing of a message"),
        ("{{ raise_exception('no') }}", "cannot be used: no; fix the messages, or the --chat_template"),
        (
            None,
            "--chat_template .*bad.jinja: No such file or directory; name a file with a template in Jinja, or chatml",
        ),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template, problem, chats, tmp_path):
    if template is not None:
        (tmp_path / "bad.jinja").write_text(template)
    flags = ["--train_file", chats, "--chat_template", tmp_path / "bad.jinja", "--output_dir", tmp_path / "run"]
    assert_mistake(run_recipe_alone("lm.py", *flags), problem)
    assert not (tmp_path / "run").exists()


def test_a_content_in_parts_is_their_text_and_an_image_is_refused(tmp_path):
    """Control: one text more makes other samples."""

    def samples(name, content):
        chat = [*CHAT[:2], {"role": "assistant", "content": content}]
        path = write_jsonl(tmp_path / f"{name}.jsonl", [{"messages": chat}])
        source = Source(files=(str(path),), chat_template=read_chat_template("chatml"))
        tokenizer = train_tokenizer(Source(files=(str(texts),), chat_template=source.chat_template), 300, tmp_path)
        return [tokens.tolist() for tokens in tokenize(source, tokenizer, 200, None, tmp_path / name)[0]]

    texts = write_jsonl(tmp_path / "texts.jsonl", [{"messages": CHAT}])
    hello, world = ({"type": "text", "text": text} for text in ("Hello, ", "world."))
    assert samples("parts", [hello, world]) == samples("text", "Hello, world.")
    assert samples("parts", [hello, world]) != samples("more", [hello, world, world])
    with pytest.raises(UserError, match="line 1: column messages has a message with parts that are no text"):
        samples("image", [hello, {"type": "image", "url": "a.png"}])


def test_a_template_beside_text_that_is_no_messages_is_told(tmp_path, tokenizer, monkeypatch, caplog):
    """By the first process. Control: messages. (`tokenize` gives the tokenizer the template.)"""
    monkeypatch.setattr(tokenizer, "chat_template", None)
    rows = {"texts": {"text": "a"}, "pairs": {"prompt": "a", "completion": "b"}, "chats": {"messages": CHAT}}
    for rank, (name, row) in itertools.product("01", rows.items()):
        monkeypatch.setenv("RANK", rank)
        path = str(write_jsonl(tmp_path / f"{name}.jsonl", [row]))
        tokenize(Source(files=(path,), chat_template=read_chat_template("chatml")), tokenizer, 200, None, tmp_path)
        told = f"{path}: --chat_template has no effect on it, for its rows hold no messages"
        assert [record.getMessage() for record in caplog.records] == ([] if rank == "1" or name == "chats" else [told])
        caplog.clear()


def test_a_template_without_data_of_ones_own_is_refused(tmp_path):
    result = run_recipe_alone("lm.py", "--chat_template", "chatml", "--output_dir", tmp_path / "run")
    assert_mistake(result, "--chat_template has no effect without --train_file or --dataset_name")
