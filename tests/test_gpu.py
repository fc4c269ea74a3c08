"""What only a GPU can show: `make gpu` where there is one. Elsewhere they are skipped."""

import functools
import json
import math
import os

import conftest
import pytest
import torch
from conftest import assert_refused, example_flags, launch, launch_command, read_metrics, run, told
from test_token_budget import flags as text_flags
from test_token_budget import learned, script, text  # noqa: F401
from test_writer import make_writer, piece, saved

from common.training.optimizers import OPTIMIZERS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


# What each other recipe trains on its own data.
OTHERS = {
    "classify": [],
    "vision": ["--model_config", "resnet"],
    "seq2seq": ["--generate", 4],
    "embed": ["--symmetric"],
    "long_sequence": ["--sequence_length", 4096],
    "moe": [],
    "reward": [],
}
# What lm.py can do besides; MODEL stands for a model.
WAYS = {"lm-packed": ["--shape", "packed"], "lm-documents": ["--shape", "blocks", "--document_mask"]}
WAYS |= {"lm-teacher": ["--teacher", "MODEL", "--distillation_weight", 0.9]}


def flags(functions_file, model_dir, output_dir, *more):
    base = ["--num_updates", 10, "--global_batch_size", 8, "--micro_batch_tokens", 128, "--learning_rate", 1e-3]
    return example_flags(functions_file, model_dir, output_dir, *base, *more)


GPUS = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}
run_specs = functools.partial(conftest.run_specs, **GPUS)


def train(output_dir, functions_file, model_dir, *more, precision="no", config="single_gpu", processes=1, **env):
    runs = [(flags(functions_file, model_dir, output_dir, *more), {})]
    mode = (config, "--mixed_precision", precision, "--num_processes", processes)
    printed = run_specs("lm", runs, output_dir.parent, *mode, **env).stdout
    return [line["loss"] for line in read_metrics(output_dir)], printed


@pytest.fixture(scope="module")
def float32_losses(functions_file, model_dir, tmp_path_factory):
    """On the CPU: what every GPU run is compared with."""
    out = tmp_path_factory.mktemp("cpu") / "run"
    launch(*flags(functions_file, model_dir, out))
    return [line["loss"] for line in read_metrics(out)]


def test_float32_on_the_gpu_makes_the_losses_of_the_cpu(float32_losses, functions_file, model_dir, tmp_path):
    losses, printed = train(tmp_path / "run", functions_file, model_dir, NVIDIA_TF32_OVERRIDE=0)
    assert losses == pytest.approx(float32_losses, rel=1e-4)
    assert "on cuda" in printed


def own_flags(name, model_dir):
    return [model_dir if part == "MODEL" else part for part in WAYS[name]]


@pytest.mark.parametrize("name", WAYS)
def test_masks_and_teachers_on_the_gpu_make_the_losses_of_the_cpu(name, functions_file, model_dir, tmp_path):
    own = own_flags(name, model_dir)
    launch(*flags(functions_file, model_dir, tmp_path / "cpu", *own))
    losses, _ = train(tmp_path / "run", functions_file, model_dir, *own, NVIDIA_TF32_OVERRIDE=0)
    assert losses == pytest.approx([line["loss"] for line in read_metrics(tmp_path / "cpu")], rel=1e-4)


