"""Private names of other libraries: all in common/internals/, and each works with the installed version.

Judges a new version of a library in half a minute. Then raise TESTED in common/versions.py and requirements.txt.
"""

import argparse
import ast
import copy
import functools
import importlib.util
import multiprocessing
import re

import pytest
import torch
from conftest import BIN, ROOT, run
from packaging.version import Version
from private_names import OURS, find_private_names
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MambaForCausalLM, T5Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from common.broken_versions import exit_with
from common.errors import UserError
from common.internals import bitsandbytes as of_bitsandbytes
from common.internals import datasets as of_datasets
from common.internals import huggingface_hub as of_hub
from common.internals import python as of_python
from common.internals import python_uncommon as rare_python
from common.internals import torch as of_torch
from common.internals import torch_uncommon as rare_torch
from common.internals import transformers as of_transformers
from common.internals import transformers_uncommon as rare_transformers
from common.internals.evaluate import configure
from common.internals.library import private
from common.internals.missing_name import describe_missing_name
from common.versions import TESTED, broken_versions, check_versions, versions

INTERNALS = ROOT / "common/internals"


# --- nothing private outside of common/internals/


def sources():
    paths = [path for folder in OURS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths if INTERNALS not in path.parents}


# Attributes of our own modules that a process replaces in itself.
OWN = {"head._logits_to_gradient"}


def test_private_names_of_libraries_are_in_one_place():
    assert [line for line in find_private_names(sources()) if line.split()[1] not in OWN] == []


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from torch._subclasses import FakeTensor", "torch._subclasses.FakeTensor"),
        ("import torch.utils._pytree", "torch.utils._pytree"),
        ("from safetensors.torch import _TYPES as DTYPES", "safetensors.torch._TYPES"),
        ("names = list(nn.Linear(1, 1)._parameters)", "._parameters"),
        ("buffers = module._buffers", "module._buffers"),
        ("has_adapter = getattr(model, '_hf_peft_config_loaded', False)", "_hf_peft_config_loaded"),
        ("cached_file(name, _raise_exceptions_for_missing_entries=False)", "cached_file(_raise_exceptions_for_"),
        ("torch.nn.functional.dropout = print", "torch.nn.functional.dropout ="),
        ("setattr(torch.distributed, name, print)", "setattr(torch.distributed)"),
    ],
)
def test_a_private_name_in_a_source_is_found(line, name):
    """The control."""
    (found,) = find_private_names({"file.py": f"import torch\nfrom torch import nn\n\n{line}\n"})
    assert found.startswith("file.py:4 ") and name in found


@pytest.mark.parametrize(
    "line", ["key = torch.ops.aten._grouped_mm.default", "os._exit(1)", "row._replace(a=1)", "sys.excepthook = print"]
)
def test_a_documented_name_is_none(line):
    assert find_private_names({"file.py": f"import os, sys, torch\n{line}\n"}) == []


def test_each_function_is_tried_here():
    text = ROOT.joinpath("tests/test_internals.py").read_text()
    for path in INTERNALS.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name != "Fragment":
                assert re.search(rf"\b{node.name}\b", text), f"{path.name}: {node.name}"


def test_a_name_that_is_not_there_is_one_line():
    assert describe_missing_name("no_such_library", "name") is None
    assert private("torch.nn.functional", "dropout") is nn.functional.dropout
    assert private(nn.Linear, "forward") is nn.Linear.forward
    installed = re.escape(versions()["torch"])
    with pytest.raises(UserError, match=rf"^torch {installed}: torch.nn has no _gone, .*; install torch==2[.\d]+$"):
        private("torch.nn", "_gone")
    with pytest.raises(UserError, match=r"^torch .*: torch.nn.modules.linear.Linear has no _gone, which"):
        private(nn.Linear, "_gone")
    with pytest.raises(ImportError):
        private("no_such_library", "name")


# --- versions


