"""Translates flags of well-known training scripts: the error for such a flag shows the equivalent of the recipes."""

import difflib
import re
from collections.abc import Collection, Container, Sequence

from common.training.optimizers import OPTIMIZERS

LAUNCHER = "as a flag of accelerate launch, before the recipe"
SORTED = "remove it; the samples of a global batch are always sorted by length"
LOGGED = "remove it; metrics.jsonl has one line per update"
BEST = "remove it; the best checkpoint has the lowest validation loss"
BETAS = "remove it, or change ADAM_BETAS in common/training/optimizers.py, which is (0.9, 0.95)"
LOSS = "remove it, or change the loss in your copy of the recipe"
HELD_OUT_SPLIT = "remove it; --dataset_name reads its splits train and validation (or test)"
ON_START = "remove it; the first evaluation is after --eval_every updates"
CORES = "remove it; the tokenizer uses all cores by itself"
# Key: name of the flag in other scripts. Value: the scripts that have it (N: transformers' run_clm_no_trainer.py and
# similar scripts, T: Trainer, S: TRL's SFTTrainer), and its equivalent here. A user's value of the right type replaces
# the braces: {N} an integer, {X} a number, {NAME} a text; the other names are keys of VALUES, which translates them.
FLAGS: dict[str, tuple[str, str]] = {
    "max_train_steps": ("N", "--num_updates {N}"),
    "max_steps": ("TS", "--num_updates {N}"),
    "max_iters": ("", "--num_updates {N}"),
    "num_train_epochs": ("NTS", "--num_epochs {X}"),
    "early_stopping_patience": ("", "--patience {N}"),
    "per_device_train_batch_size": ("NTS", "--micro_batch_size {N}, together with --global_batch_size"),
    "train_batch_size": ("", "--global_batch_size {N}, which counts the samples of all processes"),
    "batch_size": ("", "--global_batch_size {N}, which counts the samples of all processes"),
    "gradient_accumulation_steps": ("NTS", "--global_batch_size B, where B is {N} x --micro_batch_size x processes"),
    "per_device_eval_batch_size": ("NTS", "remove it; evaluation uses the micro-batch size of training"),
    "auto_find_batch_size": ("TS", "--micro_batch_tokens auto"),
    "group_by_length": ("TS", SORTED),
    "padding_free": ("S", SORTED),
    "dataloader_drop_last": ("TS", "--drop_last_window"),
    "dataloader_num_workers": ("TS", "--num_workers {N}"),
    "lr": ("", "--learning_rate {X}"),
    "lr_scheduler_type": ("NTS", "--lr_schedule {SCHEDULE}"),
    "lr_scheduler": ("", "--lr_schedule {SCHEDULE}"),
    "num_warmup_steps": ("N", "--warmup_updates {N}"),
    "warmup_steps": ("TS", "--warmup_updates {N}"),
    "warmup_iters": ("", "--warmup_updates {N}"),
    "warmup_ratio": ("TS", "--warmup_updates W, where W is {X} x --num_updates"),
    "optim": ("TS", "--optimizer {OPTIMIZER}"),
    "gradient_clipping": ("", "--max_grad_norm {X}"),
    "grad_clip": ("", "--max_grad_norm {X}"),
    "mixed_precision": ("", f"--mixed_precision {{PRECISION}} {LAUNCHER}"),
    "bf16": ("TS", f"--mixed_precision bf16 {LAUNCHER}"),
    "fp16": ("TS", f"--mixed_precision fp16 {LAUNCHER}"),
    "deepspeed": ("TS", f"--config_file accelerate_configs/zero3.yaml {LAUNCHER} (docs/deepspeed_files.md)"),
    "fsdp": ("TS", f"--config_file accelerate_configs/fsdp2.yaml {LAUNCHER}"),
    "gradient_checkpointing": ("TS", "--activation_checkpointing full"),
    "torch_compile": ("TS", "--compile"),
    "use_liger_kernel": ("TS", "remove it; the recipes of causal language models never hold all logits at once"),
    "eval_steps": ("TS", "--eval_every {N}"),
    "eval_strategy": ("TS", "--eval_every {N}"),
    "evaluation_strategy": ("T", "--eval_every {N}"),
    "eval_interval": ("", "--eval_every {N}"),
    "logging_steps": ("TS", LOGGED),
    "checkpointing_steps": ("N", "--save_every {N}"),
    "save_steps": ("TS", "--save_every {N}"),
    "save_strategy": ("TS", "--save_every {N}"),
    "save_interval": ("", "--save_every {N}"),
    "checkpoint_every": ("", "--save_every {N}"),
    "save_total_limit": ("TS", "--keep_last {N}, at least 2"),
    "load_best_model_at_end": ("TS", "--keep_best --load_best_at_end, together with --eval_every"),
    "resume_from_checkpoint": ("NTS", "--resume, with the --output_dir of that run"),
    "overwrite_output_dir": ("T", "--overwrite"),
    "with_tracking": ("N", "--report_to TRACKER, such as tensorboard"),
    "run_name": ("TS", "--output_dir runs/{NAME}"),
    "do_train": ("T", "remove it; a recipe always trains"),
    "do_eval": ("T", "--validation_file FILE"),
    "validation_split_percentage": ("N", "--validation_file FILE"),
    "dataset_config_name": ("N", "--dataset_config {NAME}"),
    "streaming": (
        "T",
        "not here: the samples of an update depend on the dataset length, which is unknown in a stream; write the "
        "stream to files once (docs/data.md)",
    ),
    "dataset_text_field": ("S", "--text_column {NAME}"),
    "block_size": ("N", "--sequence_length {N}"),
    "max_length": ("S", "--sequence_length {N}"),
    "max_seq_length": ("S", "--sequence_length {N}"),
    "seq_len": ("", "--sequence_length {N}"),
    "max_source_length": ("N", "--sequence_length {N}"),
    "max_target_length": ("N", "--target_length {N}"),
    "packing": ("S", "--shape packed"),
    "model_name": ("", "--model_name_or_path {NAME}"),
    "use_peft": ("", "--lora_rank 16"),
    "lora_r": ("", "--lora_rank {N}"),
    "lora_target_modules": ("", "--lora_targets {NAME}"),
    "use_lora": ("", "--lora_rank 16"),
    "lora": ("", "--lora_rank 16"),
    "load_in_4bit": ("", "--quantize nf4, together with --lora_rank"),
    "load_in_8bit": ("", "--quantize nf4, together with --lora_rank: in 4 bits, 8 bits are not supported"),
    "attn_implementation": ("S", "remove it; it is PyTorch's (sdpa) if the model supports that, otherwise the model's"),
    "config_name": ("N", "remove it; a pretrained model has its own, and sizes from scratch have names (--help)"),
    "tokenizer_name": (
        "N",
        "remove it; a pretrained model has its own, and a tokenizer from scratch is trained on your text",
    ),
    "use_slow_tokenizer": ("N", "remove it; the fast tokenizer is used if the model has it"),
    "model_type": ("N", "remove it; the type is read from the model's config"),
    "low_cpu_mem_usage": ("N", "remove it; it is always on"),
    "adam_beta1": ("TS", BETAS),
    "adam_beta2": ("TS", BETAS),
    "adam_epsilon": ("TS", "remove it; it is 1e-8, as in PyTorch"),
    "preprocessing_num_workers": ("N", CORES),
    "overwrite_cache": ("N", "remove it; different data, tokenizers or flags always have their own cache"),
    "no_keep_linebreaks": ("N", "remove it; line breaks are kept"),
    "remove_unused_columns": ("TS", "remove it; columns that are not set by a flag are not read"),
    "max_train_samples": ("", "remove it; pass a smaller file, or end earlier with --num_updates"),
    "logging_strategy": ("TS", LOGGED),
    "logging_first_step": ("TS", LOGGED),
    "metric_for_best_model": ("TS", BEST),
    "greater_is_better": ("TS", BEST),
    "save_safetensors": ("T", "remove it; a model is always saved as safetensors"),
    "precompute_ref_log_probs": (
        "",
        "remove it; dpo.py always precomputes the reference log-probabilities",
    ),
    "loss_type": ("", "use --loss in dpo.py and embed.py; all other recipes have a single loss"),
    "completion_only_loss": ("S", "remove it; in rows with prompt and completion, only the completion is a target"),
    "assistant_only_loss": ("S", "remove it; in conversations, only the assistant's turns are targets"),
    "max_prompt_length": ("", "remove it; --sequence_length limits prompt and answer together"),
    "center_rewards_coefficient": ("", "--center_rewards {X}, in reward.py"),
    "reference_free": ("", "remove it; --loss orpo, simpo and cpo need no reference"),
    "teacher_model_name_or_path": ("", "--teacher {NAME}"),
    "disable_dropout": ("", "remove it; dropout is set by the model's config.json"),
    "label_smoothing_factor": ("TS", LOSS),
    "neftune_noise_alpha": ("T", "remove it; no noise is added to embeddings"),
    "dtype": ("S", f"--mixed_precision PRECISION {LAUNCHER}; master weights are float32"),
    "torch_dtype": ("NS", f"--mixed_precision PRECISION {LAUNCHER}; master weights are float32"),
    "tf32": ("TS", "remove it, or set torch.backends.cuda.matmul.fp32_precision in your copy of the recipe"),
    "activation_offloading": ("S", "--activation_checkpointing offload"),
    "gradient_checkpointing_kwargs": ("TS", "remove it; --activation_checkpointing MODE is all"),
    "bnb_4bit_quant_type": ("S", "--quantize nf4, together with --lora_rank"),
    "use_bnb_nested_quant": ("S", "remove it; --quantize nf4 always quantises twice"),
    "bnb_4bit_compute_dtype": ("", "remove it; the base model computes in the precision of the config"),
    "lora_modules_to_save": ("S", "remove it; a new head is trained in full, the rest of the base model is frozen"),
    "lora_task_type": ("S", "remove it; it is set by the recipe"),
    "dataset_train_split": ("S", HELD_OUT_SPLIT),
    "dataset_test_split": ("S", HELD_OUT_SPLIT),
    "dataset_num_proc": ("S", CORES),
    "fsdp_config": ("TS", f"--config_file accelerate_configs/fsdp2.yaml {LAUNCHER}"),
    "use_cpu": ("TS", f"--config_file accelerate_configs/cpu.yaml {LAUNCHER}"),
    "no_cuda": ("T", f"--config_file accelerate_configs/cpu.yaml {LAUNCHER}"),
    "local_rank": ("TS", "remove it; accelerate launch sets it for each process"),
    "ddp_find_unused_parameters": ("TS", "remove it; an update uses every parameter"),
    "ddp_backend": ("TS", "remove it; it is NCCL on GPUs and gloo on CPUs"),
    "ddp_timeout": ("TS", "--connect_timeout {N}, for the start"),
    "dataloader_pin_memory": ("TS", "remove it; it is always on with a GPU"),
    "dataloader_prefetch_factor": ("TS", "--num_workers W; each worker prepares global batches in advance"),
    "data_seed": ("TS", "--seed {N}"),
    "full_determinism": (
        "TS",
        "remove it; or set torch.use_deterministic_algorithms(True) in your copy of the recipe",
    ),
    "eval_on_start": ("TS", ON_START),
    "eval_delay": ("TS", ON_START),
    "prediction_loss_only": ("TS", "remove it; each recipe has its own metrics"),
    "save_only_model": ("TS", "remove it; a checkpoint is always complete, and model/ contains only the model"),
    "disable_tqdm": ("TS", "TQDM_DISABLE=1 in the environment"),
    "log_level": ("TS", "remove it; the level is fixed"),
    "torch_compile_backend": ("TS", "--compile"),
    "torch_compile_mode": ("TS", "--compile"),
    "predict_with_generate": ("", "--generate N, the number of held-out prompts to answer"),
    "generation_max_length": ("", "--target_length {N}"),
    "num_beams": ("", "remove it; answers are generated greedily"),
    "source_prefix": ("", "remove it, and add it to each source in your data"),
    "summary_column": ("N", "--target_column {NAME}"),
    "label_column_name": ("N", "--label_column {NAME}"),
    "image_column_name": ("N", "remove it; vision.py reads images from --train_dir, one folder per label"),
    "task_name": ("N", "--dataset_name nyu-mll/glue --dataset_config {NAME}"),
    "line_by_line": ("N", "--shape examples"),
    "mlm_probability": ("N", "not here: docs/new_recipe.md has a recipe for masked language modelling"),
    "push_to_hub": ("NTS", "python -m tools.checkpoint push OUTPUT_DIR REPO_NAME, after the run"),
    "hub_model_id": ("NTS", "python -m tools.checkpoint push OUTPUT_DIR {NAME}, after the run"),
    "hub_private_repo": ("TS", "python -m tools.checkpoint push OUTPUT_DIR REPO_NAME --private, after the run"),
    "hub_token": ("NTS", "HF_TOKEN in the environment of python -m tools.checkpoint push, after the run"),
}
# Values that disable a flag in other scripts, or are its default. OFF: advice if such a value needs more than removal.
NOTHING = ("false", "no", "none", "off", "0", "0.0", "-1", "all-linear")
MEASURED = "remove it; without --eval_every, evaluation runs only at the end"
OFF = {
    "bf16": f"--mixed_precision no {LAUNCHER}",
    "fp16": f"--mixed_precision no {LAUNCHER}",
    "max_steps": "remove it; --num_updates or --num_epochs sets the length",
    "warmup_ratio": "--warmup_updates 0",
    "eval_strategy": MEASURED,
    "evaluation_strategy": MEASURED,
    "save_strategy": "--save_every 0, which saves only when the run is stopped",
    "packing": "--shape examples",
    "lora_target_modules": "remove it; by default all linear layers except the head are adapted",
}
# Flags of only some recipes, and the names of these recipes.
NOT_TEXT = "all recipes except vision.py"
ONE_TEXT = "classify.py, lm.py, long_sequence.py, moe.py and pipeline.py"
CAUSAL = "lm.py, moe.py and pipeline.py"
ADAPTED = "classify.py, dpo.py, embed.py, lm.py, moe.py, reward.py and seq2seq.py"
ELSEWHERE = {
    "train_file": f"{NOT_TEXT}, which uses --train_dir instead",
    "validation_file": f"{NOT_TEXT}, which uses --validation_dir instead",
    "sequence_length": NOT_TEXT,
    "max_row_bytes": NOT_TEXT,
    "on_too_long": "all recipes except long_sequence.py and vision.py",
    "micro_batch_tokens": "all recipes except long_sequence.py and vision.py",
    "model_config": "all recipes except long_sequence.py, which uses --architecture instead",
    "text_column": ONE_TEXT,
    "chat_template": "dpo.py, lm.py, moe.py, pipeline.py and reward.py",
    "label_column": "classify.py and vision.py",
    "head_learning_rate": "classify.py, reward.py and vision.py",
    "loss": "dpo.py and embed.py",
    "new_head": "classify.py and reward.py",
    "metric": "classify.py, dpo.py, lm.py, seq2seq.py and vision.py",
    "generate": "dpo.py, lm.py and seq2seq.py",
}
ELSEWHERE |= dict.fromkeys("completion_column document_mask no-document_mask prompt_column shape".split(), CAUSAL)
ELSEWHERE |= dict.fromkeys(
    "lora_alpha lora_dropout lora_rank lora_targets quantize use_dora use_rslora".split(), ADAPTED
)
OWN = {
    "classify.py": "pair_column task",
    "dpo.py": "beta cpo_alpha desirable_weight label_smoothing simpo_gamma undesirable_weight",
    "embed.py": "anchor_column dimensions learn_temperature negative_columns no-normalize normalize pooling "
    "positive_column prompt_anchor prompt_positive score_column symmetric temperature",
    "lm.py": "distillation_temperature distillation_weight divergence quantize_teacher teacher",
    "long_sequence.py": "architecture hidden_size levels mlp_rows num_layers segments truncate",
    "moe.py": "balance balance_strength dense experts_per_token num_experts upcycle",
    "pipeline.py": "schedule",
    "reward.py": "center_rewards",
    "seq2seq.py": "source_column target_column target_length tokenizer",
    "vision.py": "augment image_size norm train_dir validation_dir",
}
ELSEWHERE |= {flag: recipe for recipe, flags in OWN.items() for flag in flags.split()}
# For each key in braces: values in other scripts, with their equivalents here.
VALUES: dict[str, dict[str, str]] = {
    "SCHEDULE": {
        "constant": "constant",
        "constant_with_warmup": "constant",
        "linear": "linear",
        "cosine": "cosine",
        "cosine_with_min_lr": "cosine",
        "warmup_stable_decay": "wsd",
    },
    "OPTIMIZER": {alias: name for name, info in OPTIMIZERS.items() for alias in (*info.aliases, name)},
    "PRECISION": {name: name for name in ("no", "bf16", "fp16")},
}


