"""Decodes each image once, and keeps its pixels in memory as far as they fit."""

import numpy as np
from torch.utils.data import get_worker_info

from common.host_memory import available_per_process

# The datasets of small images fit, whose updates are short: CIFAR-10's 50,000 images of 32 x 32 need 154 MB.
KEPT_BYTES = 256 << 20
KEPT_SHARE = 16  # at most this fraction of the available memory, because a host may have several ranks


class DecodedImages:
    """Decoded pixels of some of `count` images of the same size, added one by one.

    Memory: `count * channels * height * width` bytes, of which the system allocates those that are written; nothing is
    kept if this exceeds KEPT_BYTES per rank. The workers of a DataLoader share these bytes, because each has its own
    copy.

    Args:
        shape: channels, height, width. A gray image may be kept with one of three channels.
    """

    def __init__(self, count: int, shape: tuple[int, int, int]):
        self.count, self.shape = count, shape
        self.pixels: np.ndarray | None = None  # (count, channels, height, width), uint8; None before the first image
        self.channels = np.zeros(count, np.uint8)  # of each kept image; 0: not kept
        self.is_full = False

    def get(self, index: int) -> np.ndarray | None:
        """Returns the pixels of an image, uint8 (1 or 3, height, width), not to be changed; None if not kept."""
        channels = self.channels[index]
        return self.pixels[index, :channels] if self.pixels is not None and channels else None

    def put(self, index: int, pixels: np.ndarray) -> None:
        """Keeps the pixels of an image, uint8 (1 or 3, height, width), if all images fit and the shape is as stated."""
        if self.pixels is None and not self.is_full:
            self._allocate()
        channels, *size = pixels.shape
        if self.pixels is not None and channels <= self.shape[0] and tuple(size) == self.shape[1:]:
            self.pixels[index, :channels] = pixels
            self.channels[index] = channels

    def _allocate(self) -> None:
        worker, num_bytes = get_worker_info(), self.count * int(np.prod(self.shape))
        limit = min(KEPT_BYTES, available_per_process() // KEPT_SHARE) // (worker.num_workers if worker else 1)
        self.is_full = num_bytes > limit
        self.pixels = None if self.is_full else np.empty((self.count, *self.shape), np.uint8)