def test_the_combinations_that_have_been_run_are_the_tested_versions(caplog):
    """Those of the page's table, of which the first is the required one: none prints a line."""
    required = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    page = (ROOT / "docs/machines.md").read_text()
    cells = [re.findall(r"[^| ]+", line) for line in re.findall(r"^\| (Python .*|3\.\d.*)$", page, re.MULTILINE)]
    names = cells[0][1:6]  # after Python
    rows = [dict(zip(names, row[1:6], strict=True)) for row in cells[1:]]
    assert rows[0] == {name: required[name] for name in names}
    for name, tested in TESTED.items():
        run = sorted((row.get(name, required[name]) for row in rows), key=Version)
        assert tested == (run[0], run[-1]), name
    for row in rows:
        check_versions(row)
    check_versions({name: required[name] for name in TESTED} | {"torch": "2.13.0+cu130"})
    assert not caplog.records


def test_an_untested_version_is_one_line(caplog):
    check_versions({"torch": "2.10.1", "transformers": "5.24.0.dev0", "accelerate": "1.15.0", "peft": "0.21.3"})
    (record,) = caplog.records
    assert record.getMessage() == (
        "untested versions: torch 2.10.1 (tested: 2.11.0 to 2.13.0), transformers 5.24.0.dev0 (tested: 5.17.0 to "
        "5.23.0), peft 0.21.3 (tested: 0.21.2); if something fails, install requirements.txt"
    )


def test_a_version_that_does_not_work_is_an_error():
    lines = list(broken_versions({"torch": "2.5.1+cu121", "transformers": "4.57.6", "accelerate": "1.10.0"}))
    assert lines[0] == "torch 2.5.1+cu121: has no torch.distributed.fsdp.FSDPModule; install torch==2.13.0"
    assert lines[1].startswith("transformers 4.57.6: has") and len(lines) == 2


@pytest.mark.parametrize(("version", "status"), [("4.57.6", 2), (versions()["transformers"], 0)])
def test_a_recipe_ends_before_it_imports_a_version_that_does_not_work(version, status, tmp_path):
    """Control: the installed version."""
    metadata = tmp_path / f"transformers-{version}.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n")
    code = "import sys, common; assert 'torch' not in sys.modules"
    result = run([BIN / "python", "-c", code], PYTHONPATH=f"{tmp_path}:{ROOT}")
    line = f"error: transformers {version}: has no transformers.PreTrainedConfig; install transformers==5.23.0\n"
    assert (result.returncode, result.stderr) == (status, line if status else "")


@pytest.mark.parametrize(("rank", "printed"), [("0", "error: a\nerror: b\n"), ("1", "")])
def test_one_rank_names_the_versions_that_do_not_work(rank, printed, monkeypatch, capsys):
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(SystemExit, match="^2$"):
        exit_with(["a", "b"])
    assert capsys.readouterr().err == printed


# --- torch


def test_parameters_are_replaced_for_a_block_and_no_hook_runs():
    norm, calls, x = nn.BatchNorm1d(2), [], torch.randn(4, 2)
    norm.register_forward_hook(lambda *_: calls.append(1))
    norm.weight.data, norm.bias.data = norm.weight.data.bfloat16(), norm.bias.data.bfloat16()
    before = dict(norm.named_parameters())
    with pytest.raises(ZeroDivisionError):
        with of_torch.replace_parameters(norm, {name: p.float() * 3 for name, p in before.items()}):
            assert torch.allclose(type(norm).forward(norm, x).std(0, correction=0), torch.tensor(3.0), rtol=1e-3)
            raise ZeroDivisionError
    after = dict(norm.named_parameters())
    assert all(after[name] is p for name, p in before.items()) and not calls


def test_a_state_dict_has_the_persistent_buffers():
    module = nn.Module()
    module.register_buffer("saved", torch.ones(2))
    module.register_buffer("computed", torch.ones(2), persistent=False)
    module.register_buffer("nothing", None)
    ((name, buffer),) = of_torch.persistent_buffers(module)
    assert [name] == list(module.state_dict()) == ["saved"] and buffer is module.saved


