"""Opens datasets from the hub or from `save_to_disk`, and lists the files of a folder as `datasets` does."""

import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from datasets import ClassLabel, load_dataset_builder

from common.data.dataset_card import check_cards
from common.data.hub import is_saved, load_split
from common.data.source_types import FILE_TYPES, Corpus, Row, Source, file_type
from common.data.table_readers import with_class_names
from common.errors import UserError, one_line
from common.internals.datasets import content_hash
from common.reading import reading

logger = logging.getLogger(__name__)


def open_dataset(source: Source) -> Corpus:
    """Opens a split of a dataset on the hub or from `save_to_disk`; raises UserError if it cannot be read."""
    dataset = load_split(str(source.dataset_name), source.dataset_config, source.split)
    where = f"{source.dataset_name}[{source.split}]"
    classes = {column: kind.names for column, kind in dataset.features.items() if isinstance(kind, ClassLabel)}
    unused: Counter[str] = Counter()

    def rows(wanted: tuple[str, ...], whole_files: bool) -> Iterator[Row]:
        unused.update(dict.fromkeys(set(dataset.column_names) - set(wanted), 1))
        # Unused columns, such as images, are not read from disk.
        columns = dataset.select_columns([name for name in wanted if name in dataset.column_names])
        for start in range(0, len(columns), 64):
            with reading(f"{where}[{start}:{start + 64}]", "fix or replace the dataset"):
                batch = columns[start : start + 64]
            for offset, values in enumerate(zip(*batch.values(), strict=True)):
                row = dict(zip(batch, values, strict=True))
                yield with_class_names(f"{where}[{start + offset}]", row, classes)

    identity = [where, content_hash(dataset), len(dataset)]
    return Corpus(where, identity, tuple(dataset.column_names), rows, classes, unused)


def list_folder(source: Source) -> tuple[str, ...] | None:
    """Returns the files of the split in a folder, sorted; None if the dataset is not a folder of files.

    `datasets` assigns files to splits by their names (train.jsonl, data/test-*.parquet) or by the list in README.md.

    Raises UserError if there are no data files or the split does not exist.
    """
    path = Path(os.path.expanduser(str(source.dataset_name)))
    if not path.is_dir() or is_saved(path):
        return None
    check_cards(path)
    try:
        files = load_dataset_builder(str(path), source.dataset_config).config.data_files or {}
    except Exception as error:
        raise UserError(f"{path}: no data files found in this directory ({one_line(error)})") from error
    if source.split not in files:
        raise UserError(f"{path}: no split {source.split}; there are: {', '.join(map(str, files))}; name one of them")
    root = path.absolute()
    if outside := [name for name in files[source.split] if not Path(os.path.abspath(name)).is_relative_to(root)]:
        raise UserError(f"{path}: its README.md names {outside[0]}, which is outside of this directory; move the file")
    used = {Path(name).resolve() for names in files.values() for name in names}
    unused = [p for p in sorted(path.rglob("*")) if file_type(str(p))[0] in FILE_TYPES and p.resolve() not in used]
    if unused:  # `datasets` uses the most common file type of a folder and silently ignores files of other types.
        logger.warning("%s: %d files are in no split and are not read, such as %s", path, len(unused), unused[0].name)
    return tuple(sorted(files[source.split]))
