"""Functions and small dataclasses that the recipes share. Each module has a single purpose; none imports a recipe.

Recipes import this package before torch. It raises the threshold of Python's garbage collector, because repeated scans
of the many long-lived objects that the libraries create at import take half a second;
`parallel.shutdown.exit_on_user_error` restores the threshold. It also configures torch's CUDA allocator, and starts the
planner of a dry run.
"""

import gc
import os
import sys

from common import launcher as launcher  # first, because the launcher may end during the other imports
from common import versions

GC_THRESHOLD = gc.get_threshold()  # Python's default
gc.set_threshold(100_000, *GC_THRESHOLD[1:])
if problems := [*versions.broken_versions(versions.versions())]:  # before an import of such a package fails
    from common.broken_versions import exit_with

    exit_with(problems)
# Samples of many lengths fragment fixed segments, so that memory runs out early. torch reads all three names.
if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"} & os.environ.keys():
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
# Ctrl-C during the imports prints no traceback.
sys.excepthook = lambda kind, *rest: None if kind is KeyboardInterrupt else sys.__excepthook__(kind, *rest)
if "--dry_run" in sys.argv and os.environ.get("RANK", "0") == "0":
    from common.planner import start_early

    start_early()