def test_writes_are_counted_and_storages_told_apart():
    x = torch.zeros(2)
    before = of_torch.write_count(x)
    assert of_torch.write_count(x) == before
    x.add_(1)
    assert of_torch.write_count(x) > before
    with of_torch.fake_mode():
        y, z = torch.zeros(2), torch.zeros(2)
        assert of_torch.storage_key(y) == of_torch.storage_key(y.view(1, 2)) != of_torch.storage_key(z)


def test_a_compiled_module_runs_its_own_code_where_it_must():
    class Layer(nn.Module):
        def forward(self, x):
            return x.sin() + 1

    layer, graphs = Layer(), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    layer.compile(backend=backend)
    rare_torch.compiled_only_if(layer, lambda x: len(x) > 1)
    for rows, expected in ((1, 0), (3, 1), (1, 1)):
        x = torch.randn(rows, 2)
        assert torch.equal(layer(x), layer.forward(x)) and len(graphs) == expected
    torch._dynamo.reset()


def test_tensors_are_scaled_in_place():
    tensors = [torch.randn(3), torch.randn(2, 2)]
    expected = [x * torch.tensor(0.3) / 7 for x in tensors]
    of_torch.multiply_in_place(tensors, torch.tensor(0.3))
    of_torch.divide_in_place(tensors, 7)
    assert all(torch.equal(x, y) for x, y in zip(tensors, expected, strict=True))


def test_operators_and_extensions(tmp_path, monkeypatch):
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert of_torch.argument_names(attention)[:5] == ["query", "key", "value", "dropout_p", "is_causal"]
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert of_torch.extension_directory("some") == tmp_path / "some" and (tmp_path / "some").is_dir()


def test_operators_are_seen_without_data():
    calls = []

    class Mode(of_torch.dispatch_mode()):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with of_torch.fake_mode() as fake, Mode():
        x = fake.from_tensor(torch.ones(2, 2))
        assert of_torch.is_fake(x @ x)
        with of_torch.without_fakes():
            assert not of_torch.is_fake(torch.ones(2))
        before = len(calls)
        made = of_torch.make_fake(fake, torch.int8, ((2, 3), (3, 1), 0), torch.device("cpu"))
        assert (made.shape, made.dtype, made.device.type) == ((2, 3), torch.int8, "cpu")
        part = of_torch.make_fake(fake, torch.int8, ((3,), (1,), 3), torch.device("cpu"), made.untyped_storage())
        assert part.storage_offset() == 3 and of_torch.storage_key(part) == of_torch.storage_key(made)
        assert of_torch.is_fake(part) and len(calls) == before  # no operator
    assert torch.ops.aten.mm.default in calls
    assert of_torch.tree_leaves([1, (2, {"a": 3})]) == [1, 2, 3]


def test_functions_are_replaced(monkeypatch):
    for owner, name in ((torch.distributed, "all_reduce"), (nn.functional, "dropout")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # set back at the end
    with pytest.raises(ValueError, match="process group"):
        torch.distributed.all_reduce(torch.ones(1))
    of_torch.drop_collectives(["all_reduce"])
    assert torch.distributed.all_reduce(torch.ones(1)) is None
    of_torch.replace_functions(dropout=lambda x, *_: x + 1)
    assert nn.Dropout(0.5)(torch.ones(1)).item() == 2
    with pytest.raises(UserError, match="has no _gone"):
        of_torch.replace_functions(_gone=print)


def test_a_pipeline_schedule_calls_the_backward_that_a_profile_names(monkeypatch):
    from torch.distributed.pipelining import _backward

    owner, name = of_torch.SCHEDULED_BACKWARD
    original, calls = getattr(owner, name), []
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs))
    x = torch.ones(2, requires_grad=True)
    (gradient,) = _backward.stage_backward((x * 3).sum(), None, [x])
    assert calls and gradient.tolist() == [3, 3]


