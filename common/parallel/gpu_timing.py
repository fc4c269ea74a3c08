"""Times matmuls on a GPU."""

import torch

NUM_LAUNCHED = 5  # so that the GPU does not wait for the launch of the next


def mean_seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    """Returns the mean duration of a @ b in seconds, measured by events on the device of `a`, current or not."""
    stream = torch.cuda.current_stream(a.device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(stream)
    for _ in range(NUM_LAUNCHED):
        a @ b
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end) / 1000 / NUM_LAUNCHED