def test_memory_that_runs_out_halves_what_is_computed_at_once(text, tmp_path):  # noqa: F811
    """In one update; the losses are those of a run in plenty."""
    more = ["--global_batch_size", 256]  # 32,768 tokens, of which auto takes a part at once
    command = launch_command("single_gpu", "--mixed_precision", "no")
    short = script(tmp_path / "short", 0)
    for recipe, out, tokens in ((short, "short", "auto"), ("recipes/lm.py", "plenty", 8192)):
        result = run([*command, recipe, *text_flags(text, tmp_path / out / "run", *more, tokens=tokens)], **GPUS)
        assert result.returncode == 0, told(result)
    (start, most), (update, fewer), *_ = learned(tmp_path / "short/run")
    assert (start, update) == (0, 2) and fewer < most
    losses = [[line["loss"] for line in read_metrics(tmp_path / out / "run")] for out in ("short", "plenty")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_profile_has_the_kernels_of_each_phase(functions_file, model_dir, tmp_path):
    """Their times are beside those of the table, which sums to the time of the three updates."""
    train(tmp_path / "run", functions_file, model_dir, "--profile")
    found = json.loads((tmp_path / "run/run.json").read_text())["profile"]
    assert sum(found["phases"].values()) == pytest.approx(found["seconds"])
    assert all(found["kernels"][phase] > 0 for phase in ("forward", "backward", "optimizer"))
    assert sum(found["kernels"].values()) < found["seconds"]


@pytest.mark.parametrize(("precision", "words"), [("no", "TF32"), ("bf16", "bf16"), ("fp16", "fp16")])
def test_precision_of_the_config_runs(precision, words, float32_losses, functions_file, model_dir, tmp_path):
    """Near float32's losses, and not equal to them."""
    losses, printed = train(tmp_path / "run", functions_file, model_dir, precision=precision)
    assert words in printed
    assert json.loads((tmp_path / "run/run.json").read_text())["mixed_precision"] == precision
    finite = [(loss, expected) for loss, expected in zip(losses, float32_losses, strict=True) if loss is not None]
    assert len(finite) >= 8  # fp16 may skip updates while it looks for its scale
    if len(finite) == len(losses):
        assert all(math.isclose(loss, expected, rel_tol=0.02) for loss, expected in finite)
        assert losses != float32_losses


@pytest.mark.parametrize(("name", "control"), [("lm", True), *((name, False) for name in ("lm", *WAYS, *OTHERS))])
def test_the_host_does_not_wait_within_a_global_batch(name, control, functions_file, model_dir, tmp_path):
    """CUDA's own check raises on every wait between the first forward and the last backward. Control: one .item()."""
    changes, recipe = {"forbid_host_sync": 1} | ({"read_each_loss": 1} if control else {}), name.partition("-")[0]
    given = flags(functions_file, model_dir, tmp_path / "run", *(own_flags(name, model_dir) if name in WAYS else []))
    if recipe != "lm":
        given = ["--num_updates", 3, "--warmup_updates", 1, "--output_dir", tmp_path / "run", *OTHERS[recipe]]
    result = run_specs(recipe, [(given, changes)], tmp_path, "single_gpu", check=False)
    assert (result.returncode != 0) == control, result.stderr
    if control:
        assert "synchronizing" in result.stderr


@pytest.mark.parametrize("mode", ["selective", "full", "offload"])
def test_activation_checkpointing_takes_less_memory(mode, functions_file, tmp_path):
    """On a model large enough for its activations to count: the same losses to TF32's precision, a lower peak."""
    losses, peaks = {}, {}
    for name in ("none", mode):
        more = ["--model_config", "small", "--sequence_length", 512, "--micro_batch_tokens", 4096]
        more += ["--global_batch_size", 4]
        more += ["--activation_checkpointing", name, "--num_updates", 3, "--output_dir", tmp_path / name]
        launch("--train_file", functions_file, *more, config="single_gpu")
        losses[name] = [line["loss"] for line in read_metrics(tmp_path / name)]
        peaks[name] = json.loads((tmp_path / name / "run.json").read_text())["results"]["memory_growth_bytes"]
    assert losses[mode] == pytest.approx(losses["none"], rel=1e-3)
    assert peaks[mode] < 0.9 * peaks["none"]


@pytest.mark.parametrize("mode", ["selective", "full", "offload"])
def test_dropout_within_fused_attention_is_drawn_again(mode):
    """The second run of a layer has the random numbers of the first: the gradients are those without it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from common.training.activation_checkpointing import apply_activation_checkpointing

    found, tokens = {}, torch.arange(512, device="cuda").view(4, 128) % 64
    for name in ("none", mode):
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=64, n_embd=128, n_layer=4, n_head=4, n_positions=128, attn_pdrop=0.3)
        model = GPT2LMHeadModel(config).cuda().train()
        apply_activation_checkpointing(model, name, torch.device("cuda"))
        torch.manual_seed(1)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        found[name] = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (found[mode] - found["none"]).norm() <= 2e-2 * found["none"].norm()


def checkpointed_step(mode, tokens, num_layers=8):
    """A function that makes the gradients of a Llama on the GPU in bf16, and the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from common.training.activation_checkpointing import apply_activation_checkpointing

    torch.manual_seed(0)
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 16}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_hidden_layers=num_layers, **shape)).cuda().train()
    if mode == "on the computing stream":  # transformers' own
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # the second of older versions
        next(getattr(model, name) for name in names if hasattr(model, name))({"use_reentrant": False}, offload=True)
        model.disable_input_require_grads()
    else:
        apply_activation_checkpointing(model, mode, torch.device("cuda"))

    def step():
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    return step, model