# --- transformers

LLAMA = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture
def llama():
    return LlamaForCausalLM(LlamaConfig(**LLAMA))


def test_a_tokenizer_of_its_own_kind_does_not_encode_with_the_backend_alone(tokenizer):
    class Own(type(tokenizer)):
        def _encode_plus(self, *args, **kwargs):
            return super()._encode_plus(*args, **kwargs)

    assert rare_transformers.encodes_with_backend(tokenizer)
    assert not rare_transformers.encodes_with_backend(Own(tokenizer_object=tokenizer.backend_tokenizer))
    assert not rare_transformers.encodes_with_backend(object())


def test_models_are_made_and_drawn():
    config = LlamaConfig(**LLAMA)
    assert rare_transformers.has_model(AutoModelForCausalLM, config)
    assert not rare_transformers.has_model(AutoModelForCausalLM, T5Config())
    with torch.device("meta"):
        assert rare_transformers.make_model(LlamaForCausalLM, config, dtype=torch.bfloat16).dtype == torch.bfloat16
    model = rare_transformers.make_model(LlamaForCausalLM, config, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    before = {name: p.clone() for name, p in model.named_parameters()}
    rare_transformers.draw_weights(model, model.lm_head)
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert changed == ["lm_head.weight"] and 0.01 < model.lm_head.weight.std() < 0.03


def test_matrices_are_read_in_another_dtype(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, None):
        with rare_transformers.read_matrices_in(dtype):
            model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        assert {p.dtype for p in model.parameters() if p.ndim > 1} == {dtype or torch.float32}
        assert {p.dtype for p in model.parameters() if p.ndim == 1} == {torch.float32}


def test_weights_are_not_tied(llama, tmp_path, monkeypatch):
    """Control: without the block, here with equal values, they are."""
    with torch.no_grad():
        llama.lm_head.weight.copy_(llama.model.embed_tokens.weight)
    llama.save_pretrained(tmp_path)
    config = LlamaConfig(**LLAMA, tie_word_embeddings=True)
    for names in (["lm_head.weight"], []):
        with rare_transformers.keep_untied(names):
            model = LlamaForCausalLM.from_pretrained(tmp_path, config=config)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == (not names)


def test_weights_of_our_own_are_not_in_the_files(llama, tmp_path):
    """Control: without the call, they are."""
    model = copy.deepcopy(llama)
    model.own = nn.Parameter(torch.zeros(1))
    for is_left_out in (False, True):
        if is_left_out:
            rare_transformers.leave_out_of_files(model, {"own"})
        model.save_pretrained(tmp_path / str(is_left_out))
        assert ("own" in load_file(tmp_path / str(is_left_out) / "model.safetensors")) == (not is_left_out)


def test_files_are_found(llama, tmp_path):
    llama.save_pretrained(tmp_path)
    where = {"pretrained_model_name_or_path": str(tmp_path)}
    found = rare_transformers.find_file(where, "config.json", local_files_only=True, must_exist=True)
    assert found == tmp_path / "config.json"
    assert rare_transformers.find_file(where, "none.json", local_files_only=True, must_exist=False) is None
    with pytest.raises(OSError, match="none.json"):
        rare_transformers.find_file(where, "none.json", local_files_only=True, must_exist=True)


def test_a_file_of_the_hub_is_that_of_its_revision(tmp_path):
    """Control: the default revision has a different one."""
    cached = tmp_path / "models--me--model"
    (cached / "refs").mkdir(parents=True)
    for name, commit in (("main", "1" * 40), ("old", "2" * 40)):
        (cached / f"snapshots/{commit}").mkdir(parents=True)
        (cached / f"snapshots/{commit}/config.json").write_text("{}")
        (cached / "refs" / name).write_text(commit)
    code = "from common.internals.transformers_uncommon import find_file; import sys\n"
    code += "where = {'pretrained_model_name_or_path': 'me/model', 'revision': sys.argv[1] or None}\n"
    code += "print(find_file(where, 'config.json', True, True).parent.name)"
    for revision, commit in (("", "1" * 40), ("old", "2" * 40), ("2" * 40, "2" * 40)):
        result = run([BIN / "python", "-c", code, revision], HF_HUB_CACHE=tmp_path, PYTHONPATH=ROOT)
        assert result.stdout.strip() == commit, result.stderr


def test_properties_of_models(llama):
    from transformers import T5ForConditionalGeneration

    assert of_transformers.unsplit_layers(llama) == {"LlamaDecoderLayer"}
    of_transformers.set_unsplit_layers(llama, {"LlamaMLP"})
    assert of_transformers.unsplit_layers(llama) == {"LlamaMLP"} and not of_transformers.unsplit_layers(nn.Linear(1, 1))
    with torch.device("meta"):
        t5 = T5ForConditionalGeneration(T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1))
    assert rare_transformers.float32_modules(t5) == ["wo"] and rare_transformers.float32_modules(llama) == []
    assert rare_transformers.attention_name(llama) == "sdpa"
    assert rare_transformers.is_recurrent(MambaForCausalLM) and not rare_transformers.is_recurrent(LlamaForCausalLM)
    assert rare_transformers.supports_sdpa(LlamaForCausalLM) and not rare_transformers.supports_sdpa(MambaForCausalLM)