def here(name: str, value: str | None = None, options: Container[str] | None = None) -> str | None:
    """Returns the advice for a flag of a different script; None for an unknown flag.

    name: without dashes. value: the passed value, "" if there was none; None: the advice is for any value.
    options: flags of this recipe. For an equivalent that is not among them, the advice lists the recipes that have it.
    """
    if name not in FLAGS and name not in ELSEWHERE:
        return None
    words = FLAGS[name][1] if name in FLAGS else f"--{name}"
    slot = re.search(r"\{(\w+)\}", words)
    if value is not None and value.lower() in NOTHING:
        if name in OFF:
            words = OFF[name]
        elif not slot and name in FLAGS and not words.startswith("remove it"):
            words = "remove it; it is off by default"
    for flag in re.findall(r"--(\w+)", words):
        if options is not None and flag in ELSEWHERE and f"--{flag}" not in options:
            return f"this recipe does not have it; it is --{flag} in {ELSEWHERE[flag]}"
    words = words if words.startswith(("remove", "not here")) else f"use {words}"
    return re.sub(r"\{(\w+)\}", lambda slot: _carried_over(slot[1], value), words)


def _carried_over(kind: str, value: str | None) -> str:
    """Returns the equivalent of a value here; without one, the name of the placeholder or the possible values."""
    if value is None:
        return kind
    if kind in VALUES:
        return VALUES[kind].get(value, "|".join(dict.fromkeys(VALUES[kind].values())))
    if kind == "N" and value == "epoch":
        return "1epoch"
    pattern = {"N": r"\d+", "X": r"[\d.]+(e[+-]?\d+)?"}.get(kind, ".+")
    return value if re.fullmatch(pattern, value) else kind


