"""`make quick` finds the tests of what has changed."""

from quick import CORE, choose

TESTS = {
    "test_batching.py": "",
    "test_data.py": "from common.data import hub, text",
    "test_docs.py": "",
    "test_lm.py": "from common.training.batching import permute",
    "test_modes.py": 'CONFIGS = ["zero1"]',
}


def test_a_changed_file_has_the_tests_of_its_name_and_those_that_name_it():
    assert choose(["common/training/batching.py"], TESTS) == ["test_batching.py", "test_lm.py"]
    assert choose(["common/data/text.py", "README.md"], TESTS) == ["test_docs.py", "test_data.py"]
    assert choose(["accelerate_configs/zero1.yaml"], TESTS) == ["test_modes.py"]
    assert choose(["tests/test_lm.py"], TESTS) == ["test_lm.py"]
    assert choose(["common/data/texts.py"], TESTS) == choose([], TESTS) == CORE  # the control: no part of a name