@pytest.mark.parametrize("varies", [True, False])
def test_compiled_layers_make_the_gradients_of_plain_ones(varies):
    """Of rows of many lengths, finite and near; by flash attention, as choose_kernels has it where lengths vary."""
    from common.models.attention_masks import decide_on_the_host
    from common.training.compilation import compile_layers
    from common.training.losses import sum_token_losses

    decide_on_the_host()
    shapes = [(16, 512), (17, 481), (64, 127), (200, 40), (1, 500), (1000, 8), (3, 1)] if varies else [(4, 512)] * 2
    torch.backends.cuda.enable_cudnn_sdp(not varies)
    found = {}
    for kind in ("plain", "plain again", "compiled"):
        step, model = checkpointed_step("none", torch.zeros(1, 2, dtype=torch.int64, device="cuda"), 4)
        sum_token_losses(model)
        if kind == "compiled":
            compile_layers(model.base_model, varies)
        found[kind] = []
        for rows, length in shapes:
            ids = torch.arange(rows * length, device="cuda").reshape(rows, length) * 7 % 512
            model.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=ids, targets=ids.flatten(), target_rows=torch.arange(ids.numel(), device="cuda"))
            (loss / ids.numel()).backward()
            found[kind].append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.backends.cuda.enable_cudnn_sdp(True)
    for shape, plain, again, compiled in zip(shapes, *found.values(), strict=True):
        assert compiled.isfinite().all(), shape
        assert (again - plain).norm() <= 1e-3 * plain.norm()  # the control
        assert (compiled - plain).norm() <= 2e-2 * plain.norm(), shape


def test_layers_of_a_large_model_are_compiled_for_blocks(tmp_path):
    """Of 110 M parameters; the losses are those without. By default, so short a run compiles nothing."""
    losses = {}
    for name, more in (("compiled", ["--compile"]), ("plain", [])):
        more += ["--model_config", "medium", "--sequence_length", 256, "--global_batch_size", 16, "--num_updates", 4]
        launch(*more, "--output_dir", tmp_path / name, config="single_gpu")
        losses[name] = [line["loss"] for line in read_metrics(tmp_path / name)]
        record = json.loads((tmp_path / name / "run.json").read_text())
        assert record["arguments"]["compile"] == (name == "compiled")
    assert losses["compiled"] == pytest.approx(losses["plain"], rel=1e-3)


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward has no deterministic variant for every shape
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.use_deterministic_algorithms(False)


def test_offload_makes_the_gradients_of_full_bit_for_bit(deterministic):
    """Over micro-batches of several lengths, one after the other without a wait. Control: `full` twice is equal too."""
    gradients = {}
    for name in ("full", "full again", "offload"):
        made = []
        for length in (2048, 512, 2048):
            tokens = torch.arange(4 * length, device="cuda").reshape(4, length) % 512
            if not made:
                step, model = checkpointed_step(name.split()[0], tokens)
            made.append(step())
        gradients[name] = made
        del step, model
    for name in ("full again", "offload"):
        for one, other in zip(gradients[name], gradients["full"], strict=True):
            assert all(torch.equal(one[key], other[key]) for key in other), name


@pytest.mark.parametrize("mode", ["offload", "on the computing stream"])
def test_offload_copies_on_a_stream_of_its_own(mode, tmp_path):
    """Beside the products, both ways. Control: transformers' own offload copies on the stream that computes."""
    tokens = torch.arange(4 * 2048, device="cuda").reshape(4, 2048) % 512
    step, _ = checkpointed_step(mode, tokens)
    step()  # takes the host's memory
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e.get("ph") == "X"]
    size = 4 * 2048 * 1024 * 2  # a layer's input in bf16, or twice that where it is float32
    copies = [e for e in events if e.get("cat") == "gpu_memcpy" and e["args"].get("bytes", 0) in (size, 2 * size)]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    computing = max({e["args"]["stream"] for e in kernels}, key=[e["args"]["stream"] for e in kernels].count)
    for way in ("DtoH", "HtoD"):
        streams = {e["args"]["stream"] for e in copies if way in e["name"]}
        assert streams and (computing not in streams) == (mode == "offload"), (way, streams, computing)


