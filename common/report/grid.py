"""Lines of the run summary for processes that share samples: tensor, sequence and pipeline parallelism."""

from common.errors import UserError
from common.training.process_grid import Degrees


def describe_grid(degrees: Degrees, num_micro_batches: int, micro_batch_tokens: int | None) -> dict[str, str]:
    """Returns the ranks of each group, and the bubble of a pipeline, by label.

    Raises UserError: fewer micro-batches than stages. (With --micro_batch_size, this is rejected earlier.)
    """
    if num_micro_batches < degrees.pipeline:
        raise UserError(
            f"--micro_batch_tokens {micro_batch_tokens} makes {num_micro_batches} of a global batch, fewer "
            f"than the {degrees.pipeline} stages, which would wait for each other; lower it"
        )
    lines = {"ranks": degrees.describe_grid()}
    return lines | ({"bubble": degrees.describe_bubble(num_micro_batches)} if degrees.pipeline > 1 else {})
