"""`make quick` finds the tests of what has changed."""

from quick import tests_of

TESTS = {
    "test_batching.py": "",
    "test_data.py": "from common.data import hub, text",
    "test_docs.py": "",
    "test_lm.py": "from common.training.batching import permute",
    "test_modes.py": 'CONFIGS = ["zero1"]',
}


def test_a_changed_file_has_the_tests_of_its_name_and_those_that_name_it():
    assert tests_of(["common/training/batching.py"], TESTS) == ["test_batching.py", "test_lm.py"]
    assert tests_of(["common/data/text.py", "README.md"], TESTS) == ["test_docs.py", "test_data.py"]
    assert tests_of(["accelerate_configs/zero1.yaml"], TESTS) == ["test_modes.py"]
    assert tests_of(["tests/test_lm.py"], TESTS) == ["test_lm.py"]
    assert tests_of(["common/data/texts.py", "LICENSE"], TESTS) == []  # the control: no part of a name
