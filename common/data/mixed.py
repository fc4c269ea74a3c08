"""Combines files with weights into a single dataset, such as `--train_file code.jsonl:0.7 books.txt:0.3`.

    source = training_files(["code.jsonl:0.7", "books.txt:0.3"])
    samples = Mixed({part.files[0]: tokenize(part, ...) for part in source.parts}, source.weights)

Each file is read separately. Files without weights are concatenated, like a single file.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from common.training.batching import Samples
from common.training.data_mixing import Mixing, reduce_weights


class Mixed:
    """Implements `batching.Samples` for several sources; sample ids number one source after the other.

    No sample contains text of two sources.

    Args:
        parts: the samples of each source, by its name.
        weights: mixing weights, integers in lowest terms; empty for held-out data, which is evaluated per source.
    """

    def __init__(self, parts: dict[str, Samples], weights: tuple[int, ...] = ()) -> None:
        self.parts = parts
        self.sizes = tuple(map(len, parts.values()))
        self.mixing = Mixing(weights, self.sizes) if weights else None
        self._all, self._ends = list(parts.values()), np.cumsum(self.sizes)
        self.unit = self._all[0].unit
        self.num_target_tokens = sum(part.num_target_tokens for part in self._all)
        self.max_length = max(part.max_length for part in self._all)
        digest = hashlib.blake2b("/".join(part.fingerprint for part in self._all).encode(), digest_size=10)
        # A resumed run compares the part after the @ separately, to report that the weights differ, not the data.
        self.fingerprint = digest.hexdigest() + (f"@{':'.join(map(str, weights))}" if weights else "")
        # Some kinds of samples lack these: bytes of text, compressed bytes, and end tokens.
        self.num_bytes, self.gzip_bytes, self.xz_bytes = map(self._sum, ("num_bytes", "gzip_bytes", "xz_bytes"))
        ends = (token for part in self._all for token in getattr(part, "end_tokens", ()))
        self.end_tokens = list(dict.fromkeys(ends))

    def _sum(self, name: str) -> int | None:
        numbers = [getattr(part, name, None) for part in self._all]
        known = [number for number in numbers if number is not None]
        return sum(known) if len(known) == len(numbers) else None

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        source = int(np.searchsorted(self._ends, index, side="right"))
        return self._all[source][int(index - self._ends[source] + self.sizes[source])]

    def dummy_sample(self) -> Any:
        """Returns the dummy sample of the first source."""
        return self._all[0].dummy_sample()

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Returns the length of each sample, int64; shape (n, 2) if a sample has two sequences."""
        return self._of_each("lengths", ids)

    def num_targets(self, ids: np.ndarray) -> np.ndarray:
        """Returns the number of targets of each sample, int64."""
        return self._of_each("num_targets", ids)

    def _of_each(self, name: str, ids: np.ndarray) -> np.ndarray:
        ids = np.asarray(ids, np.int64)
        sources, nothing = np.searchsorted(self._ends, ids, side="right"), getattr(self._all[0], name)(ids[:0])
        values = np.empty((len(ids), *nothing.shape[1:]), np.int64)
        for source, part in enumerate(self._all):
            own = sources == source
            values[own] = getattr(part, name)(ids[own] - self._ends[source] + self.sizes[source])
        return values

    @property
    def mean_targets(self) -> float:
        """The mean number of targets per sample, weighted by the mixing weights (if any)."""
        means = [part.num_target_tokens / len(part) for part in self._all]
        return float(np.average(means, weights=self.mixing.weights if self.mixing else None))

    def shares(self) -> list[Fraction]:
        """Returns the share of each source: of the samples with mixing weights, otherwise of all targets."""
        sizes = self.mixing.weights if self.mixing else [part.num_target_tokens for part in self._all]
        return [Fraction(size, sum(sizes)) for size in sizes]

    def describe_length(self, num_updates: int, global_batch_size: int) -> tuple[str, float]:
        """Returns the epochs of each source in a run as text, and the average number of targets per update."""
        sources = self.facts(num_updates * global_batch_size)
        epochs = ", ".join(f"{source['epochs']:.2f} of {source['source']}" for source in sources)
        return f"{num_updates:,}, epochs: {epochs}", self.mean_targets * global_batch_size

    def facts(
        self, num_samples: int = 0, earlier: Sequence[tuple[int, list[dict[str, Any]]]] = ()
    ) -> list[dict[str, Any]]:
        """Returns the entries for run.json: each source, and the number of its samples in a run of `num_samples`.

        Args:
            earlier: for a run that resumes with different weights, its earlier parts: (position in the run's samples
                at the end of the part, entries of the part).
        """
        facts: list[dict[str, Any]] = [
            {"source": name, "share": str(share), "samples": size, "first_id": int(end) - size}
            for name, share, size, end in zip(self.parts, self.shares(), self.sizes, self._ends, strict=True)
        ]
        if self.mixing is None:
            return facts
        taken: Counter[str] = Counter()
        start = 0
        for end, sources in (*earlier, (num_samples, facts)):
            if sources:  # empty if the data of this part was not mixed
                mixing = Mixing(reduce_weights([Fraction(entry["share"]) for entry in sources]), ())
                for entry, before, after in zip(sources, mixing.counts(start), mixing.counts(end), strict=True):
                    taken[entry["source"]] += after - before
            start = end
        numbers = [taken[entry["source"]] for entry in facts]
        return [entry | {"taken": n, "epochs": n / entry["samples"]} for entry, n in zip(facts, numbers, strict=True)]

    def describe(self) -> str:
        """Returns one or more lines per source."""
        shares = (
            f"{share} of the samples" if self.mixing else f"{float(share):.1%} of the targets"
            for share in self.shares()
        )
        lines = (f"{share}: {part.describe()}" for share, part in zip(shares, self._all, strict=True))
        return f"\n{'':12}".join(lines)
