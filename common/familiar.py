"""What the flags of well-known training scripts are called here: an unknown flag is refused with the one to give."""

import re

LAUNCHER = "of accelerate launch, before the recipe"
# By the flag's name there: who has it (N: transformers' run_clm_no_trainer.py and its like, T: Trainer, S: TRL's
# SFTTrainer), and what to give here. What is in braces is the value that was given, where it is one of its kind.
FLAGS: dict[str, tuple[str, str]] = {
    "max_train_steps": ("N", "--num_updates {N}"),
    "max_steps": ("TS", "--num_updates {N}"),
    "num_train_epochs": ("NTS", "--num_epochs {N}"),
    "early_stopping_patience": ("", "--patience {N}"),
    "per_device_train_batch_size": ("NTS", "--micro_batch_size {N}, beside --global_batch_size"),
    "train_batch_size": ("", "--global_batch_size {N}, of all processes together"),
    "batch_size": ("", "--global_batch_size {N}, of all processes together"),
    "gradient_accumulation_steps": ("NTS", "--global_batch_size, which is {N} x --micro_batch_size x processes"),
    "per_device_eval_batch_size": ("NTS", "--micro_batch_size or --micro_batch_tokens, which hold for evaluations too"),
    "auto_find_batch_size": ("TS", "--micro_batch_tokens auto"),
    "group_by_length": ("TS", "not needed: each global batch is sorted by length"),
    "padding_free": ("S", "not needed: each global batch is sorted by length"),
    "dataloader_drop_last": ("TS", "--drop_last_window"),
    "dataloader_num_workers": ("TS", "--num_workers {N}"),
    "lr": ("", "--learning_rate {N}"),
    "lr_scheduler_type": ("NTS", "--lr_schedule {SCHEDULE}"),
    "lr_scheduler": ("", "--lr_schedule {SCHEDULE}"),
    "num_warmup_steps": ("N", "--warmup_updates {N}"),
    "warmup_steps": ("TS", "--warmup_updates {N}"),
    "warmup_ratio": ("TS", "--warmup_updates, which is {N} x --num_updates"),
    "optim": ("TS", "--optimizer {OPTIMIZER}"),
    "gradient_clipping": ("", "--max_grad_norm {N}"),
    "mixed_precision": ("", f"--mixed_precision {{PRECISION}} {LAUNCHER}"),
    "bf16": ("TS", f"--mixed_precision bf16 {LAUNCHER}"),
    "fp16": ("TS", f"--mixed_precision fp16 {LAUNCHER}"),
    "deepspeed": ("TS", f"--config_file accelerate_configs/zero3.yaml {LAUNCHER} (docs/deepspeed_files.md)"),
    "fsdp": ("TS", f"--config_file accelerate_configs/fsdp2.yaml {LAUNCHER}"),
    "gradient_checkpointing": ("TS", "--activation_checkpointing full"),
    "torch_compile": ("TS", "--compile"),
    "use_liger_kernel": ("TS", "not needed: the logits never exist at once"),
    "eval_steps": ("TS", "--eval_every {N}"),
    "eval_strategy": ("TS", "--eval_every {N}"),
    "evaluation_strategy": ("T", "--eval_every {N}"),
    "logging_steps": ("TS", "not needed: metrics.jsonl has a line for each update"),
    "checkpointing_steps": ("N", "--save_every {N}"),
    "save_steps": ("TS", "--save_every {N}"),
    "save_strategy": ("TS", "--save_every {N}"),
    "save_total_limit": ("TS", "--keep_last {N}"),
    "load_best_model_at_end": ("TS", "--keep_best --load_best_at_end"),
    "resume_from_checkpoint": ("NTS", "--resume, with the --output_dir of that run"),
    "overwrite_output_dir": ("T", "--overwrite"),
    "with_tracking": ("N", "--report_to TRACKER"),
    "run_name": ("TS", "--output_dir DIR, which names the run"),
    "do_train": ("T", "not needed: a recipe trains"),
    "do_eval": ("T", "--validation_file FILE"),
    "validation_split_percentage": ("N", "--validation_file FILE"),
    "dataset_config_name": ("N", "--dataset_config {NAME}"),
    "streaming": (
        "T",
        "not here: the samples of an update follow from their number, which a stream does not know; write it to files "
        "once (docs/data.md)",
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
    "load_in_4bit": ("", "--quantize nf4, beside --lora_rank"),
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


def here(name: str, value: str | None = None) -> str | None:
    """What to give in the place of another script's flag; None for one that is not known. name: without dashes."""
    if name not in FLAGS:
        return None
    _, words = FLAGS[name]
    found = re.search(r"\{(\w+)\}", words)
    if not found or value is None:
        return words.replace("{", "").replace("}", "")
    kind = found[1]
    if kind in VALUES:
        value = VALUES[kind].get(value, kind)
    elif kind == "N" and value == "epoch":
        value = "1epoch"
    elif kind == "N" and not re.fullmatch(r"[\d.]+(e[+-]?\d+)?", value):
        value = "N"
    return words.replace(found[0], value)


def table() -> list[str]:
    """The rows of a table in Markdown: the flag there, whose it is, what to give here."""
    names = {"N": "no_trainer", "T": "Trainer", "S": "SFTTrainer"}
    rows = [(name, ", ".join(names[letter] for letter in whose) or "others") for name, (whose, _) in FLAGS.items()]
    return [f"| `--{name}` | {whose} | {here(name)} |" for name, whose in rows]
