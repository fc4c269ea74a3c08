"""Progress bar, or progress lines in a log, and metrics.jsonl: shows and records each update."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm.auto import tqdm

from common.errors import UserError, reported_in_one_line, with_location
from common.files import PARTIAL, disk_line, find_lost_directory, lost_line
from common.parallel import liveness
from common.report import drawing
from common.report.totals import Totals
from common.report.tracking import describe_sources, memory_in_use_bytes, peak_memory_bytes, to_json_line


def _for_trackers(record: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record. Some trackers (MLflow) reject the * in names of sources that are patterns."""
    numbers = {key: value for key, value in record.items() if isinstance(value, int | float)}
    return {re.sub(r"[^\w./ -]", "_", name): value for name, value in numbers.items()}


def _check_of_chance(samples: Any, num_updates: int) -> Any:
    """Returns a `chance.ChanceCheck`, or None for samples without labels."""
    if not any(hasattr(part, "labels") for part in getattr(samples, "parts", {"": samples}).values()):
        return None
    from common.report.chance import ChanceCheck

    return ChanceCheck(samples, num_updates)


class LogLines:
    """Progress as lines of text on stderr, for a log file or a pipe, in which a bar would be a single endless line.

    It prints the first and the last update, and between them at most one line per `SECONDS` and per 1 % of the run. In
    a long run, it prints at least one line per `SILENCE`.
    """

    SECONDS, SILENCE = 10.0, 600.0

    def __init__(self, num_done: int, num_updates: int):
        self.total, self.printed, self.line = num_updates, num_done, ""
        self.num_tokens = self.seconds = self.printed_at = self.began = 0.0
        self.first: int | None = None  # first update of this start, completed at `began`

    def update(self, done: int, num_tokens: float, unit: str, record: dict[str, Any], epoch: str = "") -> None:
        """Ends an update. record: its line of metrics.jsonl. unit: what `num_tokens` counts. epoch: as text.

        Tokens per second are measured since the last line. The time left includes evaluations and saves, as so far.
        """
        seconds = record["seconds"]
        now = time.perf_counter()
        if is_first := self.first is None:
            self.first, self.began = done, now
        self.num_tokens, self.seconds = self.num_tokens + num_tokens, self.seconds + seconds
        pace = seconds if is_first else (now - self.began) / (done - self.first)
        left = tqdm.format_interval(pace * (self.total - done))
        parts = [f"loss {record['loss']:.4f}"]
        parts += [f"learning rate {record['learning_rate']:.3g}"] if "learning_rate" in record else []
        parts += [
            f"{self.num_tokens / self.seconds:,.0f} {unit}/s",
            f"data-loading time {record['waiting_for_data']:.1%}",
        ]
        parts += [f"{record['skipped_updates']} skipped"] if record["skipped_updates"] else []
        where = [f"update {done:,} of {self.total:,} ({done / self.total:.1%})", *([epoch] if epoch else [])]
        self.line = f"{', '.join(where)}: {', '.join([*parts, left])} left"
        waited = now - self.printed_at
        is_far = 100 * (done - self.printed) >= self.total or waited >= self.SILENCE
        if is_first or done == self.total or (waited >= self.SECONDS and is_far):
            self.printed, self.printed_at = done, now
            self.print()

    def print(self) -> None:
        """Prints the last update, unless it is already printed."""
        if self.line:
            print(self.line, file=sys.stderr, flush=True)
            self.line, self.num_tokens, self.seconds = "", 0.0, 0.0


