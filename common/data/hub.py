"""Locates a model or dataset on the hub or in a local directory, and lists the splits of a dataset."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from common.errors import UserError, one_line
from common.internals.huggingface_hub import is_offline, set_offline
from common.parallel.main_decisions import decided_by_main
from common.parallel.rank_store import is_soon


class Place(NamedTuple):
    """The location of a model or dataset, determined by rank 0 for all ranks."""

    is_here: bool  # whether the name is a local directory
    problem: str | None  # the reason why the model or dataset cannot be downloaded or used now; None: it can
    revision: str | None  # commit on the hub, or in the local cache, that all ranks load


@cache
def locate(name: str, repo_type: str) -> Place:
    """Locates a model or dataset; rank 0 looks it up locally and on the hub, and all ranks use the result.

    The result is cached per process. If the hub does not answer, all processes go offline, so that the loaders use
    their caches immediately.

    Args:
        repo_type: "model" or "dataset".

    Raises UserError if a directory exists on this rank but not on rank 0, or the other way round.
    """
    path = Path(os.path.expanduser(name))

    def find() -> list[Any]:
        if path.is_dir() or (repo_type == "model" and path.is_file()):
            return [path.is_dir(), _local_problem(path, repo_type), None, is_offline()]
        return [False, *_ask_hub(name, repo_type), is_offline()]

    *fields, offline = decided_by_main(f"{repo_type} {name}", find)
    set_offline(offline)
    place = Place(*fields)
    if not is_soon(lambda: path.is_dir() == place.is_here):
        seen, other = ("a directory", "none") if place.is_here else ("no directory", "one")
        raise UserError(f"{name}: rank 0 sees {seen} of this name, and here is {other}; give one that all hosts have")
    return place


def _local_problem(path: Path, repo_type: str) -> str | None:
    """Returns the reason why a local path cannot be used, or None; the contents of a dataset are checked elsewhere."""
    if path.is_file():
        return "it is a file; give the directory of a model"
    if repo_type == "model" and (path / "run.json").exists():
        return f"it is a run's --output_dir; give {path / 'model'}"
    if repo_type == "model" and (path / "manifest.json").exists():
        return f"it is a checkpoint; make a model of it: python -m tools.checkpoint export {path} DIR"
    return None


def _ask_hub(name: str, repo_type: str) -> tuple[str | None, str | None]:
    """Returns (problem, commit): why the name cannot be downloaded now, or None; the commit to load, or None.

    If the hub does not answer, the commit is from the cache. The request has a time limit and no retries: the
    libraries' own loaders retry for 20 to 50 s before they report a missing network.
    """
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        commit = HfApi().repo_info(name, repo_type=repo_type, timeout=10).sha
    except HFValidationError:
        return "it is neither a directory here nor a valid name of the hub; correct the path", None
    except RepositoryNotFoundError:
        why = "it is neither a directory here nor known to the hub (if it is private or gated, log in: hf auth login)"
        return why, None
    except Exception as error:  # the HTTP library raises many types; all mean that there is no answer
        set_offline(True)
        config = try_to_load_from_cache(name, "config.json", repo_type=repo_type)
        why = f"no such directory here, and the hub does not answer ({one_line(error)}); give a local directory"
        return why, Path(config).parent.name if isinstance(config, str) else None
    if repo_type == "model":
        with suppress(Exception):  # config.json may be missing; its download saves the commit for runs without network
            commit = Path(hf_hub_download(name, "config.json")).parent.name
    return None, commit


def locate_pretrained(name_or_path: str) -> tuple[dict[str, Any], str | None]:
    """Returns the arguments of transformers' `from_pretrained` that locate a model, and the problem with it or None.

    The name is a local directory (~ is expanded) or a name on the hub. With a problem, a model can still be loaded if
    it is in the cache.
    """
    place = locate(name_or_path, "model")
    if place.is_here:
        return {"pretrained_model_name_or_path": str(Path(os.path.expanduser(name_or_path)))}, place.problem
    where = {"pretrained_model_name_or_path": name_or_path, "local_files_only": place.problem is not None}
    return where | ({"revision": place.revision} if place.revision else {}), place.problem


def weight_files(directory: Path) -> list[Path]:
    """Returns the weight files of a transformers model."""
    return sorted(path for kind in ("*.safetensors", "*.bin") for path in directory.glob(kind))


@cache
def fingerprint(directory: Path) -> str:
    """Returns the XXH3 digest of the weight files of a transformers model; each process reads them once."""
    whole = xxhash.xxh3_64()
    for path in weight_files(directory):
        with open(path, "rb") as file:
            while piece := file.read(1 << 24):
                whole.update(piece)
    return whole.hexdigest()


def identify_pretrained(name_or_path: str) -> str:
    """Returns the identity of a pretrained model: a hash of its directory's weights, or its hub name and commit.

    Only rank 0 reads the weights, because the files can be large and the disks of other hosts slow.

    Raises UserError if the weight files of this host differ from those of rank 0 in name or size.
    """
    place, path = locate(name_or_path, "model"), Path(os.path.expanduser(name_or_path))
    if not place.is_here:
        return f"{name_or_path}@{place.revision}"

    def sizes() -> list[Any]:
        return [[file.name, file.stat().st_size] for file in weight_files(path)]

    known_by, expected = decided_by_main(f"weights of {path}", lambda: [fingerprint(path), sizes()])
    if not is_soon(lambda: sizes() == expected):
        raise UserError(f"{path}: its weights here are not those that rank 0 sees; give all hosts the same files")
    return known_by


def is_saved(path: Path) -> bool:
    """Returns whether `save_to_disk` of `datasets` wrote the directory, with several splits or a single dataset."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def held_out_splits(name: str, config: str | None) -> Iterator[str]:
    """Yields the available splits for evaluation, the preferred split first: validation, then test.

    It yields no split if the dataset cannot be found or read; opening the dataset reports the problem.
    Raises UserError, of `check_cards`.
    """
    from datasets import get_dataset_split_names, load_from_disk

    place, path = locate(name, "dataset"), Path(os.path.expanduser(name))
    if place.is_here:
        from common.data.dataset_card import check_cards

        check_cards(path)

    def splits() -> list[str]:
        with suppress(Exception):  # the libraries raise a dozen types
            if (path / "dataset_dict.json").exists():
                return list(load_from_disk(str(path)))
            if not is_saved(path) and (place.is_here or not place.problem):
                return list(get_dataset_split_names(name, config, revision=place.revision))
        return []  # also for a dataset that was saved without splits

    available = decided_by_main(f"splits of {name}", splits)
    yield from (split for split in ("validation", "test") if split in available)


