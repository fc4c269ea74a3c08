"""The files that people bring from Accelerate's and Transformers' documentation run, filled in from the flags."""

import functools
import json
import re
import shutil
import warnings

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import DeepSpeedPlugin
from conftest import ROOT, launch, read_metrics, recipe_arguments, run_specs
from conftest import equivalence_flags as flags
from running import set_world, settings_shown

from common.errors import UserError
from common.parallel.deepspeed_files import flatten, read_deepspeed_config
from common.parallel.deepspeed_flags import WIDTH_KEYS, check_deepspeed, describe_settled, settle_deepspeed
from common.parallel.launch import parse_launch
from common.parallel.launch_checks import check_launch
from common.training.process_grid import ProcessGrid
from common.training.recipe_traits import Traits

# Four steps on two processes.
FLAGS = "--global_batch_size 16 --micro_batch_size 2 --max_grad_norm 0.5 --num_updates 40".split()
STAGES = [(stage, offload) for stage in (1, 2, 3) for offload in (False, True)]


def autos(*names):
    return dict.fromkeys(names, "auto")


def zero_section(stage, offload, **more):
    """What the documented examples have in their section zero_optimization, beyond its stage."""
    zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"} | more
    if stage < 3:
        zero |= {"allgather_partitions": True, "reduce_scatter": True, "allgather_bucket_size": 2e8}
    else:
        zero |= autos("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
        zero |= {"sub_group_size": 1e9, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
    for part in ("offload_optimizer", "offload_param")[: (2 if stage == 3 else 1) * offload]:
        zero[part] = {"device": "cpu", "pin_memory": True}
    return zero


def fp16_section(enabled):
    scaling = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2}
    return {"enabled": enabled, "min_loss_scale": 1} | scaling


def accelerate_example(stage, offload):
    """The keys of Accelerate's examples/deepspeed_config_templates (five of these six)."""
    optimizer = autos("lr", "weight_decay") | ({"torch_adam": True, "adam_w_mode": True} if stage < 3 else {})
    schedule = autos("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    gather = {"stage3_gather_16bit_weights_on_model_save": "auto"} if stage == 3 else {}
    return {
        "fp16": fp16_section(True),
        "optimizer": {"type": "AdamW", "params": optimizer},
        "scheduler": {"type": "WarmupDecayLR", "params": schedule},
        "zero_optimization": zero_section(stage, offload, **gather),
        "gradient_accumulation_steps": 1,
        **autos("gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu"),
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }


def transformers_example(stage, offload):
    """The keys of the files that Transformers documents and tests with; its ZeRO-3 in bf16 has two old names."""
    optimizer = autos("lr", "betas", "eps", "weight_decay")
    old = stage == 3 and offload
    gather = {"stage3_gather_fp16_weights_on_model_save" if old else "stage3_gather_16bit_weights_on_model_save": True}
    return {
        "bfloat16" if old else "bf16": {"enabled": "auto"},
        **({} if old else {"fp16": fp16_section("auto")}),
        "optimizer": {"type": "AdamW", "params": optimizer},
        "scheduler": {"type": "WarmupLR", "params": autos("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")},
        "zero_optimization": zero_section(
            stage, offload, **(gather if stage == 3 else {"round_robin_gradients": True})
        ),
        **autos("gradient_accumulation_steps", "gradient_clipping"),
        **autos("train_batch_size", "train_micro_batch_size_per_gpu"),
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }


def bare_example(stage, offload):
    """Nothing but the section that DeepSpeed needs."""
    return {"zero_optimization": {"stage": stage} | ({"offload_optimizer": {"device": "cpu"}} if offload else {})}


EXAMPLES = {
    "Accelerate": (accelerate_example, ["fp16"]),
    "Transformers": (transformers_example, ["bf16", "fp16", "no"]),
    "bare": (bare_example, ["bf16", "fp16", "no"]),
}


def resolve(config, mixed_precision, tmp_path):
    """What DeepSpeed reads in the end: through Accelerate's plugin, as `make_accelerator` and `prepare` do it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    plugin = DeepSpeedPlugin(hf_ds_config=config)
    plugin.set_mixed_precision(mixed_precision)
    # As configure_plugins does.
    plugin.deepspeed_config |= {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.5}
    assert [
        name for name, value in flatten(plugin.deepspeed_config) if value == "auto" and name not in WIDTH_KEYS
    ] == []
    plugin.deepspeed_config_process(must_match=False, **dict.fromkeys(WIDTH_KEYS, 1024))
    return DeepSpeedConfig(plugin.deepspeed_config)


@pytest.mark.parametrize(("stage", "offload"), STAGES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_documented_file_is_taken(name, stage, offload, tmp_path):
    make, precisions = EXAMPLES[name]
    (tmp_path / "mine.json").write_text(json.dumps(make(stage, offload)))
    for precision in precisions:
        args = recipe_arguments(*FLAGS)
        assert check_deepspeed(str(tmp_path / "mine.json"), args, precision, grid=ProcessGrid(2)) == []
        settled = settle_deepspeed(str(tmp_path / "mine.json"), args, precision, grid=ProcessGrid(2))
        with warnings.catch_warnings(action="ignore"):
            resolved = resolve(settled.config, precision, tmp_path)
        assert resolved.zero_config.stage == stage and resolved.gradient_accumulation_steps == 1
        assert resolved.optimizer_name is None and resolved.scheduler_name is None
        assert (resolved.bfloat16_config.enabled, resolved.float16_config.enabled) == (
            precision == "bf16",
            precision == "fp16",
        )
        assert (resolved.zero_config.offload_optimizer is not None) == offload
        assert resolved.zero_config.gather_16bit_weights_on_model_save == (stage == 3)
        line = describe_settled("mine.json", settled)
        said = ["train_batch_size (--global_batch_size 16)", "train_micro_batch_size_per_gpu (--micro_batch_size 2)"]
        said += ["gradient_clipping (--max_grad_norm 0.5)", "x 2 processes) = 4)"]
        if name != "bare":
            said += ["optimizer (--optimizer adamw, --learning_rate 0.001, --weight_decay 0.1)"]
            said += ["scheduler (--lr_schedule cosine, --warmup_updates 2)", "reduce_bucket_size (the model's width)"]
            assert settled.idle == ["steps_per_print"]
        assert "\n" not in line and [text for text in said if text not in line] == []


def write_yaml(path, **settings):
    """A config as `accelerate config` writes it, by the class that does."""
    settings = {"num_processes": 2, "mixed_precision": None, "debug": False, "use_cpu": False} | settings
    settings |= {"compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED", "main_process_port": 0}
    ClusterConfig(**settings).to_yaml_file(str(path))
    return path


def written_section(stage, offload, save=False):
    section = {"zero_stage": stage, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "zero3_init_flag": True}
    devices = {f"offload_{part}_device": "none" for part in ("optimizer", "param")}
    for part in ("optimizer", "param")[: (2 if stage == 3 else 1) * offload]:
        devices[f"offload_{part}_device"] = "cpu"
    return (
        section | (devices if stage > 1 or offload else {}) | ({"zero3_save_16bit_model": save} if stage == 3 else {})
    )


@pytest.mark.parametrize(("stage", "offload"), STAGES)
def test_what_accelerate_config_writes_is_taken(stage, offload, tmp_path, monkeypatch):
    set_world(monkeypatch, 2)
    for precision in ("bf16", "no"):
        path = write_yaml(
            tmp_path / "c.yaml", mixed_precision=precision, deepspeed_config=written_section(stage, offload)
        )
        launch = parse_launch(["--config_file", str(path), "recipes/lm.py"], environment={})
        assert check_launch(launch, recipe_arguments(), Traits()) == []
        settled = settle_deepspeed(launch.deepspeed_config, recipe_arguments(), precision, grid=ProcessGrid(2))
        with warnings.catch_warnings(action="ignore"):
            resolved = resolve(settled.config, precision, tmp_path)
        assert resolved.zero_config.stage == stage and resolved.bfloat16_config.enabled == (precision == "bf16")
        assert resolved.zero_config.gather_16bit_weights_on_model_save == (stage == 3)
        device = resolved.zero_config.offload_optimizer.device
        assert str(getattr(device, "value", device)) == ("cpu" if offload else "none")
        # Control: a norm that is not the flag's.
        assert "gradient_clipping is 1.0" in check_launch(launch, recipe_arguments("--max_grad_norm", 2), Traits())[0]
    # Four micro-batches a process are what these flags make, and five are not.
    section = written_section(stage, offload) | {"gradient_accumulation_steps": 4, "gradient_clipping": 0.5}
    path = write_yaml(tmp_path / "c.yaml", deepspeed_config=section)
    launch = parse_launch(["--config_file", str(path), "recipes/lm.py"], environment={})
    assert check_launch(launch, recipe_arguments(*FLAGS), Traits()) == []
    launch.gradient_accumulation_steps = "5"
    (problem,) = check_launch(launch, recipe_arguments(*FLAGS), Traits())
    assert "to 5; remove it" in problem and "16 / (--micro_batch_size 2 x 2 processes) = 4" in problem


SAME = {
    "the flags' numbers": {
        "optimizer": {
            "type": "adamw",
            "params": {"lr": 0.001, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8},
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"warmup_num_steps": 2, "total_num_steps": 40, "cos_min_ratio": 0.1, "warmup_type": "linear"},
        },
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
    },
    "Adam, which is AdamW": {"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupDecayLR"}},
    "sums in float32": {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"},
    "auto where DeepSpeed has a default": {"aio": {"block_size": "auto"}, "communication_data_type": "auto"},
    "what is off": {"fp16": {"enabled": False}, "amp": {"enabled": False}, "tensorboard": {"enabled": False}},
    "what has no effect": {"steps_per_print": 9, "wall_clock_breakdown": True, "activation_checkpointing": {"x": 1}},
}


@pytest.mark.parametrize("name", SAME)
def test_what_says_the_same_as_the_flags_is_taken(name):
    config = {"zero_optimization": {"stage": 2, "allgather_bucket_size": "auto"}} | SAME[name]
    assert check_deepspeed(config, recipe_arguments(*FLAGS), "bf16", grid=ProcessGrid(2)) == []
    settled = settle_deepspeed(config, recipe_arguments(*FLAGS), "bf16", grid=ProcessGrid(2))
    assert "zero_optimization.allgather_bucket_size (DeepSpeed's default)" in describe_settled("x", settled)
    assert (
        settled.config["zero_optimization"] == {"stage": 2} and not {"optimizer", "scheduler"} & settled.config.keys()
    )
    if name == "what has no effect":
        assert [text.split()[0] for text in settled.idle] == list(SAME[name])


def test_a_warm_up_that_is_the_checkpoints_contradicts_nothing():
    """With --resume it is not known before the checkpoint is read, and runs whatever the file says."""
    args = recipe_arguments(*FLAGS)
    args.warmup_updates = None
    config = {"zero_optimization": {"stage": 2}, "scheduler": {"params": {"warmup_num_steps": 3, "warmup_max_lr": 1}}}
    (problem,) = check_deepspeed(config, args, "bf16", grid=ProcessGrid(2))
    assert "warmup_max_lr" in problem
    settled = settle_deepspeed(config, args, "bf16", grid=ProcessGrid(2))
    assert "the checkpoint's --warmup_updates" in describe_settled("x", settled)


def test_numbers_of_updates_contradict_epochs():
    """How many updates epochs make is not known before the data are. Control: `auto` is taken."""
    args = recipe_arguments(*FLAGS, "--num_epochs", 2)
    args.warmup_updates = None
    for value, number in ((40, 2), ("auto", 0)):
        params = {"warmup_num_steps": value, "total_num_steps": value}
        config = {"zero_optimization": {"stage": 2}, "scheduler": {"params": params}}
        problems = check_deepspeed(config, args, "bf16", grid=ProcessGrid(2))
        assert len(problems) == number and all("is 40, but --num_epochs sets the length" in one for one in problems)


CONTRADICTIONS = {
    "learning rate": (
        {"optimizer": {"params": {"lr": 3e-5}}},
        "params.lr is 3e-05, but --learning_rate is 0.001; pass",
    ),
    "decay": ({"optimizer": {"params": {"weight_decay": 0}}}, "weight_decay is 0, but --weight_decay is 0.1"),
    "betas": (
        {"optimizer": {"params": {"betas": [0.9, 0.999]}}},
        r"betas is \[0.9, 0.999\], but .*adamw is \[0.9, 0.95",
    ),
    "no AdamW": ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, "adam_w_mode is false, but that"),
    "Lamb": ({"optimizer": {"type": "Lamb"}}, "optimizer.type is Lamb, but --optimizer is adamw; remove"),
    "SGD": ({"optimizer": {"type": "SGD"}}, "optimizer.type is SGD, but --optimizer is adamw; pass --optimizer sgd"),
    "unknown": ({"optimizer": {"params": {"freeze_step": 9}}}, "freeze_step is 9, which has no flag here"),
    "warm-up": ({"scheduler": {"params": {"warmup_num_steps": 3}}}, "steps is 3, but --warmup_updates is 2"),
    "length": ({"scheduler": {"params": {"total_num_steps": 41}}}, "total_num_steps is 41, but --num_updates is 40"),
    "log warm-up": ({"scheduler": {"params": {"warmup_type": "log"}}}, 'warmup_type is "log", but .* is "linear"'),
    "OneCycle": (
        {"scheduler": {"type": "OneCycle"}},
        "scheduler.type is OneCycle, which --lr_schedule does not support",
    ),
    "batch": (
        {"train_batch_size": 8},
        "train_batch_size is 8, but --global_batch_size is 16; pass --global_batch_size 8",
    ),
    "micro-batch": ({"train_micro_batch_size_per_gpu": 3}, "gpu is 3, but --micro_batch_size is 2; pass"),
    "steps": ({"gradient_accumulation_steps": 2}, r"is 2; .* 16 / \(--micro_batch_size 2 x 2 processes\) = 4; remove"),
    "off": ({"bf16": {"enabled": False}}, "bf16.enabled is false, but --mixed_precision is bf16; remove .*bf16, or"),
    "fp16": (
        {"fp16": {"enabled": True}},
        "fp16.enabled is true, but .* is bf16; .* launch with --mixed_precision fp16",
    ),
    "off, in its old name": ({"bfloat16": {"enabled": False}}, "bf16.enabled is false, but --mixed_precision is bf16"),
    "sums in bf16": (
        {"data_types": {"grad_accum_dtype": "bf16"}},
        'grad_accum_dtype "bf16" would sum in a precision other',
    ),
    "masters": ({"bf16": {"bf16_master_weights_and_grads": True}}, "remove bf16.bf16_master_weights_and_grads"),
    "amp": ({"amp": {"enabled": True}}, "remove its section amp"),
    "auto, misspelt": ({"zero_optimization": {"stage": 2, "reduce_bucket_sise": "auto"}}, "did you mean reduce_bucket"),
    "sent in bf16": (
        {"communication_data_type": "bf16"},
        'communication_data_type "bf16" would sum in a precision other',
    ),
    "autocast": (
        {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        "torch_autocast would compute in a precision other",
    ),
    "clipping": ({"gradient_clipping": 0.25}, "gradient_clipping is 0.25, but --max_grad_norm is 0.5"),
    "a tracker": ({"tensorboard": {"enabled": True}}, "remove its section tensorboard: --report_to"),
    "prescaled": ({"prescale_gradients": True}, "remove prescale_gradients"),
    "tensor parallel": ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel is 2; remove it"),
    "misspelt": ({"gradient_cliping": 1.0}, "knows no key gradient_cliping; did you mean gradient_clipping"),
    "misspelt below": (
        {"zero_optimization": {"stage": 2, "ofload_optimizer": {"device": "cpu"}}},
        "zero_optimization.ofload_optimizer is not a setting of DeepSpeed; did you mean offload_optimizer",
    ),
    "wrong type": ({"zero_optimization": {"stage": "two"}}, "zero_optimization.stage is invalid: "),
    "of the past": ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "cpu_offload is outdated"),
    "stage 0": ({"zero_optimization": {"stage": 0}}, "stage is 0, which shards nothing"),
    "weights at stage 2": (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "offload_param has no effect at stage 2",
    ),
    "no section": ({"zero_optimization": {}}, "no section zero_optimization"),
    "deep": ({"x": functools.reduce(lambda inner, _: {"a": inner}, range(20_000), {})}, "nested too deeply"),
    "aio below": ({"zero_optimization": {"stage": 2, "aio": {"queue_depth": 8}}}, "aio belongs at the top"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_contradicts_a_flag_or_cannot_run_is_refused(name):
    """Control: the tests of files that are taken."""
    changes, pattern = CONTRADICTIONS[name]
    config = {"zero_optimization": {"stage": 2}} | changes
    problems = check_deepspeed(config, recipe_arguments(*FLAGS), "bf16", grid=ProcessGrid(2))
    assert len(problems) == 1 and re.search(pattern, problems[0]), problems


def test_a_file_that_no_parser_reads_to_its_end_is_refused(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text('{"a":' * 100_000)
    with pytest.raises(UserError, match="deep.json: not JSON"):
        read_deepspeed_config(str(path))


def test_numbers_where_tokens_cut_the_batch_are_refused():
    args = recipe_arguments("--global_batch_size", 16)
    config = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    problems = check_deepspeed(config, args, "no", grid=ProcessGrid(2))
    assert len(problems) == 2 and "--micro_batch_tokens 1024 splits the batch; pass --micro_batch_size 2" in problems[0]
    assert "it follows from --global_batch_size 16 in --micro_batch_tokens 1024" in problems[1]
    assert check_deepspeed(config | {"gradient_accumulation_steps": 1}, args, "no", ProcessGrid(2)) == problems[:1]


@pytest.mark.parametrize(
    ("stage", "overlaps", "flags", "warns"),
    [
        (1, True, ["--compile"], 1),
        (2, True, ["--compile"], 1),
        (3, True, ["--compile"], 0),
        (2, False, ["--compile"], 0),
    ]
    + [(2, True, [], 0)],
)
def test_overlapped_sums_of_a_compiled_backward_are_warned_of(stage, overlaps, flags, warns):
    """Controls: each of the three alone, and the shipped files."""
    zero = zero_section(stage, offload=False, overlap_comm=overlaps)
    settled = settle_deepspeed({"zero_optimization": zero}, recipe_arguments(*FLAGS, *flags), "no", ProcessGrid(2))
    assert len(settled.risky) == warns and not settled.problems
    shipped = settle_deepspeed(f"ds_configs/zero{stage}.json", recipe_arguments(*FLAGS, *flags), "no", ProcessGrid(2))
    assert not shipped.risky


def test_a_yaml_that_repeats_what_its_deepspeed_file_says_is_refused(tmp_path):
    section = {"deepspeed_config_file": "ds_configs/zero3.json", "zero_stage": 2}
    path = write_yaml(tmp_path / "c.yaml", deepspeed_config=section)
    launch = parse_launch(["--config_file", str(path), "recipes/lm.py"], environment={})
    assert any(
        f"{path}: zero_stage next to ds_configs/zero3.json" in line
        for line in check_launch(launch, recipe_arguments(), Traits())
    )


@pytest.mark.usefixtures("extensions")
@pytest.mark.parametrize("offload", [False, True])
def test_their_runs_are_those_of_the_shipped_file(offload, functions_file, model_dir, tmp_path):
    """In bf16: Accelerate's example of ZeRO-2, and ZeRO-3 offloaded as `accelerate config` writes it."""
    shipped = "zero3_offload_cpu" if offload else "zero2"
    more = ("--num_updates", 3, "--max_grad_norm", 1.0)
    given = [(flags(functions_file, model_dir, tmp_path / name, *more), {}) for name in ("shipped", "run")]
    run_specs("lm", given[:1], tmp_path, shipped, "--mixed_precision", "bf16")
    if offload:
        path = write_yaml(tmp_path / "c.yaml", mixed_precision="bf16", deepspeed_config=written_section(3, True))
    else:
        example = accelerate_example(2, offload=False)
        example["bf16"] = {"enabled": example.pop("fp16")["enabled"]}
        (tmp_path / "mine.json").write_text(json.dumps(example))
        # The precision of the launch may also stand in the YAML, which Accelerate by itself refuses beside a file.
        section = {"deepspeed_config_file": str(tmp_path / "mine.json"), "zero3_init_flag": True}
        path = write_yaml(tmp_path / "c.yaml", mixed_precision="bf16", deepspeed_config=section)
    result = run_specs("lm", given[1:], tmp_path, path)
    if not offload:
        assert "mine.json: no effect here: steps_per_print" in result.stderr
        assert "optimizer (--optimizer adamw, --learning_rate 0.001, --weight_decay 1.0)" in result.stdout
    assert len(re.findall(r"DeepSpeed's settings \(.*\), filled in: ", result.stdout)) == 1
    assert "precision  bf16" in result.stdout and (tmp_path / "run/model/model.safetensors").exists()
    losses, expected = ([line["loss"] for line in read_metrics(tmp_path / name)] for name in ("run", "shipped"))
    assert losses == expected and len(losses) == 3


@pytest.mark.usefixtures("extensions")
def test_the_precision_of_the_file_runs_where_the_launch_says_none(functions_file, model_dir, tmp_path):
    """And the view of the settings names the file for what it says, and only for that."""
    example = transformers_example(3, offload=True)
    example["bf16"] = {"enabled": example.pop("bfloat16")["enabled"] == "auto"}
    example |= {"gradient_clipping": 0.5, "train_batch_size": 8}
    (tmp_path / "mine.json").write_text(json.dumps(example))
    options = ("--num_processes", 1, "--deepspeed_config_file", tmp_path / "mine.json")
    given = flags(functions_file, model_dir, tmp_path / "run", "--dry_run")
    result = run_specs("lm", [(given, {})], tmp_path, "zero3", *options)
    assert "precision  bf16" in result.stdout
    source = str(tmp_path / "mine.json")
    view = settings_shown(result.stdout)
    assert view["bf16.enabled"] == ("True", source) and view["gradient_clipping"] == ("0.5", source)
    assert view["zero_optimization.reduce_bucket_size"] == ("1024", f"{source}: auto, resolved")
    assert view["gradient_accumulation_steps"] == ("1", "set by Accelerate or the recipe")
    assert view["zero_optimization.offload_param.device"] == ("cpu", source)
    assert not {"train_batch_size", "steps_per_print"} & {key for key, (_, where) in view.items() if source in where}


def test_a_configs_file_is_found_from_any_directory(tmp_path, monkeypatch):
    """Next to the config or above it; in the current directory as Accelerate does; two that differ are refused."""
    shipped, elsewhere, copy = ROOT / "accelerate_configs/zero3.yaml", tmp_path / "elsewhere", tmp_path / "copy"
    elsewhere.mkdir()
    for folder in ("beside", "above/accelerate_configs"):
        (copy / folder).mkdir(parents=True)
        shutil.copy(shipped, copy / folder)
        shutil.copytree(ROOT / "ds_configs", (copy / folder.partition("/")[0] / "ds_configs"))
    monkeypatch.chdir(elsewhere)

    def found(config, *flags):
        asked = parse_launch(["--config_file", str(config), *flags, "recipe.py"])
        return asked.deepspeed_config, asked.file_problems

    assert found(shipped) == (str(ROOT / "ds_configs/zero3.json"), [])
    assert found("../copy/beside/zero3.yaml") == (str(copy / "beside/ds_configs/zero3.json"), [])
    above = "../copy/above/accelerate_configs/zero3.yaml"
    assert found(above) == (str(copy / "above/ds_configs/zero3.json"), [])
    (elsewhere / "link.yaml").symlink_to(shipped)
    assert found("link.yaml") == (str(ROOT / "ds_configs/zero3.json"), [])
    shutil.copytree(ROOT / "ds_configs", elsewhere / "ds_configs")
    assert found(shipped) == ("ds_configs/zero3.json", [])
    (elsewhere / "ds_configs/zero3.json").write_text("{}")
    (problem,) = found(above)[1]
    assert str(copy / "above/ds_configs/zero3.json") in problem and "--deepspeed_config_file" in problem
    assert found(above, "--deepspeed_config_file", "ds_configs/zero3.json") == ("ds_configs/zero3.json", [])
    shutil.rmtree(copy / "above/ds_configs")
    shutil.rmtree(elsewhere / "ds_configs")
    with pytest.raises(UserError, match="relative to the current directory or to the folder of the config file"):
        read_deepspeed_config(found(above)[0])


@pytest.mark.usefixtures("extensions")
def test_a_shipped_config_runs_from_another_directory(functions_file, tmp_path):
    flags = ["--train_file", functions_file, "--sequence_length", 64, "--dry_run"]
    result = launch(*flags, config="zero3", script=ROOT / "recipes/lm.py", cwd=tmp_path)
    assert f"DeepSpeed's settings ({ROOT / 'ds_configs/zero3.json'})" in result.stdout
