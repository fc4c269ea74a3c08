"""Where is a model or a data set, on the hub or in a local directory, and which splits has it?"""

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from common.errors import UserError, one_line


@cache
def hub_problem(name: str, repo_type: str) -> str | None:
    """Why `name` cannot be fetched from the hub now, or None. repo_type: "model" or "dataset".

    One request with a time limit, once in a process. The libraries' own loaders try again for 20 to 50 s before they
    say that there is no network. If the hub does not answer, this process goes offline: the loaders then look into
    their caches, at once.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().repo_info(name, repo_type=repo_type, timeout=10)
    except HFValidationError:
        return "it is neither a directory here nor a valid name of the hub; correct the path"
    except RepositoryNotFoundError:
        return "it is neither a directory here nor known to the hub (if it is private or gated, log in: hf auth login)"
    except Exception as error:  # whatever the HTTP library calls it: there is no answer
        constants.HF_HUB_OFFLINE = True
        return f"no such directory here, and the hub does not answer ({one_line(error)}); give a local directory"
    return None


def locate_pretrained(name_or_path: str) -> tuple[dict[str, Any], str | None]:
    """The first arguments of a transformers `from_pretrained`, and why there is none, or None.

    A local directory, with ~ for the user's, or a hub name: of which the cache may have it although the hub does not
    answer.
    """
    path, problem = Path(name_or_path).expanduser(), None
    if path.is_dir():
        if (path / "run.json").exists():
            problem = f"it is a run's --output_dir; give {path / 'model'}"
        elif (path / "manifest.json").exists():
            problem = f"it is a checkpoint; make a model of it: python -m common.checkpoint export {path} DIR"
        return {"pretrained_model_name_or_path": str(path)}, problem
    problem = "it is a file; give the directory of a model" if path.is_file() else hub_problem(name_or_path, "model")
    return {"pretrained_model_name_or_path": name_or_path, "local_files_only": problem is not None}, problem


def is_saved(path: Path) -> bool:
    """Whether `save_to_disk` of `datasets` wrote the directory: several splits, or one data set."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def held_out_splits(name: str, config: str | None) -> Iterator[str]:
    """The splits of a data set to measure on, the better one first: validation, then test, where they are there.

    None also where the data set cannot be found or read: opening it says what is wrong.
    """
    from datasets import get_dataset_split_names, load_from_disk

    path, splits = Path(name).expanduser(), []
    with suppress(Exception):  # of a dozen types
        if (path / "dataset_dict.json").exists():
            splits = load_from_disk(str(path))
        elif not is_saved(path) and (path.is_dir() or not hub_problem(name, "dataset")):
            splits = get_dataset_split_names(name, config)  # else there is one split, saved by itself
    yield from (split for split in ("validation", "test") if split in splits)


def load_split(name: str, config: str | None, split: str) -> Any:
    """A split of a data set of the hub, or of what `save_to_disk` wrote: one that was saved by itself is any split.

    From the hub it is downloaded once and memory-mapped by `datasets`, so that a second run needs no network.
    """
    from datasets import Dataset, load_dataset, load_from_disk

    path = Path(name).expanduser()
    is_here, saved = path.is_dir(), is_saved(path)
    problem = None if is_here else hub_problem(name, "dataset")
    try:
        if saved:
            data = load_from_disk(str(path))
        else:
            data = load_dataset(str(path) if is_here else name, config, split=split)
    except Exception as error:
        what = "what save_to_disk wrote" if saved else f"the files of the directory for split {split}"
        told = f"{what} cannot be read ({one_line(error.__cause__ or error)}); mend or replace them"
        raise UserError(f"--dataset_name {name}: {told if is_here else problem or one_line(error)}") from error
    if not isinstance(data, Dataset):
        if split not in data:
            raise UserError(f"--dataset_name {name}: no split {split}; there are: {', '.join(data)}; name one of them")
        data = data[split]
    if not len(data):
        raise UserError(f"{name}[{split}]: the data set holds no row; choose another split")
    return data
