"""Uploads the model of a run to the Hugging Face hub."""

import json
import sys
from contextlib import suppress
from pathlib import Path

from common.errors import UserError, one_line
from common.models.saved_model import ADAPTER_CONFIG
from common.report.records import read_run

# Fixes for errors of the hub, by HTTP status.
ADVICE = {
    401: "log in with `hf auth login`, or correct HF_TOKEN, which overrides the login",
    403: "use your own name, or a token with write access",
    404: "correct the name, or HF_ENDPOINT if that is set",
    409: "use a different name",
    429: "wait, then try again",
}


def push(output_dir: Path, name: str, is_private: bool = False) -> str:
    """Uploads model/ as a single commit, with the token of `hf auth login`, and returns the URL of the commit.

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
    adapter = model / ADAPTER_CONFIG
    if adapter.is_file() and Path(base := json.loads(adapter.read_text())["base_model_name_or_path"]).exists():
        advice = "which nobody else has; train on a base of the hub, or push the result of export --merge"
        print(f"warning: {adapter} names its base by a path, {base}, {advice}", file=sys.stderr)
    hub = HfApi()
    try:
        repo = hub.create_repo(name, private=is_private, exist_ok=True).repo_id
        return str(hub.upload_folder(repo_id=repo, folder_path=model, commit_message=f"Upload {output_dir.name}"))
    except HFValidationError as error:
        raise UserError(f"{name}: {one_line(error)}; give a name such as me/my-model") from error
    except OfflineModeIsEnabled as error:
        raise UserError(f"{name}: HF_HUB_OFFLINE is set; unset it to reach the hub") from error
    except Exception as error:  # any error of huggingface_hub, its HTTP library, or the hub
        cause = (isinstance(error, RuntimeError) and error.__cause__) or error  # errors of large files are wrapped
        raise UserError(f"{name} at {hub.endpoint}: {one_line(cause)}; {_advice(cause)}") from cause


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
