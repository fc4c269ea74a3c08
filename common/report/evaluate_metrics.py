"""Metrics of the package `evaluate` on the held-out set: hub modules or local modules."""

import argparse
import inspect
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from inspect import Parameter
from pathlib import Path
from typing import Any, NamedTuple

from common.data.hub import locate
from common.errors import UserError, raise_errors, with_location
from common.parallel.main_decisions import decided_by_main

SETTINGS = re.compile(r"(.+?):(\w+=[^,]*(?:,\w+=[^,]*)*)")  # f1:average=macro
OWNERS = ("evaluate-metric", "evaluate-measurement", "evaluate-comparison")  # hub owners of names without an owner
INPUTS = {"predictions", "references"}
DTYPES = {int: ("int", "uint", "float"), float: ("float",), str: ("string", "large_string")}
KINDS = {int: "the numbers of labels", float: "numbers", str: "texts"}
MOST_VALUES = 1000  # largest list or matrix that run.json keeps


class Request(NamedTuple):
    """One value of --metric: its text, parsed into a hub name or path, settings, and the prefix of its results."""

    text: str
    place: str
    settings: dict[str, Any]
    name: str


class Loaded(NamedTuple):
    """A loaded module, its settings for `compute`, and whether it expects a list of references per prediction."""

    module: Any
    settings: dict[str, Any]
    wraps: bool


class Metrics:
    """The modules of --metric. Only the main process loads and computes them; all ranks call each method together."""

    def __init__(self, args: argparse.Namespace, kind: type, num_labels: int):
        """Finds and loads the modules."""
        self.kind, self.num_labels, self.seed = kind, num_labels, args.seed
        self.loaded: dict[str, Loaded] = {}  # by the request's text
        requests, is_local, problems = decided_by_main("metrics", lambda: _find(args.metric))
        raise_errors(problems)
        self.requests = [Request(*fields) for fields in requests]
        hub = [request for request, is_here in zip(self.requests, is_local, strict=True) if not is_here]
        if not args.trust_remote_code:
            raise_errors(
                f"--metric {request.text}: not a .py file or directory here, and a metric of the hub is remote code; "
                "correct the path, or pass --trust_remote_code to run that code"
                for request in hub
            )
        missing = {request.text: problem for request in hub if (problem := _ask_hub(request.place))}
        raise_errors(decided_by_main("modules of metrics", lambda: [*self._load(missing)]))

    def _load(self, missing: dict[str, str]) -> Iterator[str]:
        """Loads each module; yields one line per problem.

        missing: reasons why modules cannot be downloaded, by the request's text. Offline, the cache may contain such a
        module.
        """
        from huggingface_hub import constants

        from common.internals.evaluate import configure

        try:
            import evaluate  # here because the import takes seconds
        except ImportError as error:
            yield f"--metric: the package evaluate cannot be imported ({error}); pip install evaluate"
            return
        configure(offline=constants.HF_HUB_OFFLINE)  # offline, `evaluate` then uses its cache at once
        for request in self.requests:
            if request.text in missing and not constants.HF_HUB_OFFLINE:
                yield f"--metric {request.text}: {missing[request.text]}"
                continue
            settings = dict(request.settings)
            try:
                module = evaluate.load(
                    str(Path(os.path.expanduser(request.place))),
                    config_name=settings.pop("config_name", None),
                    keep_in_memory=True,  # so that no cache file is shared with other runs
                    seed=self.seed,
                )
                raise_errors(check_settings(module, settings, self.num_labels))
                self.loaded[request.text] = Loaded(module, settings, self._takes_lists(module))
            except UserError as error:
                yield from (f"--metric {request.text}: {line}" for line in str(error).splitlines())
            except Exception as error:  # any module may raise it
                reason = f"it cannot be loaded: {with_location(error)}"
                if request.text in missing:
                    reason = f"it is not in the cache, and {missing[request.text]}"
                yield f"--metric {request.text}: {reason}"

    def _takes_lists(self, module: Any) -> bool:
        """Returns whether a module expects a list of references per prediction."""
        options = module.features if isinstance(module.features, list) else [module.features]
        if needed := sorted(set(options[0]) - INPUTS):
            raise UserError(f"it needs {', '.join(needed)}, and there are predictions and references only; remove it")
        for wraps in (False, True):
            if any(fits(option, self.kind, wraps) for option in options):
                return wraps
        forms = "; or ".join(", ".join(f"{name}: {kind}" for name, kind in option.items()) for option in options)
        raise UserError(f"it compares {forms}, and this run's predictions are {KINDS[self.kind]}; remove it")

    def compute(self, predictions: Any, references: Any) -> tuple[dict[str, Any], list[str]]:
        """Returns the results by `NAME/key`, and one printable line per metric, on all ranks.

        If a metric fails, the result `error_after_training` is a line with the reason. predictions, references: (N,), a
        list of texts or an array of numbers.
        """
        answers, targets = (
            list(values) if isinstance(values, list) else values.tolist() for values in (predictions, references)
        )

        def results_of(request: Request) -> list[Any]:
            module, settings, wraps = self.loaded[request.text]
            try:
                expected = [[target] for target in targets] if wraps else targets
                result = module.compute(predictions=answers, references=expected, **settings)
                result = result if isinstance(result, Mapping) else {"value": result}
                return [dict(flatten(result, len(targets))), None]
            except Exception as error:  # any module may raise it
                return [{}, with_location(error)]

        # The other ranks do not wait in a collective, because some metrics take longer than its time limit.
        computed = decided_by_main("values of metrics", lambda: [results_of(request) for request in self.requests])
        results: dict[str, Any] = {}
        lines, errors = [], []
        for request, (values, error) in zip(self.requests, computed, strict=True):
            if error is not None:
                errors.append(f"--metric {request.text}: {error}")
                continue
            results |= {f"{request.name}/{key}": value for key, value in values.items()}
            lines.append(f"metric     {request.name}: {', '.join(describe(*pair) for pair in values.items())}")
        if errors:
            results["error_after_training"] = f"missing    {'; '.join(errors)}; model/ and the rest are complete"
        return results, lines