def test_the_checkpointing_of_layers_is_wrapped(llama):
    calls = []

    def count(function):
        return lambda *args, **kwargs: calls.append(1) or function(*args, **kwargs)

    assert not any(map(of_transformers.is_checkpointed, llama.modules()))
    llama.gradient_checkpointing_enable({"use_reentrant": False})
    layers = [module for module in llama.modules() if isinstance(module, LlamaDecoderLayer)]
    assert all(of_transformers.is_checkpointed(layer) for layer in layers) and len(layers) == 2
    for layer in layers:
        rare_transformers.wrap_checkpointing(layer, count)
    llama.train()(torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
    assert len(calls) == 2


def test_masks_look_at_no_positions(llama, monkeypatch):
    """Control: by themselves they see two sequences in the row."""
    from transformers import masking_utils

    # Another test of this process may have replaced the function already.
    spec = importlib.util.spec_from_file_location(masking_utils.__name__, masking_utils.__file__)
    original = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(original)
    positions = torch.tensor([[0, 1, 0, 1]])
    assert original.find_packed_sequence_indices(positions).tolist() == [[0, 0, 1, 1]]
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", original.find_packed_sequence_indices)
    of_transformers.find_documents_with(lambda position_ids: None)
    mask = functools.partial(masking_utils.create_causal_mask, llama.config, past_key_values=None)
    mask = mask(inputs_embeds=torch.zeros(1, 4, 8), attention_mask=None, position_ids=positions)
    assert mask is None or bool(mask[0, 0, 3, 0] == 0)


# --- bitsandbytes, datasets, huggingface_hub, Python


def test_an_optimizer_has_a_manager_of_its_own():
    import bitsandbytes

    layers = [nn.Embedding(64, 128), nn.Embedding(64, 128)]
    for layer, has_own in zip(layers, (True, False), strict=True):
        optimizer = bitsandbytes.optim.AdamW8bit(layer.parameters(), lr=1e-3)
        if has_own:
            of_bitsandbytes.use_own_manager(optimizer)
            optimizer.mng.register_module_override(layer, "weight", {"optim_bits": 32})
        assert (optimizer.mng is not bitsandbytes.optim.GlobalOptimManager.get_instance()) == has_own
        layer(torch.arange(64)).sum().backward()
        optimizer.step()
        assert (optimizer.state[layer.weight]["state1"].dtype == torch.float32) == has_own


def test_a_dataset_has_a_hash_of_its_content():
    import datasets

    one, same, other = (datasets.Dataset.from_dict({"a": values}) for values in ([1, 2], [1, 2], [1, 3]))
    assert of_datasets.content_hash(one) == of_datasets.content_hash(same) != of_datasets.content_hash(other)


def test_the_hub_is_left_alone(monkeypatch):
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert not of_hub.is_offline()
    of_hub.set_offline(True)
    assert of_hub.is_offline()
    with pytest.raises(OfflineModeIsEnabled):
        HfApi(endpoint="http://127.0.0.1:9").model_info("some/model")


def test_evaluate_is_offline_if_the_hub_is(monkeypatch):
    import evaluate

    for offline, name in ((False, "HF_EVALUATE_OFFLINE"), (True, "HF_UPDATE_DOWNLOAD_COUNTS")):
        monkeypatch.setattr(evaluate.config, name, offline)
    configure(offline=False)
    assert not evaluate.config.HF_EVALUATE_OFFLINE and not evaluate.config.HF_UPDATE_DOWNLOAD_COUNTS
    configure(offline=True)
    assert evaluate.config.HF_EVALUATE_OFFLINE


def test_flags_and_help():
    parser = argparse.ArgumentParser(formatter_class=of_python.HelpFormatter)
    parser.add_argument("--size", type=int, default=0, help="first line\nsecond line")
    parser.add_argument("--name", help="no default")
    assert of_python.flags_of(parser).keys() == {"-h", "--help", "--size", "--name"}
    lines = [" ".join(line.split()) for line in parser.format_help().splitlines()]
    assert "second line (default: 0)" in lines and "--name NAME no default" in lines


def test_an_object_that_cannot_be_sent_is_told(monkeypatch):
    queue_class = multiprocessing.queues.Queue
    monkeypatch.setattr(queue_class, "_on_queue_feeder_error", queue_class._on_queue_feeder_error)
    queue, errors = multiprocessing.Queue(), multiprocessing.SimpleQueue()
    rare_python.handle_unsent(lambda error, _: errors.put(repr(error)))
    queue.put(lambda: None)
    assert "lambda" in errors.get()
    queue.close()


# --- Accelerate and DeepSpeed, in a process of their own, whose state they change


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What tests/internals_alone.py prints, by subject."""
    environment = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ROOT}
    script, directory = ROOT / "tests/internals_alone.py", tmp_path_factory.mktemp("alone")
    result = run([BIN / "python", "-B", script, directory], **environment)  # with an option, a Python of its own
    assert result.returncode == 0, result.stderr[-4000:]
    return dict(line.split(": ", 1) for line in result.stdout.splitlines() if ": " in line)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("read_launch", "FSDP2, known fsdp_version, unknown fsdp_vershun"),
        ("forget_state", "bf16; before: ValueError"),
        ("shard_without_gpu", "FSDP; before: NO"),
        ("shard_over", "sharded over the given mesh"),
        ("shard_offset", "(3, 0)"),
        ("silence_memory_report", "silent"),
        ("measure_cpu_once", "the same object: True; before: False"),
        ("build_without_debug_symbols", "-g before: True, after: False"),
        ("is_zero", "stages 1 1 2 3 3; AdamW: False"),
        ("is_zero3", "False False False True True"),
        ("zero_groups", "30 float32 elements in each"),
        ("zero12_fragment", "(0, 16, 0) (16, 4, 0) (20, 8, 0) (28, 2, 0)"),
        ("copy_master_weights", "the model computes with them in each; before: not"),
    ],
)
def test_accelerate_and_deepspeed(told, function, expected):
    assert told[function] == expected


def test_cpu_adam_goes_on_as_if_it_had_made_the_steps(told):
    if told["replay_steps"] == "not built":
        pytest.skip("DeepSpeed's CPU Adam is not built yet: python -m common.parallel.extensions")
    assert told["replay_steps"] == "equal; without: different"
