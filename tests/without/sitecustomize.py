"""Hides the packages that WITHOUT_PACKAGES names, as on a machine without them.

Python imports this module at its start if the directory is in PYTHONPATH.
"""

import importlib.metadata
import os
from importlib.machinery import PathFinder

HIDDEN = set(os.environ["WITHOUT_PACKAGES"].split())
find_spec, from_name = PathFinder.find_spec, importlib.metadata.Distribution.from_name


def find_visible_spec(_, name, *where):
    return None if name.partition(".")[0] in HIDDEN else find_spec(name, *where)


def visible_from_name(name):
    if name in HIDDEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return from_name(name)


PathFinder.find_spec = classmethod(find_visible_spec)
importlib.metadata.Distribution.from_name = visible_from_name
