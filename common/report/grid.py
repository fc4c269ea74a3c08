"""Lines of the run summary for processes that share samples: tensor, sequence and pipeline parallelism."""

from common.errors import UserError
from common.training.process_grid import ProcessGrid


def describe_grid(grid: ProcessGrid, num_micro_batches: int, micro_batch_tokens: int | None) -> dict[str, str]:
    """Returns the summary lines by label: the ranks of each group, and in a pipeline the bubble.

    Raises UserError: fewer micro-batches than stages. (With --micro_batch_size, `check_arguments` has checked this.)
    """
    if num_micro_batches < grid.pipeline:
        raise UserError(
            f"--micro_batch_tokens {micro_batch_tokens} makes {num_micro_batches} of a global batch, fewer "
            f"than the {grid.pipeline} stages, which would wait for each other; lower it"
        )
    stages = grid.pipeline
    size = grid.stage_size if stages > 1 else grid.group_size
    groups = [range(start, start + size) for start in range(0, grid.num_processes, size)]
    ranks = " | ".join([" ".join(map(str, group)) for group in groups[:4]] + ["..."] * (len(groups) > 4))
    if stages > 1:
        share = (stages - 1) / (num_micro_batches + stages - 1)
        bubble = f"({stages} stages - 1) / ({num_micro_batches} micro-batches + {stages} - 1)"
        return {
            "ranks": f"{ranks}: the stages of the pipeline, each with its part of the layers",
            "bubble": f"{share:.1%} of the time: {bubble}",
        }
    of_tokens = f"1 / {grid.group_size} of its tokens"
    part = "all of its tokens, with a part of each layer" if grid.tensor > 1 else of_tokens
    return {"ranks": f"{ranks}: a group shares each sample, a rank has {part}"}
