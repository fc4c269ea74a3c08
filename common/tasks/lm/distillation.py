"""Distillation: the model also learns the token probabilities of a frozen teacher; `teacher` computes the loss."""

from typing import Any

from common import arguments

FLAGS = ("divergence", "distillation_weight", "distillation_temperature", "quantize_teacher")  # besides --teacher


def parse_arguments(parser: arguments.ArgumentParser) -> arguments.Arguments:
    """Adds the flags of distillation to a parser, and parses; without --teacher, they are None."""
    add = parser.add_group("distillation")
    add("--teacher", "model with the same tokenizer whose token probabilities are learned: directory or hub name")
    add("--divergence", "of the probabilities (default: forward_kl)", choices=("forward_kl", "reverse_kl", "jsd"))
    add("--distillation_weight", "share of the divergence, 0 to 1 (default: 0.5)", type=arguments.not_negative_float)
    add("--distillation_temperature", "divisor of both models' logits (default: 1)", type=arguments.positive_float)
    add("--quantize_teacher", "format of the teacher's linear layers (default: unquantised)", choices=("nf4",))
    args = parser.parse_args()
    if args.teacher is None and (unused := [name for name in FLAGS if getattr(args, name) is not None]):
        parser.error(f"--{unused[0]} has no effect without --teacher; pass both, or remove it")
    return args


def check(run: Any, config: Any, tokenizer: Any) -> tuple[str, ...]:
    """Checks the teacher of --teacher, if set (`teacher.check`); returns the names of settings of the update."""
    if run.args.teacher is None:
        return ()
    from common.tasks.lm import teacher

    return *FLAGS, teacher.check(run.args, config, tokenizer, run.launch_config.grid)


def add_teacher(run: Any, model: Any) -> None:
    """Adds the teacher of --teacher, if set, to the training loss of a prepared model (`teacher.add`)."""
    if run.args.teacher is not None:
        from common.tasks.lm import teacher

        teacher.add(run.args, run.accelerator, model)
