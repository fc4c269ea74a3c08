"""Storage behind a URL, such as s3://bucket/run, through fsspec: access, errors in one line, download of data files."""

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.registry import known_implementations

from common.data.cache import cached
from common.data.mixed_files import NUMBER
from common.errors import UserError, one_line, raise_errors
from common.redaction import redact

URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
ATTEMPTS = 3  # with pauses of 1 and 2 s, in addition to the retries of the library
# They have no directories to create. s3fs would create a missing bucket.
OBJECT_STORES = "s3 s3a gs gcs abfs abfss az adl hf oci oss tos memory".split()
# Names under which the libraries list what changes with the contents of a file.
VERSIONS = "ETag etag md5Hash oid blob_id LastModified last_modified updated mtime created".split()


def is_url(text: str) -> bool:
    return URL.match(text) is not None


def find_url_problems(flag: str, url: str) -> Iterator[str]:
    """Yields a line if a URL contains credentials, or if this Python cannot read its protocol; asks no server."""
    protocol = url.partition("://")[0]
    if "@" in urlsplit(url).netloc or redact(url) != url:
        yield (
            f"{flag}: the {protocol}:// URL contains credentials, which would be in the output and the files of the "
            "run; pass them in the environment, such as AWS_ACCESS_KEY_ID, or in the files of the storage's own tools"
        )
    elif not url.partition("://")[2].strip("/"):
        yield f"{flag} {url}: the URL names no bucket; use {protocol}://BUCKET/PATH"
    elif flag == "--output_dir" and protocol in ("http", "https"):
        yield f"{flag} {url}: {protocol}:// can only be read; use a storage that can be written, such as s3://"
    elif protocol not in fsspec.available_protocols():
        yield f"{flag} {url}: {protocol}:// is not a known protocol; use s3://, gs://, hf:// or another one of fsspec"
    else:
        try:
            fsspec.get_filesystem_class(protocol)
        except ImportError:
            package = known_implementations[protocol]["class"].split(".")[0]
            yield f"{flag} {url}: {protocol}:// needs a package that cannot be imported; pip install {package}"


class Storage:
    """The files below a URL. Paths are relative to it. Methods that contact the server retry with back-off."""

    def __init__(self, url: str):
        """Raises UserError: see `find_url_problems`. Any other error is one of the library."""
        self.url, protocol = url.rstrip("/"), url.partition("://")[0]
        options = {"use_listings_cache": False} | ({"auto_mkdir": True} if protocol in ("file", "local") else {})
        self.fs, self.root = fsspec.core.url_to_fs(self.url, **options)
        self.has_directories, self.attempts = protocol not in OBJECT_STORES, ATTEMPTS

    def _retry(self, action: Callable[[], Any]) -> Any:
        return retry(action, self.attempts)

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def put(self, file: Path, name: str) -> None:
        """Uploads a local file. Raises FileNotFoundError: it does not exist any more."""

        def send() -> None:
            if self.has_directories:
                self.fs.makedirs(self.path(name).rpartition("/")[0], exist_ok=True)
            self.fs.put_file(str(file), self.path(name))

        self._retry(send)

    def get(self, name: str, file: Path) -> None:
        """Downloads a file to a local path, and creates its directory."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._retry(lambda: self.fs.get_file(self.path(name), str(file)))

    def read(self, name: str) -> bytes | None:
        """Returns the contents of a file, or None if it does not exist."""
        try:
            return self._retry(lambda: self.fs.cat_file(self.path(name)))
        except FileNotFoundError:
            return None

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Returns the sizes in bytes of all files below a folder, by their paths relative to `url`."""
        top = self.path(folder).rstrip("/")
        found: dict[str, Any] = self._retry(lambda: self.fs.find(top, detail=True))
        start = len(fsspec.core.strip_protocol(self.fs.unstrip_protocol(self.root)).rstrip("/")) + 1
        names = {path[start:]: info["size"] for path, info in found.items() if info["type"] == "file"}
        return {name: size for name, size in names.items() if is_inside(name)}

    def remove(self, names: list[str]) -> None:
        if names:
            self._retry(lambda: self.fs.rm([self.path(name) for name in names]))


