"""Checks of sequence, tensor and pipeline parallelism: `parallelism_config` in Accelerate's config file.

Accelerate has no size for pipeline stages. The recipes read it from `parallelism_config_pp_size`, a key that
Accelerate's launcher does not know and therefore ignores.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Any

from common.errors import main_logger
from common.training.optimizer_choice import name_optimizers
from common.training.optimizers import OPTIMIZERS
from common.training.process_grid import ProcessGrid

logger = main_logger(__name__)
SPLITS = {"sp": "processes a sequence", "tp": "processes a layer", "pp": "stages of a pipeline"}
# Settings of Accelerate's other methods to split a sequence.
OTHERS = {"sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"}
OTHERS |= {"cp_backend", "cp_comm_strategy"}


def check_others(source: str, settings: dict[str, Any], asked: Iterable[str]) -> Iterator[str]:
    """Yields one line per setting in `asked`, the names set by flags or the config file, that has no effect."""
    if not settings.get("use_parallelism_config"):
        for name in sorted(name for name in asked if name.startswith("parallelism_config_")):
            yield f"--{name} has no effect without a parallelism_config in the file; take sequence_parallel.yaml"
        return
    for name in sorted({f"parallelism_config_{name}" for name in OTHERS} & set(asked)):
        yield f"{source} sets {name}, which has no effect on how the recipes share a sequence; remove it"


def check_sizes(source: str, sizes: dict[str, int], mode: str, num_processes: int) -> Iterator[str]:
    """Yields a line for each size that no recipe supports, or that does not fit the number of processes."""
    if sizes["cp"] != 1:
        yield (
            f"{source} sets parallelism_config_cp_size to {sizes['cp']}, which no recipe runs; set it to 1, and "
            "parallelism_config_sp_size to let processes share a sequence"
        )
        return
    if any(size < 1 for size in sizes.values()):
        name = next(name for name, size in sizes.items() if size < 1)
        yield f"{source} sets parallelism_config_{name}_size to {sizes[name]}; use at least 1"
        return
    split = {name: sizes[name] for name in SPLITS if sizes[name] > 1}
    if len(split) > 1:
        names = " and ".join(f"parallelism_config_{name}_size {size}" for name, size in split.items())
        yield f"{source} sets {names}, which cannot be combined; set all but one to 1"
        return
    replicate, shard, shared = sizes["dp_replicate"], sizes["dp_shard"], max(split.values(), default=1)
    product = replicate * shard * shared
    name = f"parallelism_config_{next(iter(split), 'sp')}_size"
    if mode == "DeepSpeed" and split and "sp" not in split:
        instead = "pipeline.yaml" if "pp" in split else "tensor_parallel.yaml or fsdp2_tensor_parallel.yaml"
        yield f"{source} sets {name} to {shared}, which does not go with DeepSpeed; take {instead}"
    elif mode == "FSDP" and "pp" in split:
        yield f"{source} sets {name} to {shared}, which does not go with FSDP; take pipeline.yaml"
    elif mode == "FSDP" and "tp" in split and replicate > 1:
        yield f"{source} sets {name} to {shared} and parallelism_config_dp_replicate_size to {replicate}; set one to 1"
    elif mode == "FSDP" and product != num_processes and (replicate, shard, shared) != (1, 1, 1):
        copies = f"{replicate} copies (parallelism_config_dp_replicate_size) in "
        parts = f"{copies if replicate > 1 else ''}{shard} shards (parallelism_config_dp_shard_size)"
        parts += "".join(f", {shared} {SPLITS[one]} ({name})" for one in split)
        yield (
            f"{source} asks for {num_processes} processes, but for {parts} = {product}; make the product the number of "
            "processes"
        )
    elif mode != "FSDP" and (replicate, shard) != (1, 1):
        yield (
            f"{source} sets parallelism_config_dp_replicate_size {replicate} and parallelism_config_dp_shard_size "
            f"{shard}, which have no effect without FSDP; remove them"
        )
    elif num_processes % shared:
        near = max(1, num_processes // shared) * shared
        yield (
            f"{source} starts {num_processes} process{'es' * (num_processes > 1)}, and for {name} their number is a "
            f"multiple of {shared}; use --num_processes {near}, or another multiple"
        )


def check_parts(source: str, sizes: dict[str, int], mixed_precision: str, optimizer: str) -> Iterator[str]:
    """Yields one line per setting that tensor or pipeline parallelism does not support."""
    if sizes["tp"] > 1 and "parts" not in OPTIMIZERS[optimizer].works_on:
        # Other optimizers need full matrices, or store block-wise state that would depend on the partition.
        others = name_optimizers("parts")
        yield f"--optimizer {optimizer} does not work on parts of layers; use {others}, or multi_gpu.yaml"
    if max(sizes["tp"], sizes["pp"]) > 1 and mixed_precision == "fp16":
        why = "because each rank would adjust its own loss scale"
        yield f"{source} sets fp16, which is not supported here, {why}; use --mixed_precision bf16"


def warn_across_machines(grid: ProcessGrid, num_machines: int) -> None:
    """Warns if the ranks of a group, which communicate in every layer, are on different machines."""
    on_each = grid.num_processes // num_machines
    if grid.group_size > 1 and on_each % grid.group_size:
        logger.warning(
            f"groups of {grid.group_size} processes exchange in every layer, and with {on_each} processes per machine "
            "some across two of them: training may be slow; use a size that divides the processes of a machine"
        )


def hide_from_accelerate(sizes: dict[str, int]) -> None:
    """Sets the environment so that Accelerate only shards: over all ranks of a replica, also those of a sequence.

    Accelerate's own sequence parallelism supports only DeepSpeed, and needs a GPU. Its tensor parallelism supports only
    models that transformers partitions while reading the weights, and neither DDP nor (in 1.15) FSDP2.
    """
    if sizes["dp_replicate"] == 1:  # by default, FSDP shards over all ranks
        os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
    else:
        os.environ["PARALLELISM_CONFIG_SP_SIZE"] = "1"
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = str(sizes["dp_shard"] * sizes["sp"])
