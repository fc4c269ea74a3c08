"""Uploads the model of a run to the Hugging Face hub."""

import json
import re
import sys
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError, safe_open

from common.errors import UserError, one_line, shorten
from common.models.saved_model import ADAPTER_CONFIG
from common.redaction import redact
from common.report.records import read_run

# The files of a model besides its weights: as the recipes, transformers and peft write them.
CONFIGS = "config generation_config tokenizer tokenizer_config special_tokens_map added_tokens vocab chat_template"
CONFIGS += " preprocessor_config processor_config video_preprocessor_config adapter_config"
CONFIGS += " modules sentence_bert_config config_sentence_transformers [0-9]_(?:Pooling|Normalize)/config"
NAMES = rf"(?:{'|'.join(CONFIGS.split())})\.json|(?:tokenizer|spiece|sentencepiece\.bpe)\.model|(?:vocab|merges)\.txt"
KINDS = re.compile(NAMES + r"|chat_template\.jinja|additional_chat_templates/[\w-]+\.jinja|README\.md")
# Fixes for errors of the hub, by HTTP status.
ADVICE = {
    401: "log in with `hf auth login`, or correct HF_TOKEN, which overrides the login",
    403: "use your own name, or a token with write access",
    404: "correct the name, or HF_ENDPOINT if that is set",
    409: "use a different name",
    429: "wait, then try again",
}


def push(output_dir: Path, name: str, is_private: bool = False) -> str:
    """Uploads the files of the model in model/ as a single commit, with the token of `hf auth login`.

    Prints the names of these files first, and those that are left out. Returns the URL of the commit.

    Raises UserError: the run has no finished model/, or the hub rejects the upload or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

    model = output_dir / "model"
    if not (model / "README.md").is_file():
        status = ""
        with suppress(OSError, ValueError, LookupError, TypeError):  # run.json is missing or corrupted
            status = f" (status: {read_run(output_dir)['status']})"
        raise UserError(f"{output_dir} has no finished model/{status}; name the --output_dir of a run that has ended")
    files, others = find_files(model)
    print(f"files of {model}: {', '.join(files)}")
    if others:
        print(f"left out, because they are not files of a model: {shorten(others)}", flush=True)
    adapter = model / ADAPTER_CONFIG
    if adapter.is_file() and Path(base := json.loads(adapter.read_text())["base_model_name_or_path"]).exists():
        advice = "which nobody else has; train on a base of the hub, or push the result of export --merge"
        print(f"warning: {adapter} names its base by a path, {base}, {advice}", file=sys.stderr)
    hub, message = HfApi(), redact(f"Upload {output_dir.name}")
    try:
        repo = hub.create_repo(name, private=is_private, exist_ok=True).repo_id
        commit = hub.upload_folder(repo_id=repo, folder_path=model, commit_message=message, allow_patterns=files)
        return str(commit)
    except HFValidationError as error:
        raise UserError(f"{name}: {one_line(error)}; give a name such as me/my-model") from error
    except OfflineModeIsEnabled as error:
        raise UserError(f"{name}: HF_HUB_OFFLINE is set; unset it to reach the hub") from error
    except Exception as error:  # any error of huggingface_hub, its HTTP library, or the hub
        cause = (isinstance(error, RuntimeError) and error.__cause__) or error  # errors of large files are wrapped
        raise UserError(f"{name} at {hub.endpoint}: {one_line(cause)}; {_advice(cause)}") from cause


def find_files(model: Path) -> tuple[list[str], list[str]]:
    """Returns the names of the files to upload from model/, and of the other files there.

    Raises UserError: the model is incomplete, or a link or a special file is among its files.
    """
    paths = sorted(model.rglob("*"))
    for path in (model, *paths):
        if path.is_symlink():
            raise UserError(f"{path} is a link; replace it by the file itself, or remove it")
    names = [path.relative_to(model).as_posix() for path in paths if not path.is_dir()]
    weights = _find_weights(model)
    files = [name for name in names if (KINDS.fullmatch(name) or name in weights)]
    for name in files:
        if not (model / name).is_file():
            raise UserError(f"{model / name} is not a regular file; remove it")
    return files, [name for name in names if name not in files]


def _find_weights(model: Path) -> set[str]:
    """Returns the names of the files with weights and of their index. Raises UserError: the model is incomplete."""
    fix = "export a checkpoint again, or train again"
    is_adapter = (model / ADAPTER_CONFIG).is_file()
    if not is_adapter and not (model / "config.json").is_file():
        raise UserError(f"{model} has no config.json; {fix}")
    single = f"{'adapter_' * is_adapter}model.safetensors"
    index = f"{single}.index.json"
    shards: dict[str, set[str]] = {single: set()}
    try:
        if (model / index).is_file():
            shards = {}
            for tensor, shard in json.loads((model / index).read_bytes())["weight_map"].items():
                shards.setdefault(Path(shard).name, set()).add(tensor)
        for shard, tensors in shards.items():
            if not (model / shard).is_file():
                raise UserError(f"{model} has no {shard}; {fix}")
            with safe_open(model / shard, "np") as file:
                if lacking := tensors - set(file.keys()):
                    raise UserError(f"{model / shard} has no {shorten(sorted(lacking))}; {fix}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise UserError(f"the weights in {model} are corrupted: {one_line(error)}; {fix}") from error
    return {*shards, *([index] if (model / index).is_file() else [])}


def _advice(error: BaseException) -> str:
    """Returns the fix for a failed upload."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return ADVICE.get(status, "the hub itself fails: try again later" if status >= 500 else "fix this")
    if isinstance(error, HTTPError):
        return "the hub did not answer: check the network, and HF_ENDPOINT if that is set"
    if isinstance(error, ValueError):  # a web page instead of JSON
        return "its answer is not a hub's: check HF_ENDPOINT, or a proxy in between"
    return "fix this, or try again"