def load(args: argparse.Namespace, held_out: Any, kind: type, num_labels: int) -> Metrics:
    """Loads the modules of --metric. Raises UserError: no held-out samples, or one line per unusable module.

    kind: int if the recipe predicts one of `num_labels` labels, float for numbers, str for texts.
    """
    if held_out is None:
        raise UserError("--metric needs held-out data; pass some, or remove --metric")
    return Metrics(args, kind, num_labels)


def parse(text: str) -> Request:
    """Parses NAME_OR_PATH or NAME_OR_PATH:setting=value,...; a value is JSON or plain text."""
    place, settings = match.groups() if (match := SETTINGS.fullmatch(text)) else (text, "")
    pairs = dict(pair.split("=", 1) for pair in settings.split(",") if pair)
    name = Path(place).stem if _is_local(place) else place
    return Request(text, place, {key: _from_text(value) for key, value in pairs.items()}, name + text[len(place) :])


def _from_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _is_local(place: str) -> bool:
    return place.endswith(".py") or Path(os.path.expanduser(place)).is_dir()


def _find(texts: list[str]) -> list[list[Any]]:
    """Returns [requests, whether each is a local module, one line per mistake]; called on the main process."""
    requests, problems = [parse(text) for text in dict.fromkeys(texts)], []
    is_local = [_is_local(request.place) for request in requests]
    for request, is_here in zip(requests, is_local, strict=True):
        path = Path(os.path.expanduser(request.place))
        file = path / f"{path.name}.py" if path.is_dir() else path
        if is_here and not file.is_file():
            problems.append(f"--metric {request.text}: there is no file {file}; correct the path, or rename the module")
    names = [request.name for request in requests]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"--metric: several modules are called {name}; rename all but one")
    return [requests, is_local, problems]


def _ask_hub(name: str) -> str | None:
    """Returns why the hub cannot provide the module now, or None if it can. All ranks call it together."""
    problem = None
    for full_name in [name] if "/" in name else [f"{owner}/{name}" for owner in OWNERS]:
        if (problem := locate(full_name, "space").problem) is None:
            return None
    return problem


def check_settings(module: Any, settings: dict[str, Any], num_labels: int) -> Iterator[str]:
    """Yields one line for each setting that is unknown or missing."""
    parameters = inspect.signature(module._compute).parameters.values()  # the method that authors of modules implement
    kinds = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    own = {option.name: option.default for option in parameters if option.kind in kinds and option.name not in INPUTS}
    if all(option.kind is not Parameter.VAR_KEYWORD for option in parameters):
        for name in settings.keys() - own.keys():
            yield f"it has no setting {name}; use one of: {', '.join(own) or 'none'}"
    for name in own.keys() - settings.keys():
        if own[name] is Parameter.empty:
            yield f"it needs the setting {name}; pass NAME_OR_PATH:{name}=VALUE"
        elif name == "average" and own[name] == "binary" and num_labels > 2:  # as in f1, precision, recall
            yield f"it compares two labels, and there are {num_labels}; pass NAME_OR_PATH:average=macro, or micro"


def fits(option: Mapping[str, Any], kind: type, wraps: bool) -> bool:
    """Returns whether a module's input types accept values of `kind`. wraps: with a list of references each."""
    types = [
        getattr(feature, "feature", None) if wraps and name == "references" else feature
        for name, feature in option.items()
    ]
    return all(str(getattr(feature, "dtype", "")).startswith(DTYPES[kind]) for feature in types)


def flatten(result: Mapping[str, Any], num_samples: int) -> Iterator[tuple[str, Any]]:
    """Yields a metric's result as JSON: joins nested keys by a slash, and averages lists with a number per sample."""
    for key, value in result.items():
        value = _as_json(value)
        if isinstance(value, dict):
            yield from ((f"{key}/{inner_key}", inner) for inner_key, inner in flatten(value, num_samples))
        elif isinstance(value, list) and len(value) == num_samples and all(isinstance(x, int | float) for x in value):
            yield f"{key}/mean", math.fsum(value) / num_samples
        elif (count := _count(value)) > MOST_VALUES:
            yield key, f"{count:,} values, more than are kept"
        else:
            yield key, value


def _as_json(value: Any) -> Any:
    """Converts arrays, tensors, lists and dicts to JSON types; everything else, except numbers and None, to text."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return value if value is None or isinstance(value, int | float | str) else str(value)


def _count(value: Any) -> int:
    """Returns the number of values in nested lists."""
    return sum(map(_count, value)) if isinstance(value, list) else 1


def describe(key: str, value: Any) -> str:
    """Returns a value as text for the printed results."""
    if isinstance(value, list):
        return f"{key} ({_count(value)} values, in run.json)"
    return f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}"
