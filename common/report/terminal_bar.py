"""Progress as a bar, for a terminal."""

from typing import Any

from tqdm.auto import tqdm


class TerminalBar:
    """A progress bar on stderr, with the metrics of the last update."""

    def __init__(self, num_done: int, num_updates: int):
        self.bar = tqdm(total=num_updates, initial=num_done, unit="update", smoothing=0.1)
        self.held_out = ""  # loss of the last evaluation, as text

    def update(self, _: int, num_tokens: float, unit: str, record: dict[str, Any], epoch: str = "") -> None:
        """Shows an update. For the arguments see `LogLines.update`."""
        self.bar.set_postfix_str(
            f"loss {record['loss']:.3f}, {self.held_out}{num_tokens / record['seconds']:,.0f} {unit}/s, "
            f"{record['peak_memory_bytes'] / 2**30:.2f} GiB, waiting {record['waiting_for_data']:.0%}"
            + (f", {record['skipped_updates']} skipped" if record["skipped_updates"] else ""),
            refresh=False,
        )
        if epoch:
            self.bar.set_description_str(epoch, refresh=False)
        self.bar.update()

    def close(self) -> None:
        self.bar.close()