def is_inside(name: str) -> bool:
    """Returns whether a relative path stays in its directory, because any name is possible in a store of objects."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def retry(action: Callable[[], Any], attempts: int = ATTEMPTS) -> Any:
    """Returns the result of an action; repeats it after errors, except those that a repetition cannot change."""
    for number in range(1, attempts + 1):
        try:
            return action()
        except (PermissionError, FileNotFoundError, IsADirectoryError, NotImplementedError, ImportError):
            raise
        except Exception:  # the type depends on the library
            if number == attempts:
                raise
            time.sleep(2 ** (number - 1))


def explain(subject: str, error: Exception) -> str:
    """Returns one line for an error of a storage library: what is wrong with `subject`, and what to do."""
    what = f"{type(error).__name__}: {one_line(error)}"
    if isinstance(error, PermissionError) or "Credentials" in type(error).__name__:
        return f"{subject}: access is denied ({what}); check the credentials, and their rights on this storage"
    if isinstance(error, FileNotFoundError):
        return f"{subject}: does not exist ({what}); create the bucket, or correct the URL"
    if isinstance(error, NotImplementedError):
        return f"{subject}: this storage lacks an operation ({what}); use a different one"
    return f"{subject}: cannot be used ({what}); check the network, the address of the storage and its credentials"


def local_files(flag: str, given: list[str]) -> list[str]:
    """Returns the values of a flag for files with a local copy of each file behind a URL; see `download`.

    Raises UserError: one line per URL that matches no file or cannot be read.
    """
    files, problems = [], []
    for word in given:
        if not is_url(word):
            files.append(word)
            continue
        url, colon, weight = word.rpartition(":")
        if not (is_url(url) and NUMBER.fullmatch(weight)):
            url, colon, weight = word, "", ""
        try:
            found = [str(path) for path in download(url)]
        except UserError:
            raise
        except Exception as error:  # the type depends on the library
            problems.append(explain(f"{flag} {url}", error))
            continue
        if not found:
            problems.append(f"{flag} {url}: no file matches; correct the URL")
        elif colon and len(found) > 1:
            problems.append(f"{flag} {word}: a weight is for one file, and {len(found)} match; list them with a weight")
        files += [f"{path}{colon}{weight}" for path in found]
    raise_errors(problems)
    return files


def download(url: str) -> list[Path]:
    """Returns local copies of the files that match a URL with wildcards, sorted by URL. They are kept in the cache.

    A file is downloaded again if its size or its version in the storage has changed. Of the processes of a host, one
    downloads, the others wait. Raises the errors of the library, and FileNotFoundError without wildcards.
    """
    storage = Storage(url)
    if fsspec.core.has_magic(url):
        found = retry(lambda: storage.fs.glob(storage.root, detail=True))
        infos = [info for _, info in sorted(found.items()) if info["type"] == "file"]
    else:
        infos = [retry(lambda: storage.fs.info(storage.root))]
    copies = []
    for info in infos:
        version = next((str(info[key]) for key in VERSIONS if info.get(key)), None)
        name, size = info["name"], info.get("size")
        address, file_name = storage.fs.unstrip_protocol(name), PurePosixPath(name).name

        def write(directory: Path, name: str = name, size: Any = size, file_name: str = file_name) -> None:
            print(f"downloading {name}{f' ({size:,} bytes)' if size else ''} to the cache ...", flush=True)
            copy = directory / file_name
            retry(lambda: storage.fs.get_file(name, str(copy)))
            if size is not None and copy.stat().st_size != size:
                raise UserError(f"{name}: {copy.stat().st_size} bytes arrived instead of {size}; start again")

        copies.append(cached("file", [address, endpoint(), size, version], write) / file_name)
    return copies


def endpoint() -> str | None:
    """Returns the address of an S3 server that is not Amazon's, because its buckets may have the same names."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