def load_split(name: str, config: str | None, split: str) -> Any:
    """Returns a split of a dataset on the hub, or of a dataset written by `save_to_disk`.

    A dataset that was saved without splits is returned for any `split`. Data from the hub is downloaded once and
    memory-mapped by `datasets`, so that a second run needs no network.

    Raises UserError if the dataset or the split cannot be read, or has no rows.
    """
    from datasets import Dataset, disable_progress_bars, load_dataset, load_from_disk

    if not sys.stderr.isatty():  # in a log, each bar would be a single long line
        disable_progress_bars()
    path, (is_here, problem, revision) = Path(os.path.expanduser(name)), locate(name, "dataset")
    saved = is_saved(path)
    if is_here:
        from common.data.dataset_card import check_cards

        check_cards(path)
    try:
        if saved:
            data = load_from_disk(str(path))
        else:
            data = load_dataset(str(path) if is_here else name, config, split=split, revision=revision)
    except Exception as error:
        what = "what save_to_disk wrote" if saved else f"the files of the directory for split {split}"
        reason = f"{what} cannot be read ({one_line(error.__cause__ or error)}); fix or replace them"
        raise UserError(f"--dataset_name {name}: {reason if is_here else problem or one_line(error)}") from error
    if not isinstance(data, Dataset):
        if split not in data:
            raise UserError(f"--dataset_name {name}: no split {split}; there are: {', '.join(data)}; name one of them")
        data = data[split]
    if not len(data):
        raise UserError(f"{name}[{split}]: the data set holds no row; choose another split")
    return data
