"""Where steps lie: in a local directory, or at a URL that Orbax reaches."""

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any
from urllib import parse

from jaxmp._src.base import optional

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//?)(.*)", re.DOTALL)
REMOTE = ("gs",)  # where Orbax writes arrays, apart from local files
_COMMITTED = "commit_success.txt"  # Orbax writes it last; on remote storage, which renames nothing, it is the only sign


def folder(given: str | os.PathLike[str]) -> Any:
    """The path of a folder, local or remote; relative local paths start at the working directory.

    Raises:
      ValueError: a URL that Orbax does not reach; names its scheme.
    """
    text = os.fspath(given)
    found = _URL.fullmatch(text)
    if found is None:
        return pathlib.Path(text).absolute()
    scheme, slashes, rest = found[1].lower(), found[2], found[3]
    if len(slashes) == 1:
        raise ValueError(
            f"a URL must be passed as text: pathlib.Path takes one of its slashes away; got {text!r}. Pass "
            f"{f'{scheme}://{rest}'!r}, or {f'./{text}'!r} for a local folder of this name."
        )
    if scheme == "file":
        host, _, below = rest.partition("/")
        if host not in ("", "localhost"):
            raise ValueError(
                f"a file:// URL must name a file of this host, as file:///data/run does; got {text!r}. Pass a local "
                f"path, or file:// and three slashes."
            )
        return pathlib.Path("/" + parse.unquote(below))
    if scheme not in REMOTE:
        raise ValueError(
            f"checkpoints lie in local folders, or at {', '.join(f'{x}://' for x in REMOTE)}, where Orbax writes "
            f"arrays; got {text!r}, whose scheme {scheme}:// it does not reach. Mount the storage, and pass the local "
            f"path, or save locally and copy the steps."
        )
    return optional.load("etils.epath", extra="checkpoint").Path(f"{scheme}://{rest}")


@contextlib.contextmanager
def explained(path: Any) -> Iterator[None]:
    """Makes one error of what goes wrong inside at remote storage: a package is missing, no permission, no network."""
    try:
        yield
    except Exception as e:
        if is_local(path):
            raise
        scheme = os.fspath(path).partition(":")[0]
        raise ValueError(
            f"remote storage must be reached before a run starts; {scheme}:// cannot be: {type(e).__name__}: {e}. "
            f"Install what Orbax needs for it (gcsfs and google-cloud-storage for gs://), and check the bucket and its "
            f"permissions: {os.fspath(path)}."
        ) from e


def is_local(path: Any) -> bool:
    """Whether a path is one of local files."""
    return "://" not in os.fspath(path)


def steps_in(path: Any) -> list[Any]:
    """The folders of the complete steps in a directory, in their order."""
    found = path.iterdir() if path.is_dir() else ()
    complete = (x for x in found if x.name.isdigit() and x.is_dir() and (is_local(x) or (x / _COMMITTED).exists()))
    return sorted(complete, key=lambda x: int(x.name))