def test_offload_holds_a_few_layers_inputs_and_keeps_its_host_memory():
    """The device's peak does not grow with the layers; the host's memory does not with the micro-batches."""
    tokens = torch.arange(8 * 2048, device="cuda").reshape(8, 2048) % 512
    size = 8 * 2048 * 1024 * 2
    growth = {}
    for mode in ("full", "offload"):
        for num_layers in (6, 18):
            step, model = checkpointed_step(mode, tokens, num_layers)
            step()
            torch.cuda.synchronize()
            weights = sum(p.nbytes for p in model.parameters())
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            growth[mode, num_layers] = torch.cuda.max_memory_allocated() - before - weights / 2  # autocast's copies
            loss.backward()
            if mode == "offload":
                pinned = torch.cuda.host_memory_stats()["allocated_bytes.peak"]
                for _ in range(4):
                    step()
                torch.cuda.synchronize()
                assert torch.cuda.host_memory_stats()["allocated_bytes.peak"] == pinned
            del step, model, loss
    assert growth["full", 18] - growth["full", 6] > 10 * size  # the control: an input a layer
    assert growth["offload", 18] - growth["offload", 6] < 2 * size


def test_a_gpu_that_torch_does_not_see_is_refused(functions_file, model_dir, tmp_path):
    """Torch made blind: one line. Control: a GPU that is hidden on purpose."""
    given = flags(functions_file, model_dir, tmp_path / "run", "--dry_run")
    command = [*launch_command("single_gpu"), "recipes/lm.py", *given]
    (tmp_path / "sitecustomize.py").write_text(
        "import torch\n"
        "torch.cuda.is_available = torch.accelerator.is_available = lambda: False\n"
        "torch.cuda.device_count = torch.accelerator.device_count = lambda: 0\n"
    )
    result = run(command, PYTHONPATH=tmp_path, STARTS_A_REAL_PYTHON=1)  # which reads sitecustomize.py
    assert_refused(result, r"has a GPU \(/.*\) that torch \S+ does not see \(")
    result = run(command, CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0 and "because no GPU is visible" in result.stdout, result.stderr


def test_what_is_left_in_float32_is_tf32(functions_file, model_dir, tmp_path):
    """In a bf16 run: what torch says at its end. Control: the same with torch's default."""
    for control in (False, True):
        changes = {"note_float32_products": str(tmp_path / "said")} | ({"no_tf32": 1} if control else {})
        given = flags(functions_file, model_dir, tmp_path / f"run{control}")
        run_specs("lm", [(given, changes)], tmp_path, "single_gpu")
        assert (tmp_path / "said").read_text() == ("highest" if control else "high")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_trains_on_a_gpu(optimizer, functions_file, model_dir, tmp_path):
    more = ["--optimizer", optimizer, "--learning_rate", 1e-3 if OPTIMIZERS[optimizer].uses_adamw_rate else 0.1]
    losses, _ = train(tmp_path / "run", functions_file, model_dir, *more, precision="bf16")
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("extensions")
@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-4), ("bf16", 3e-3)])
@pytest.mark.parametrize("config", ["fsdp2", "fsdp2_offload", "zero1", "zero2", "zero3", "zero3_offload_cpu"])
def test_sharded_modes_on_one_gpu(config, precision, tolerance, float32_losses, functions_file, model_dir, tmp_path):
    """One process: the mode's own code on the GPU, with NCCL, against float32 on the CPU."""
    more = {"NVIDIA_TF32_OVERRIDE": 0} if precision == "no" else {}
    losses, printed = train(tmp_path / "run", functions_file, model_dir, precision=precision, config=config, **more)
    assert "on cuda" in printed and "no GPU is visible" not in printed
    assert losses == pytest.approx(float32_losses, rel=tolerance)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_goes_on_from_a_checkpoint(precision, functions_file, model_dir, tmp_path):
    """With fp16's loss scale. A GPU adds in any order, so the losses after it are near, and not equal in each bit."""
    runs = [(flags(functions_file, model_dir, tmp_path / "run", "--save_every", 5), {})]
    given = flags(functions_file, model_dir, tmp_path / "again", "--save_every", 5, "--resume")
    runs.append((given, {"copy_run": [str(tmp_path / "run"), str(tmp_path / "again"), 5]}))
    run_specs("lm", runs, tmp_path, "single_gpu", "--mixed_precision", precision)
    lines, expected = (read_metrics(tmp_path / name) for name in ("again", "run"))
    assert [line["skipped_updates"] for line in lines] == [line["skipped_updates"] for line in expected]
    scales = [
        json.loads((tmp_path / f"{name}/checkpoints/update-000010/manifest.json").read_text())["scaler"]
        for name in ("again", "run")
    ]
    assert scales[0] == scales[1] and bool(scales[0]) == (precision == "fp16")
    for line, other in zip(lines, expected, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-3)


