"""`make quick` finds the tests of what has changed."""

import pytest
from quick import CORE, MOST, ROOT, TOO_LONG, choose, looks_at, read_sources

EDGES = looks_at(read_sources())


def names_of(*changed):
    chosen = [test.removeprefix("tests/test_").removesuffix(".py") for test in choose(list(changed), EDGES)]
    assert len(chosen) <= MOST * max(1, len(changed))
    return chosen


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ("common/training/batching.py", ["batching"]),
        ("common/data/text.py", ["text", "data"]),
        ("common/tasks/vision/image_files.py", ["vision"]),
        ("common/tasks/moe/moe_model.py", ["moe"]),  # by the recipe alone, as the next one
        ("common/tasks/seq2seq/encoder_decoder.py", ["seq2seq"]),
        ("common/checkpoint/agreement.py", ["checkpoint", "resume"]),
        ("common/parallel/sharding.py", ["modes", "offload"]),
        ("recipes/classify.py", ["classify"]),
        ("docs/data.md", ["docs"]),
        ("tests/test_lm.py", ["lm"]),
    ],
)
def test_a_changed_file_has_its_own_tests_first_then_the_nearest(changed, first):
    assert names_of(changed)[: len(first)] == first


def test_no_module_is_left_to_the_core_which_is_for_no_change():
    modules = [path for path in EDGES if path.startswith("common/") and not path.endswith("__init__.py")]
    assert [path for path in modules if choose([path], EDGES) == CORE] == []
    assert choose([], EDGES) == choose(["LICENSE"], EDGES) == CORE


def test_what_takes_too_long_is_not_chosen_and_is_there():
    assert "tests/test_kills.py" not in choose(["tests/test_kills.py", "tests/kill_runs.py"], EDGES)
    for path, _, name in (test.partition("::") for test in TOO_LONG):
        assert f"def {name}" in (ROOT / path).read_text()


def test_a_config_has_the_tests_that_name_it():
    sources = {"accelerate_configs/mine.yaml": "", "tests/test_a.py": "mine = 1", "tests/test_b.py": 'CONFIG = "mine"'}
    assert choose(["accelerate_configs/mine.yaml"], looks_at(sources)) == ["tests/test_b.py"]


def test_the_first_tests_of_each_changed_file_come_first():
    both = names_of("common/tasks/vision/images.py", "common/tasks/long_sequence/recurrent.py")
    assert both[:2] == ["vision", "long_sequence"]
