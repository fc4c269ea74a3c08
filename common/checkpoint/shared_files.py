"""Checks that all ranks see the same files and the same output directory."""

import argparse
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from common.checkpoint.agreement import Agreement
from common.errors import raise_errors
from common.parallel.liveness import wait_for_all
from common.parallel.main_decisions import decided_by_main
from common.parallel.rank_store import is_soon

SUBJECTS = {
    "model": "the model's configuration",
    "tokenizer": "the tokenizer",
    "dataset": "the training data",
    "validation": "the held-out data",
    "settings": "the settings",
    "base": "the base of the adapter",
    "reference": "the reference model",
}


def check_identity(identity: dict) -> None:
    """Raises UserError, one line per difference, if this rank's identity (files, settings) differs from rank 0's."""
    wait_for_all()  # a rank may have tokenised for hours, while the others had the result in their caches
    main = decided_by_main("identity", lambda: identity)
    own = json.loads(json.dumps(identity))
    texts = [{name: json.dumps(view.get(name), sort_keys=True) for name in main | own} for view in (main, own)]
    raise_errors(
        f"{SUBJECTS.get(name, name)}: this rank and rank 0 differ; make the same files available on all hosts"
        for name, text in texts[0].items()
        if text != texts[1][name]
    )


def share_output_dir(ranks: Agreement, args: argparse.Namespace) -> None:
    """Sets rank 0's output directory on all ranks (the default name has the time); checks that all hosts see its files.

    Raises UserError: the hosts do not share the directory.
    """
    token: Any = None
    written: Path | None = None

    def write() -> None:
        nonlocal token, written
        if not args.dry_run and int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world)) < ranks.world:
            # In an existing directory, because an error that is detected later must not leave a new directory.
            above = next(path for path in [ranks.output_dir, *ranks.output_dir.parents] if path.is_dir())
            token = tempfile.NamedTemporaryFile(dir=above, prefix=".shared-")
            written = above / Path(token.name).name

    ranks.together(write, only_main=True)
    args.output_dir, written, host = ranks.share((str(ranks.output_dir), written, socket.gethostname()))
    ranks.output_dir = Path(args.output_dir)
    if written is None:
        return
    is_seen = is_soon(written.exists)
    line = (
        f"--output_dir {ranks.output_dir}: a file that rank 0 on host {host} wrote there is not seen on host "
        f"{socket.gethostname()}; pass the absolute path of a directory that all hosts share, or "
        "with a URL set XDG_CACHE_HOME to one"
    )
    try:
        ranks.raise_first(None if is_seen else line)
    finally:
        if token is not None:
            token.close()