@pytest.mark.parametrize("waits", [True, False])
def test_a_save_holds_the_state_before_the_step_and_the_host_waits_for_nothing(waits, monkeypatch, tmp_path):
    """Its stream is slowed: the step is launched before the copy is made. Control: one that does not stand in line."""
    weight = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    mean, optimizer = torch.zeros(4, device="cuda"), torch.optim.SGD([weight], lr=1.0)
    writer = make_writer(tmp_path, "cuda")
    for slow in (False, True):  # the first one takes the host's memory
        if slow:
            copy = writer.copy._copy

            def sleep_and_copy(*contents, copy=copy):
                with torch.cuda.stream(writer.copy.copy_stream):
                    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
                return copy(*contents)

            monkeypatch.setattr(writer.copy, "_copy", sleep_and_copy)
            if not waits:
                monkeypatch.setattr(writer.copy, "_wait_for_copy", lambda: None)
        pieces = [piece("weight/w", weight.detach()), piece("buffer/mean", mean)]
        writer.finish()
        writer.start({"update": 1}, {}, pieces, optimizer, in_place=False)
        copied = writer.copy.copying.result()
        weight.grad = torch.ones_like(weight)
        mean += 1
        optimizer.step()
        assert not slow or not copied.query()
        writer.finish()
    assert (weight == -2).all()
    assert saved(writer)["buffer/mean"].tolist() == [1] * 4
    assert (saved(writer)["weight/w"] == -1).all() == waits


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("recipe", OTHERS)
def test_every_recipe_trains_on_a_gpu(recipe, precision, tmp_path):
    """On its own data: what it loses is near what it loses in float32 on the CPU."""
    losses = {}
    for config, asked in (("cpu", "no"), ("single_gpu", precision)):
        more = ["--num_updates", 5, "--warmup_updates", 3, "--output_dir", tmp_path / config, *OTHERS[recipe]]
        run_specs(recipe, [(more, {})], tmp_path, config, "--mixed_precision", asked)
        losses[config] = read_metrics(tmp_path / config)[0]["loss"]  # before the first update, so in each precision
    assert losses["single_gpu"] == pytest.approx(losses["cpu"], rel=0.02)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_two_gpus_gradients_lie_in_the_buckets_and_no_rank_meets_a_limit(functions_file, model_dir, tmp_path):
    """DDP with NCCL; rank 1 reads, then rank 0 writes, for longer than a collective waits. Control: without the wait.

    A save is made where it is, not copied, where one rank's host lacks memory.
    """
    reads = {"slow_rank": ["tokenize", 9, 5], "list_gradients": str(tmp_path / "gradients")}
    writes = {"slow_rank": ["write", 9, 5], "memory_of_rank": [1, 0, str(tmp_path / "copied")]}
    for control in ([], ["no_wait"]):
        runs = []
        for number, changes in enumerate((reads, writes)):
            given = flags(functions_file, model_dir, tmp_path / f"{number}{control}", "--save_every", 5)
            runs.append((given, changes | dict.fromkeys(control, 1)))
        result = run_specs("lm", runs, tmp_path, "multi_gpu", check=False)
        assert (result.returncode == 0) != bool(control), result.stdout + result.stderr
    assert not list(tmp_path.glob("copied*"))
    num, storages, held, own = json.loads((tmp_path / "gradients-0").read_text().splitlines()[0])
    assert storages < num and held == own


@pytest.mark.usefixtures("extensions")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("config", ["multi_gpu", "fsdp2", "fsdp2_offload", "zero1", "zero2", "zero3"])
def test_two_gpus_make_the_losses_of_one(config, functions_file, model_dir, tmp_path):
    one, _ = train(tmp_path / "one", functions_file, model_dir, NVIDIA_TF32_OVERRIDE=0)
    two, _ = train(tmp_path / "two", functions_file, model_dir, config=config, processes=2, NVIDIA_TF32_OVERRIDE=0)
    assert two == pytest.approx(one, rel=1e-5 if config == "multi_gpu" else 1e-4)
