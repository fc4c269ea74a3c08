"""Updates on the host: how many threads make them, and what DeepSpeed's files need."""

import json

import pytest
from conftest import ROOT, equivalence_flags, need, recipe_arguments, run_specs

from common.errors import UserError
from common.parallel import extensions
from common.parallel.deepspeed_flags import check_deepspeed, settle_deepspeed
from common.parallel.deepspeed_space import size_nvme_buffers
from common.parallel.launch import parse_launch
from common.parallel.sharding import names_threads
from common.training.process_grid import ProcessGrid

pytestmark = pytest.mark.usefixtures("extensions")


def test_cpu_adam_takes_the_share_of_the_cores_that_the_user_does_not_name(functions_file, model_dir, tmp_path):
    """Sixteen are made up; what another choice makes is seen to be less."""
    flags = equivalence_flags(functions_file, model_dir, tmp_path / "run", "--overwrite", "--num_updates", 1)
    runs = [
        (flags, {"cores": 16, "threads_of_step": str(tmp_path / name), **more})
        for name, more in {"named": {"user_names_threads": 1}, "share": {}}.items()
    ]
    env = {"OMP_NUM_THREADS": None, "OMP_WAIT_POLICY": "passive"}  # idle threads leave the few cores alone
    run_specs("lm", runs, tmp_path, "zero3_offload_cpu", "--num_processes", 1, **env)
    named, share = (json.loads((tmp_path / name).read_text()) for name in ("named", "share"))
    assert max(named) < 16 == share[1] <= share[0]


@pytest.mark.parametrize("given", ["environment", "flag", None])
def test_what_the_user_says_of_threads_is_kept(given):
    config = str(ROOT / "accelerate_configs/fsdp2_offload.yaml")
    flags = ["--num_cpu_threads_per_process", "3"] if given == "flag" else []
    environment = {"OMP_NUM_THREADS": "3"} if given == "environment" else {}
    asked = parse_launch(["--config_file", config, *flags, "recipes/lm.py"], environment)
    assert names_threads(asked) == (given is not None)


def test_buffers_of_weights_in_files_hold_the_largest_parameter(tmp_path):
    """Of an 8 B model's embedding, 525 million elements, on two processes; DeepSpeed's default is 100 million."""
    text = (ROOT / "ds_configs/zero3_offload_nvme.json").read_text().replace("/local_nvme", str(tmp_path))
    config, sizes = json.loads(text), [128256 * 4096, 4096 * 14336, 4096]
    (tmp_path / "nvme.json").write_text(text)
    settled = settle_deepspeed(str(tmp_path / "nvme.json"), recipe_arguments(), "bf16", ProcessGrid(2))
    assert "offload_param.buffer_size (the model's largest parameter)" in settled.filled and settled.idle == []
    size_nvme_buffers(settled.config, lambda: sizes, 2)
    assert settled.config["zero_optimization"]["offload_param"]["buffer_size"] == 64128 * 4096
    config["zero_optimization"]["offload_param"]["buffer_size"] = 1e8
    with pytest.raises(UserError, match="buffer_size is 100000000, .* has 262668288 elements; remove it"):
        size_nvme_buffers(config, lambda: sizes, 2)
    size_nvme_buffers(config, lambda: sizes, 8)
    # The name that DeepSpeed's documentation has for another setting, and its code does not read.
    config["aio"]["thread_count"] = 4
    (tmp_path / "nvme.json").write_text(json.dumps(config))
    assert check_deepspeed(str(tmp_path / "nvme.json"), recipe_arguments(), "bf16", ProcessGrid(2)) == []
    settled = settle_deepspeed(str(tmp_path / "nvme.json"), recipe_arguments(), "bf16", ProcessGrid(2))
    assert settled.idle == ["aio.thread_count (DeepSpeed reads intra_op_parallelism)"]


@pytest.mark.parametrize("toolkit", [None, "/usr/local/cuda"])
def test_a_gpu_machine_without_cudas_toolkit_is_one_line(toolkit, monkeypatch, tmp_path):
    """DeepSpeed's own builder for GPUs, which joins paths below the toolkit's. Control: with one it goes on."""
    need("libaio-dev")
    import torch.utils.cpp_extension
    from deepspeed.ops.op_builder import async_io, pin_memory

    class Cuda:
        create_op_builder = staticmethod(lambda name: getattr(async_io, name)())

    class Compiling(Exception):
        pass

    def compiles(*_, **__):
        raise Compiling

    monkeypatch.setattr("deepspeed.accelerator.get_accelerator", Cuda)
    monkeypatch.setattr(pin_memory.PinMemoryBuilder, "load", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", toolkit)
    monkeypatch.setattr(torch.utils.cpp_extension, "load", compiles)
    monkeypatch.setattr(async_io.AsyncIOBuilder, "nvcc_args", lambda _: [])
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    expected = (
        (Compiling, None) if toolkit else (UserError, "async_io needs the CUDA toolkit .nvcc., and none is found")
    )
    with pytest.raises(expected[0], match=expected[1]):
        extensions._build_extension("AsyncIOBuilder", "libaio-dev")


@pytest.mark.parametrize("path", sorted((ROOT / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_gradients_are_reduced_in_buckets_of_a_size(path):
    """Accelerate's `auto` is the square of the model's width: one reduction for each small matrix.

    While backward goes on at stage 3 only. At stage 2 `overlap_comm` makes the host wait after each micro-batch, and a
    gradient that is larger than a bucket is given back before its reduction has read it (DeepSpeed 0.19.8).
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = json.loads(path.read_text())["zero_optimization"]
    settings = DeepSpeedZeroConfig(**{name: value for name, value in zero.items() if value != "auto"})
    assert settings.overlap_comm == (zero["stage"] == 3)
    assert zero["reduce_bucket_size"] >= 5e7 and (zero["stage"] == 3 or zero["allgather_bucket_size"] >= 5e7)