class Progress:
    """Shows and records updates on the main process; the other ranks only measure time.

    It is a context manager. `batches(...)` measures the data-loading time, `update(...)` ends an update. `work`, on the
    main process: a `common.report.flops.ModelFlops`, or None for a model whose FLOPs cannot be counted.
    """

    def __init__(self, accelerator: Accelerator, output_dir: Path, num_updates: int, state: Any, work: Any = None):
        self.accelerator, self.is_main, self.state = accelerator, accelerator.is_main_process, state
        self.output_dir, self.work, self.totals = output_dir, work, Totals(state.training)
        is_terminal = sys.stderr.isatty()
        hidden = {} if self.is_main and is_terminal else {"disable": True}  # otherwise TQDM_DISABLE decides
        self.bar = tqdm(total=num_updates, initial=state.update, unit="update", smoothing=0.1, **hidden)
        has_lines = self.is_main and not is_terminal and not os.environ.get("TQDM_DISABLE")
        self.log_lines = LogLines(state.update, num_updates) if has_lines else None
        # Line buffered, so that a killed run leaves complete lines.
        self.file = open(output_dir / "metrics.jsonl", "a", buffering=1) if self.is_main else None
        self.memory_at_start = memory_in_use_bytes(accelerator.device)
        self.waited = self.waited_before = 0.0
        self.last, self.seconds = time.perf_counter(), 0.0  # `seconds`: training time of this start
        self.num_updates = 0  # updates of this start
        self.unit = "tokens"
        self.held_out = ""
        self.per_epoch: int | None = 1  # updates per epoch; None: mixed sources, each with its own epochs
        self.drawing: subprocess.Popen | None = None
        self.chance: Any = None  # a `chance.ChanceCheck` for samples with labels

    def batches(self, loader):
        """Yields the loader's global batches, and measures the time that the loop waits for each."""
        self.unit = loader.dataset.samples.unit
        self.per_epoch = len(loader.dataset) if loader.dataset.mixing is None else None
        self.chance = self.chance or _check_of_chance(loader.dataset.samples, self.bar.total)
        iterator = iter(loader)
        while True:
            before = time.perf_counter()
            batch = next(iterator, None)
            self.waited += time.perf_counter() - before
            if batch is None:
                return
            liveness.update = batch.update
            yield batch

    def update(self, batch, **record: Any) -> None:
        """Ends an update: a line of metrics.jsonl, the bar, the trackers. `record` is printed in its order."""
        now = time.perf_counter()
        pauses = self.totals.take_pauses()
        seconds, self.last = now - self.last - sum(pauses.values()), now
        self.seconds += seconds
        tokens_per_second = batch.num_tokens / seconds
        self.num_updates += 1
        if not self.is_main:  # the totals in a checkpoint are those of the main process
            return
        flops = self.work.of(batch) if self.work else 0.0
        self.totals.add(batch, seconds=seconds, waited=self.waited - self.waited_before, flops=flops)
        self.waited_before = self.waited
        record |= {
            "target_tokens": batch.num_targets,
            "seconds": seconds,
            **pauses,
            "tokens_per_second": tokens_per_second,
            **(self.work.figures(flops, seconds) if self.work else {}),
            "peak_memory_bytes": peak_memory_bytes(self.accelerator.device),
            "waiting_for_data": self.waiting_share,
            "skipped_updates": self.state.skipped_updates,
            "sample_digest": batch.sample_digest,
        }
        if (lost := find_lost_directory()) is not None:
            raise UserError(lost_line(lost))
        try:
            self.file.write(to_json_line(record))
        except OSError as error:
            what, where = f"{self.file.name} could not be written after update {record['update']}", Path(self.file.name)
            raise UserError(disk_line(error, what, where.parent, 0, "start again with --resume")) from error
        self._log(_for_trackers(record), record["update"])
        if "validation_loss" in record:
            self._tell_evaluation(record)
            self.draw()
        if self.chance and (line := self.chance.note(self.state.update, record["loss"])):
            self.bar.write(line)
            sys.stdout.flush()
        self._show(batch, record)

    def _show(self, batch: Any, record: dict[str, Any]) -> None:
        """Shows the update on the bar, or as a line in a log."""
        epoch = ""
        if self.per_epoch:
            done, in_all = (number / self.per_epoch for number in (self.state.update, self.bar.total))
            epoch = f"epoch {done:.2f} of {in_all:.2f}"
        if self.log_lines is not None:
            self.log_lines.update(self.state.update, batch.num_tokens, self.unit, record, epoch)
            return
        self.bar.set_postfix_str(
            f"loss {record['loss']:.3f}, {self.held_out}{record['tokens_per_second']:,.0f} {self.unit}/s, "
            f"{record['peak_memory_bytes'] / 2**30:.2f} GiB, waiting {self.waiting_share:.0%}"
            + (f", {self.state.skipped_updates} skipped" if self.state.skipped_updates else ""),
            refresh=False,
        )
        if epoch:
            self.bar.set_description_str(epoch, refresh=False)
        self.bar.update()

    def _log(self, figures: dict[str, Any], update: int) -> None:
        """Sends metrics to the trackers of --report_to; a tracker that fails is removed."""
        for tracker in self.accelerator.trackers[:]:
            try:
                tracker.log(figures, step=update)
            except Exception as error:  # any tracker may raise it
                self.accelerator.trackers.remove(tracker)
                self.bar.write(f"--report_to {tracker.name}: stopped at update {update}: {with_location(error)}")

    def add_evaluation(self, figures: dict[str, float]) -> None:
        """Adds the metrics of an evaluation to the line of the last update, which a stop left without them."""
        if not self.is_main:
            return
        path = self.output_dir / "metrics.jsonl"
        *lines, last = path.read_text().splitlines(keepends=True) or [""]
        record = json.loads(last) if last else {}
        if record.get("update") != self.state.update - 1:
            return  # its line was corrupted and lost
        own = list(record)
        at = own.index("target_tokens")
        record = {name: record[name] for name in own[:at]} | figures | {name: record[name] for name in own[at:]}
        unfinished = path.with_name(path.name + PARTIAL)
        unfinished.write_text("".join([*lines, to_json_line(record)]))
        os.replace(unfinished, path)
        self.file.close()
        self.file = open(path, "a", buffering=1)
        self._log(_for_trackers(figures), record["update"])
        self._tell_evaluation(record)
        self.draw()

    def draw(self, now: bool = False) -> None:
        """Starts drawing curves.png in parallel to the training, or draws it `now`."""
        is_free = self.drawing is None or now or self.drawing.poll() is not None
        if self.is_main and is_free and self.state.update >= drawing.FEWEST:
            with reported_in_one_line("curves.png could not be drawn"):
                if self.drawing is not None:
                    self.drawing.communicate()
                self.drawing = drawing.start_drawing(self.output_dir, self.unit)
                if now:
                    drawing.finish(self.drawing)

    def end_early(self, patience: int) -> None:
        """Reports that the updates end here, because `patience` evaluations did not improve on the best."""
        best = self.state.best_validation_loss
        lower = "a finite validation loss" if best is None else f"a lower validation loss than {best:.4f}"
        if self.is_main:  # because a hidden bar prints nevertheless
            self.bar.write(
                f"update {self.state.update}: {patience} evaluation{'s' * (patience > 1)} in a row without {lower}: "
                "the training ends here (--patience)"
            )
            sys.stdout.flush()

    def _tell_evaluation(self, record: dict[str, Any]) -> None:
        """Prints a line above the bar; afterwards the bar also shows the held-out loss."""
        loss = record["validation_loss"]
        self.held_out = f"held out {loss:.3f}, "
        line = f"update {self.state.update}: validation loss {loss:.4f}"
        line += f", accuracy {record['accuracy']:.2%}" if "accuracy" in record else ""
        self.bar.write(line + describe_sources(record) + (", the lowest so far" if self.state.is_best else ""))
        sys.stdout.flush()

    @property
    def waiting_share(self) -> float:
        """Returns the fraction of the training time so far in which the loop waited for data."""
        return self.waited / max(self.seconds, 1e-9)

    def results(self) -> dict[str, Any]:
        """Returns the training totals over all starts, for the summary; memory is that of this start."""
        results = {
            "updates": self.state.update,
            "unit": self.unit,
            **self.totals.figures(),
            "skipped_updates": self.state.skipped_updates,
            "skipped_at_end": self.state.skipped_in_a_row,
            "peak_memory_bytes": peak_memory_bytes(self.accelerator.device),
            # Growth over the loaded model. (On a CPU an upper bound, because earlier peaks count too.)
            "memory_growth_bytes": peak_memory_bytes(self.accelerator.device) - self.memory_at_start,
        }
        if self.work and (seconds := self.totals.get("seconds")):
            results |= self.work.figures(self.totals.get("flops"), seconds)
            if self.num_updates < self.totals.get("updates"):  # other starts may have used other devices
                results.pop("share_of_rate", None)
        if self.is_main and not self.num_updates:  # nothing was left to train: keep the recorded results
            before = json.loads((self.output_dir / "run.json").read_text()).get("results", {})
            results |= {name: before[name] for name in results if name in before}
        return results

    def __enter__(self) -> "Progress":
        liveness.in_loop = True
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        liveness.in_loop = False
        self.bar.close()
        if self.log_lines is not None:
            self.log_lines.print()
        if self.file:
            with suppress(OSError):  # a full disk has already raised an error at the last line
                self.file.close()
        if kind is None:
            self.draw(now=True)
