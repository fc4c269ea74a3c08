"""Shows each update as log lines or as a terminal bar, and records it in metrics.jsonl and trackers."""

import os
import sys
import time
from array import array
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from common.errors import UserError
from common.files import find_lost_directory, open_to_append
from common.process import this_process
from common.report.records import to_json_line
from common.report.totals import Totals
from common.report.tracking import memory_in_use_bytes, peak_memory_bytes
from common.training.batching import GlobalBatch

FEWEST_TO_DRAW = 10  # minimum number of updates for a curve


class LogLines:
    """Progress as lines of text on stderr, for a log file or a pipe.

    Prints the first and the last update. Between them, it prints a line after at least `SECONDS` seconds and 1 % of the
    run, or after `SILENCE` seconds. If the first update took `SECONDS` or more, and at least twice as long as the
    second, because it compiled for example, it also prints the second, whose estimate of the time left is better.
    """

    SECONDS, SILENCE = 10.0, 600.0

    def __init__(self, num_done: int, num_updates: int):
        self.total, self.printed, self.line = num_updates, num_done, ""
        self.num_tokens = self.seconds = self.printed_at = self.first_seconds = 0.0
        self.completed = array("d")  # times at which updates of this start were completed

    def update(self, done: int, num_tokens: float, unit: str, record: dict[str, Any], epoch: str = "") -> None:
        """Shows an update. record: its entries in metrics.jsonl. unit: unit of `num_tokens`. epoch: the epoch, as text.

        Throughput is measured since the last line. The estimate of the time left includes evaluations and saves. It is
        measured over the last half of the updates, because the first ones may compile.
        """
        now, half = time.perf_counter(), len(self.completed) // 2
        self.first_seconds = self.first_seconds or record["seconds"]
        self.num_tokens, self.seconds = self.num_tokens + num_tokens, self.seconds + record["seconds"]
        num_timed = len(self.completed) - half
        pace = (now - self.completed[half]) / num_timed if num_timed else record["seconds"]
        self.completed.append(now)
        rate = f"learning rate {record['learning_rate']:.3g}, " if "learning_rate" in record else ""
        skipped = f"{record['skipped_updates']} skipped, " if record["skipped_updates"] else ""
        self.line = (
            f"update {done:,} of {self.total:,} ({done / self.total:.1%}){epoch and f', {epoch}'}: "
            f"loss {record['loss']:.4f}, {rate}{self.num_tokens / self.seconds:,.0f} {unit}/s, "
            f"data-loading time {record['waiting_for_data']:.1%}, {skipped}"
            f"{tqdm.format_interval(pace * (self.total - done))} left"
        )
        waited = now - self.printed_at
        is_far = 100 * (done - self.printed) >= self.total or waited >= self.SILENCE
        first_was_slow = (half, num_timed) == (0, 1) and self.first_seconds >= max(self.SECONDS, 2 * record["seconds"])
        if num_timed == 0 or first_was_slow or done == self.total or (waited >= self.SECONDS and is_far):
            self.printed, self.printed_at = done, now
            self.close()

    def close(self) -> None:
        """Prints the line of the last update, unless it has been printed."""
        if self.line:
            print(self.line, file=sys.stderr, flush=True)
            self.line, self.num_tokens, self.seconds = "", 0.0, 0.0


