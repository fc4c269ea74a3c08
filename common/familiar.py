"""What the flags of well-known training scripts are called here: an unknown flag is refused with what to do."""

import re
from collections.abc import Container

LAUNCHER = "as a flag of accelerate launch, before the recipe"
SORTED = "take it out; the samples of a global batch are always sorted by length"
LOGGED = "take it out; metrics.jsonl has a line for each update"
BEST = "take it out; the best checkpoint is the one with the lowest validation loss"
BETAS = "take it out, or change ADAM_BETAS in common/training/optimizers.py, which is (0.9, 0.95)"
# By the flag's name there: who has it (N: transformers' run_clm_no_trainer.py and its like, T: Trainer, S: TRL's
# SFTTrainer), and what to do here. In braces: the value that was given, where it is of that kind: N a whole number, X
# any number, NAME a text, and what VALUES names.
FLAGS: dict[str, tuple[str, str]] = {
    "max_train_steps": ("N", "--num_updates {N}"),
    "max_steps": ("TS", "--num_updates {N}"),
    "num_train_epochs": ("NTS", "--num_epochs {X}"),
    "early_stopping_patience": ("", "--patience {N}"),
    "per_device_train_batch_size": ("NTS", "--micro_batch_size {N}, beside --global_batch_size"),
    "train_batch_size": ("", "--global_batch_size {N}, which counts the samples of all processes"),
    "batch_size": ("", "--global_batch_size {N}, which counts the samples of all processes"),
    "gradient_accumulation_steps": ("NTS", "--global_batch_size B, where B is {N} x --micro_batch_size x processes"),
    "per_device_eval_batch_size": ("NTS", "take it out; an evaluation has the same micro-batches as training"),
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
    "warmup_ratio": ("TS", "--warmup_updates W, where W is {X} x --num_updates"),
    "optim": ("TS", "--optimizer {OPTIMIZER}"),
    "gradient_clipping": ("", "--max_grad_norm {X}"),
    "mixed_precision": ("", f"--mixed_precision {{PRECISION}} {LAUNCHER}"),
    "bf16": ("TS", f"--mixed_precision bf16 {LAUNCHER}"),
    "fp16": ("TS", f"--mixed_precision fp16 {LAUNCHER}"),
    "deepspeed": ("TS", f"--config_file accelerate_configs/zero3.yaml {LAUNCHER} (docs/deepspeed_files.md)"),
    "fsdp": ("TS", f"--config_file accelerate_configs/fsdp2.yaml {LAUNCHER}"),
    "gradient_checkpointing": ("TS", "--activation_checkpointing full"),
    "torch_compile": ("TS", "--compile"),
    "use_liger_kernel": ("TS", "take it out; the recipes of causal language models never hold all logits at once"),
    "eval_steps": ("TS", "--eval_every {N}"),
    "eval_strategy": ("TS", "--eval_every {N}"),
    "evaluation_strategy": ("T", "--eval_every {N}"),
    "logging_steps": ("TS", LOGGED),
    "checkpointing_steps": ("N", "--save_every {N}"),
    "save_steps": ("TS", "--save_every {N}"),
    "save_strategy": ("TS", "--save_every {N}"),
    "save_total_limit": ("TS", "--keep_last {N}, at least 2"),
    "load_best_model_at_end": ("TS", "--keep_best --load_best_at_end, beside --eval_every"),
    "resume_from_checkpoint": ("NTS", "--resume, with the --output_dir of that run"),
    "overwrite_output_dir": ("T", "--overwrite"),
    "with_tracking": ("N", "--report_to TRACKER, such as tensorboard"),
    "run_name": ("TS", "--output_dir runs/{NAME}"),
    "do_train": ("T", "take it out; a recipe always trains"),
    "do_eval": ("T", "--validation_file FILE"),
    "validation_split_percentage": ("N", "--validation_file FILE"),
    "dataset_config_name": ("N", "--dataset_config {NAME}"),
    "streaming": (
        "T",
        "not here: the samples of an update follow from how many there are in all, which a stream does not tell; write "
        "it to files once (docs/data.md)",
    ),
    "dataset_text_field": ("S", "--text_column {NAME}"),
    "block_size": ("N", "--sequence_length {N}"),
    "max_length": ("S", "--sequence_length {N}"),
    "max_seq_length": ("S", "--sequence_length {N}"),
    "max_source_length": ("N", "--sequence_length {N}"),
    "max_target_length": ("N", "--target_length {N}"),
    "packing": ("S", "--shape blocks"),
    "model_name": ("", "--model_name_or_path {NAME}"),
    "use_peft": ("", "--lora_rank 16"),
    "lora_r": ("", "--lora_rank {N}"),
    "lora_target_modules": ("", "--lora_targets {NAME}"),
    "use_lora": ("", "--lora_rank 16"),
    "lora": ("", "--lora_rank 16"),
    "load_in_4bit": ("", "--quantize nf4, beside --lora_rank"),
    "load_in_8bit": ("", "--quantize nf4, beside --lora_rank: in 4 bits, there is no form of 8"),
    "attn_implementation": ("S", "take it out; it is PyTorch's own (sdpa) where the model has that, else the model's"),
    "config_name": ("N", "take it out; a pretrained model brings its own, and sizes from scratch have names (--help)"),
    "tokenizer_name": (
        "N",
        "take it out; a pretrained model brings its own, and one from scratch is trained on your text",
    ),
    "use_slow_tokenizer": ("N", "take it out; it is the fast one where the model has that"),
    "model_type": ("N", "take it out; the model's own config names its type"),
    "low_cpu_mem_usage": ("N", "take it out; a model is always loaded so"),
    "adam_beta1": ("TS", BETAS),
    "adam_beta2": ("TS", BETAS),
    "adam_epsilon": ("TS", "take it out; it is 1e-8, as in PyTorch"),
    "preprocessing_num_workers": ("N", "take it out; the tokenizer uses all cores by itself"),
    "overwrite_cache": ("N", "take it out; other data, another tokenizer or other flags are always cached anew"),
    "no_keep_linebreaks": ("N", "take it out; line breaks are kept"),
    "remove_unused_columns": ("TS", "take it out; columns that no flag names are not read"),
    "max_train_samples": ("", "take it out; name a smaller file, or end earlier with --num_updates"),
    "logging_strategy": ("TS", LOGGED),
    "logging_first_step": ("TS", LOGGED),
    "metric_for_best_model": ("TS", BEST),
    "greater_is_better": ("TS", BEST),
    "save_safetensors": ("T", "take it out; a model is always saved as safetensors"),
    "precompute_ref_log_probs": (
        "",
        "take it out; dpo.py always computes those of the reference once, before it trains",
    ),
    "loss_type": ("", "take it out; each recipe has one loss, dpo.py that of DPO (sigmoid)"),
    "push_to_hub": ("NTS", "python -m common.checkpoint push OUTPUT_DIR REPO_NAME, after the run"),
    "hub_model_id": ("NTS", "python -m common.checkpoint push OUTPUT_DIR {NAME}, after the run"),
    "hub_token": ("NTS", "HF_TOKEN in the environment of python -m common.checkpoint push, after the run"),
}
# Values by which a flag there asks for nothing, and the flags whose answer is then not just to take them out.
NOTHING = ("false", "no", "none", "off", "0", "0.0", "-1", "all-linear")
MEASURED = "take it out; without --eval_every, held-out data are measured only at the end"
OFF = {
    "bf16": f"--mixed_precision no {LAUNCHER}",
    "fp16": f"--mixed_precision no {LAUNCHER}",
    "max_steps": "take it out; --num_updates or --num_epochs says how long",
    "warmup_ratio": "--warmup_updates 0",
    "eval_strategy": MEASURED,
    "evaluation_strategy": MEASURED,
    "save_strategy": "--save_every 0, which saves only when the run is asked to stop",
    "packing": "--shape examples",
    "lora_target_modules": "take it out; without it all linear layers but the head are adapted",
}
# The flags here that not every recipe has, and which ones have them.
NOT_TEXT = "all recipes but vision.py"
ONE_TEXT = "classify.py, lm.py, long_sequence.py, moe.py and pipeline.py"
ADAPTED = "classify.py, dpo.py, lm.py, moe.py and seq2seq.py"
ELSEWHERE = {
    "train_file": f"{NOT_TEXT}, where --train_dir takes its place",
    "validation_file": f"{NOT_TEXT}, where --validation_dir takes its place",
    "sequence_length": NOT_TEXT,
    "micro_batch_tokens": "all recipes but long_sequence.py and vision.py",
    "text_column": ONE_TEXT,
    "shape": "lm.py, moe.py and pipeline.py",
    "target_length": "seq2seq.py",
    "lora_rank": ADAPTED,
    "lora_alpha": ADAPTED,
    "lora_dropout": ADAPTED,
    "lora_targets": ADAPTED,
    "quantize": ADAPTED,
}
# What is in braces: the values there, with those here.
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "adamw")
_ADAMW8BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")
VALUES: dict[str, dict[str, str]] = {
    "SCHEDULE": {
        "constant": "constant",
        "constant_with_warmup": "constant",
        "linear": "linear",
        "cosine": "cosine",
        "cosine_with_min_lr": "cosine",
        "warmup_stable_decay": "wsd",
    },
    "OPTIMIZER": dict.fromkeys(_ADAMW, "adamw")
    | dict.fromkeys(_ADAMW8BIT, "adamw8bit")
    | {"adafactor": "adafactor", "sgd": "sgd"},
    "PRECISION": {name: name for name in ("no", "bf16", "fp16")},
}


