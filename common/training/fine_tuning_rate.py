"""The default learning rate of a pretrained model."""

from collections.abc import Callable

from common.training.recipe_traits import Arguments

# Adapter learning rate relative to the full model's: "LoRA Without Regret" (thinkingmachines.ai, 2025); measured for
# small encoders in benchmarks/results/fine-tuning-rates-cpu.md.
ADAPTER_RATIO = 10


def default_rate(args: Arguments, fine_tuning_rate: float | Callable[[Arguments], float]) -> float:
    """Returns the default learning rate: of the full model, or ADAPTER_RATIO times that for an adapter.

    Args:
        fine_tuning_rate: learning rate of the full model, as a number or a function of the flags.
    """
    rate = fine_tuning_rate(args) if callable(fine_tuning_rate) else fine_tuning_rate
    return rate * (ADAPTER_RATIO if args.shared("lora_rank") else 1)
