"""A run's model, uploaded to the Hugging Face hub."""

import json
from pathlib import Path

from common.errors import UserError, one_line


def push(output_dir: Path, name: str, is_private: bool = False) -> str:
    """Uploads model/, as one commit, and returns its address. The token is huggingface_hub's own: `hf auth login`.

    Raises UserError, one line: the run has not ended, or the hub refuses it, or is not there.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    model = output_dir / "model"
    if not (model / "README.md").is_file():
        path, status = output_dir / "run.json", ""
        if path.is_file():
            status = f" (status: {json.loads(path.read_text())['status']})"
        raise UserError(f"{output_dir} has no finished model/{status}; name the --output_dir of a run that has ended")
    hub = HfApi()
    try:
        repo = hub.create_repo(name, private=is_private, exist_ok=True).repo_id
        return str(hub.upload_folder(repo_id=repo, folder_path=model, commit_message=f"Upload {output_dir.name}"))
    except HFValidationError as error:
        raise UserError(f"{name}: {one_line(error)}; give a name such as me/my-model") from error
    except Exception as error:  # of the client, of what it sends with, and of what the hub answers
        raise UserError(f"{name} at {hub.endpoint}: {one_line(error)}; log in with `hf auth login`") from error