def here(name: str, value: str | None = None, options: Container[str] | None = None) -> str | None:
    """What to do in the place of another script's flag; None for one that is not known.

    name: without dashes. value: that was given, "" if none was; None: the answer is for any value. options: the flags
    of the recipe that was given it, for an answer that names no others.
    """
    if name not in FLAGS and name not in ELSEWHERE:
        return None
    words = FLAGS[name][1] if name in FLAGS else f"--{name}"
    slot = re.search(r"\{(\w+)\}", words)
    if value is not None and value.lower() in NOTHING:
        if name in OFF:
            words = OFF[name]
        elif not slot and name in FLAGS and not words.startswith("take it out"):
            words = "take it out; it is off unless asked for"
    for flag in re.findall(r"--(\w+)", words):
        if options is not None and flag in ELSEWHERE and f"--{flag}" not in options:
            return f"this recipe does not have it; it is --{flag} in {ELSEWHERE[flag]}"
    words = words if words.startswith(("take", "not here")) else f"use {words}"
    return re.sub(r"\{(\w+)\}", lambda slot: _carried_over(slot[1], value), words)


def _carried_over(kind: str, value: str | None) -> str:
    """A value there as it is written here; its kind where there is none that means the same."""
    if kind in VALUES and value is not None:
        return VALUES[kind].get(value, "|".join(dict.fromkeys(VALUES[kind].values())))
    if kind == "N" and value == "epoch":
        return "1epoch"
    pattern = {"N": r"\d+", "X": r"[\d.]+(e[+-]?\d+)?"}.get(kind, ".+")
    return value if re.fullmatch(pattern, value or "") else kind


def table() -> list[str]:
    """The rows of a table in Markdown: the flag there, whose it is, what to give here."""
    names = {"N": "no_trainer", "T": "Trainer", "S": "SFTTrainer"}
    rows = [(name, ", ".join(names[letter] for letter in whose) or "others") for name, (whose, _) in FLAGS.items()]
    return [f"| `--{name}` | {whose} | {here(name).removeprefix('use ')} |" for name, whose in rows]