def explain_unknown(unknown: list[str], command_line: Sequence[str], flags: Collection[str]) -> list[str]:
    """Returns one line per unknown flag, with its values. unknown: words that argparse did not recognise."""
    names = {flag.lstrip("-"): flag for flag in flags}
    left, groups, lines, follows = list(unknown), [], [], False
    for word in command_line:
        is_unknown = left[:1] == [word]
        if is_unknown:
            del left[0]
            if word.startswith("--") or not follows:
                groups.append([word])
            else:
                groups[-1].append(word)
        follows = is_unknown
    for words in groups:
        flag, *values = [*words[0].split("=", 1), *words[1:]]
        name, value = flag[2:].replace("-", "_"), " ".join(values)
        if not flag.startswith("--"):
            answer = ": it belongs to no flag (a switch, such as --overwrite, takes no value)"
        elif advice := here(name, "none" if values and not value else value, flags):
            answer = f": {advice}"
        elif nearest := difflib.get_close_matches(name, names, n=1, cutoff=0.75):
            answer = f": did you mean {names[nearest[0]]}?"
        else:
            answer = " (--help lists the flags)"
        lines.append(f"unrecognized argument {' '.join(words)}{answer}")
    return lines


def table() -> list[str]:
    """Returns the rows of a Markdown table: flags of other scripts, the scripts that have them, the equivalent here."""
    names = {"N": "no_trainer", "T": "Trainer", "S": "SFTTrainer"}
    rows: dict[str, tuple[list[str], list[str]]] = {}
    for name, (scripts, _) in FLAGS.items():
        flags, owners = rows.setdefault((here(name) or "").removeprefix("use "), ([], []))
        flags.append(f"`--{name}`")
        owners += [names[letter] for letter in scripts if names[letter] not in owners]
    return [
        f"| {', '.join(flags)} | {', '.join(owners) or 'others'} | {answer} |"
        for answer, (flags, owners) in rows.items()
    ]