class Progress:
    """Shows and records updates on the main process; the other ranks only measure time.

    It is the context of the loop. work: `flops.ModelFlops` on the main process; None if the FLOPs cannot be counted.
    """

    def __init__(self, accelerator: Accelerator, output_dir: Path, num_updates: int, state: Any, work: Any = None):
        self.accelerator, self.is_main, self.state = accelerator, accelerator.is_main_process, state
        self.output_dir, self.total, self.work, self.totals = output_dir, num_updates, work, Totals(state.training)
        # Line buffered, so that a killed run leaves complete lines.
        self.file = open_to_append(output_dir / "metrics.jsonl") if self.is_main else None
        self.display: Any = None
        if self.is_main and sys.stderr.isatty():
            from common.report.terminal_bar import TerminalBar

            self.display = TerminalBar(state.update, num_updates)
        elif self.is_main and not os.environ.get("TQDM_DISABLE"):
            self.display = LogLines(state.update, num_updates)
        self.memory_at_start = memory_in_use_bytes(accelerator.device)
        self.waited = self.waited_before = 0.0
        self.last, self.seconds = time.perf_counter(), 0.0  # `seconds`: training time of this start
        self.num_updates = 0  # updates of this start
        self.unit = "tokens"
        self.per_epoch: int | None = 1  # updates per epoch; None: mixed sources, each with its own epochs
        self.drawing: Any = None  # the process that draws curves.png
        self.chance: Any = None  # a `chance.ChanceCheck` for samples with labels

    def batches(self, loader: DataLoader) -> Generator[GlobalBatch, None, None]:
        """Yields the loader's global batches, and measures the time that the loop waits for each."""
        dataset: Any = loader.dataset
        self.unit = dataset.samples.unit
        self.per_epoch = len(dataset) if dataset.mixing is None else None
        parts = getattr(dataset.samples, "parts", {"": dataset.samples}).values()
        if self.chance is None and any(hasattr(part, "labels") for part in parts):
            from common.report.chance import ChanceCheck

            self.chance = ChanceCheck(dataset.samples, self.total)
        iterator = iter(loader)
        while True:
            before = time.perf_counter()
            batch = next(iterator, None)
            self.waited += time.perf_counter() - before
            if batch is None:
                return
            this_process().update = batch.update
            if "position_ids" in batch.micro_batches[0]:  # checked here, where reading them does not wait for a GPU
                from common.models.document_masks import check_unpacked

                check_unpacked(*(micro_batch["position_ids"] for micro_batch in batch.micro_batches))
            yield batch

    def update(self, batch: GlobalBatch, **record: Any) -> None:
        """Shows and records an update. record: first entries of its line in metrics.jsonl, in the order to write."""
        now = time.perf_counter()
        pauses = self.totals.take_pauses()
        seconds, self.last = now - self.last - sum(pauses.values()), now
        self.seconds += seconds
        self.num_updates += 1
        if self.file is None:  # other ranks do not record; a checkpoint has the totals of the main process
            return
        flops = self.work.of(batch) if self.work else 0.0
        self.totals.add(batch, seconds=seconds, waited=self.waited - self.waited_before, flops=flops)
        self.waited_before = self.waited
        record |= {
            "target_tokens": batch.num_targets,
            "seconds": seconds,
            **pauses,
            "tokens_per_second": batch.num_tokens / seconds,
            **(self.work.metrics(flops, seconds) if self.work else {}),
            "peak_memory_bytes": peak_memory_bytes(self.accelerator.device),
            "waiting_for_data": self.waited / max(self.seconds, 1e-9),
            "skipped_updates": self.state.skipped_updates,
            "sample_digest": batch.sample_digest,
            "world_size": self.accelerator.num_processes,
        }
        if (lost := find_lost_directory()) is not None:
            raise FileNotFoundError(lost)  # `disk_errors.explain_disk_error` explains it
        try:
            self.file.write(to_json_line(record))
        except OSError as error:
            from common.disk_errors import disk_line

            what = f"{self.file.name} could not be written after update {record['update']}"
            raise UserError(disk_line(error, what, self.output_dir, 0, "start again with --resume")) from error
        if self.accelerator.trackers:
            from common.report.trackers import log

            log(self, record, record["update"])
        if "validation_loss" in record:
            from common.report.held_out import print_evaluation

            print_evaluation(self, record)
        if self.chance and (line := self.chance.note(self.state.update, record["loss"])):
            self.print(line)
        if self.display:
            done, epoch = self.state.update, ""
            if self.per_epoch:
                epoch = f"epoch {done / self.per_epoch:.2f} of {self.total / self.per_epoch:.2f}"
            self.display.update(done, batch.num_tokens, self.unit, record, epoch)

    def print(self, line: str) -> None:
        """Prints a line, above the bar on a terminal."""
        tqdm.write(line)
        sys.stdout.flush()

    def draw(self, is_last: bool = False) -> None:
        """Starts drawing curves.png in a separate process; with `is_last`, waits for it."""
        if self.is_main and self.state.update >= FEWEST_TO_DRAW:
            from common.report import drawing

            self.drawing = drawing.draw(self.output_dir, self.unit, self.drawing, is_last)

    def results(self) -> dict[str, Any]:
        """Returns the training results: totals over all starts, but memory of this start."""
        peak = peak_memory_bytes(self.accelerator.device)
        results = {
            "updates": self.state.update,
            "unit": self.unit,
            **self.totals.metrics(),
            "skipped_updates": self.state.skipped_updates,
            "skipped_at_end": self.state.skipped_in_a_row,
            "peak_memory_bytes": peak,
            # Peak minus the memory before the loop. (On a CPU an upper bound: the peak may precede the loop.)
            "memory_growth_bytes": peak - self.memory_at_start,
        }
        if self.work and (seconds := self.totals.get("seconds")):
            results |= self.work.metrics(self.totals.get("flops"), seconds)
            if self.num_updates < self.totals.get("updates"):  # other starts may have used other devices
                results.pop("share_of_rate", None)
        if self.is_main and not self.num_updates:  # nothing was left to train
            from common.report.earlier_starts import recorded_results

            results = recorded_results(self.output_dir, results)
        return results

    def __enter__(self) -> "Progress":
        this_process().in_loop = True
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        this_process().in_loop = False
        if self.display:
            self.display.close()
        if self.file:
            with suppress(OSError):  # a full disk has already raised an error at the last line
                self.file.close()
        if kind is None:
            self.draw(is_last=True)
