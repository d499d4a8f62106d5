"""Download files from a URL: wait through an outage, and report at once what waiting cannot mend.

mosaicml-streaming's downloaders do the transfer: s3:// (any endpoint through S3_ENDPOINT_URL), gs://, oci://, azure://, ...
"""

import errno
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from command_line import Failure, Passing

FIRST_PATIENCE = 20.0  # seconds of trying before the first file has come: the user must soon hear of a wrong address
PATIENCE = 300.0  # seconds of trying later, in an outage of the store; less than the trainer's faults.hang_seconds
SILENCE = 20.0  # seconds without a byte after which an attempt at s3:// ends, so that patience can end in time
ODD_ANSWERS = 20.0  # seconds during which a refusal counts as part of an outage, if the store has let us in before
LONGEST_WAIT = 10.0  # seconds between two attempts
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # errors of files only, never of connections


class Remote:
    """Downloads from one URL, with patience. A Failure names the URL, which comes from the recipe, and the remedy."""

    def __init__(self, url: str, opened: bool = False) -> None:
        self.url = url.rstrip("/")
        # True once manifest and index were read, now or at an earlier start: address and credentials are right.
        self.opened = opened
        self._reached = opened
        self._idle: list[
            Any
        ] = []  # downloaders and their clients, which take long to make; each serves one file at a time

    def download(self, name: str, to: Path, begin: float | None = None) -> None:
        """Download `name` below the URL to the file `to`, whole. Raises FileNotFoundError if the store has no such object.

        `begin` (time.monotonic) is the moment when the file was first wanted: time spent in a queue counts as patience.
        """
        begin, wait = time.monotonic() if begin is None else begin, 0.5
        while True:
            try:
                with writing(to.parent):
                    to.unlink(missing_ok=True)
                    downloader = self._downloader()
                    downloader.download(f"{self.url}/{name}", str(to), timeout=60)
                if not to.exists():
                    raise _NothingArrived
                self._idle.append(downloader)  # but not after a failure, for its connections may be dead
                self._reached = True
                return
            except Failure:
                raise
            except Exception as error:
                waited = time.monotonic() - begin
                kind = refusal(error)
                if kind and (not self.opened or waited > ODD_ANSWERS):
                    self._refuse(kind, name)
                if waited > (PATIENCE if self._reached else FIRST_PATIENCE):
                    # An address that never answered is more likely wrong than out of order.
                    raise (Passing if self._reached else Failure)(
                        f"{self.url} could not be reached for {waited:.0f} s ({type(error).__name__}): "
                        "check the address (S3_ENDPOINT_URL) and the network, then run the same command to go on"
                    ) from None
            time.sleep(wait * random.uniform(0.5, 1))  # random, so that many ranks do not come back at the same moment
            wait = min(2 * wait, LONGEST_WAIT)

    def _downloader(self) -> Any:
        try:
            return self._idle.pop()
        except IndexError:
            from streaming.base.storage.download import CloudDownloader

        from data_prep.rows.s3 import client

        try:
            downloader = CloudDownloader.get(self.url)
        except ValueError:
            raise _Unsupported from None
        if self.url.startswith("s3://"):
            # streaming's client tries for three minutes where a firewall swallows packets. Ours tries once; we repeat it.
            downloader._s3_client = client(attempts=1, silence=SILENCE)
        return downloader

    def _refuse(self, kind: str, name: str) -> None:
        if kind == "missing":
            if self.url.startswith("s3://") and not _bucket_exists(self.url):
                raise Failure(f"{self.url}: there is no such bucket; check data.rows and S3_ENDPOINT_URL")
            raise FileNotFoundError(name)
        remedies = {
            "credentials": "the object store refuses these credentials; check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or what stands for them with this store, and the right to read there",
            "library": "the library for this kind of URL is not installed; `pip install 'mosaicml-streaming[all]'` brings it",
            "scheme": "this kind of URL is not supported; s3://, gs://, oci://, azure:// and hf:// are",
        }
        raise Failure(f"{self.url}: {remedies[kind]}")


class _Unsupported(Exception):
    pass


class _NothingArrived(Exception):
    """The downloader reported success and wrote nothing: streaming's downloader for gs:// swallows errors."""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an error of the file system about the cache `folder` into a Failure. All other errors pass, also those of connections."""
    try:
        yield
    except OSError as error:
        place = error.filename
        if error.errno not in FULL and not (isinstance(place, str) and Path(place).is_relative_to(folder)):
            raise
        raise Failure(
            f"the cache folder {folder} cannot be written: {os.strerror(error.errno or errno.EIO)}; make room there, "
            "lower data.cache_limit, or choose another data.cache (default: in TMPDIR)"
        ) from None


def refusal(error: BaseException) -> str | None:
    """What waiting cannot mend: "missing", "credentials", "library" or "scheme"; None for an outage. Knows every cloud's library."""
    answer = getattr(error, "response", None)
    code = str(answer.get("Error", {}).get("Code", "")) if isinstance(answer, dict) else ""
    status = code or str(
        getattr(error, "status", "") or getattr(error, "status_code", "") or getattr(error, "code", "")
    )
    name = type(error).__name__
    if (
        isinstance(error, FileNotFoundError)
        or status in ("404", "NoSuchKey", "NoSuchBucket")
        or name == "ResourceNotFoundError"
    ):
        return "missing"
    refused = (
        "401",
        "403",
        "AccessDenied",
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "InvalidToken",
    )
    without = ("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "ClientAuthenticationError")
    if status in refused or name in without:
        return "credentials"
    if isinstance(error, ImportError):
        return "library"
    return "scheme" if isinstance(error, _Unsupported) else None


def _bucket_exists(url: str) -> bool:
    """False only if the store says that the bucket does not exist."""
    from data_prep.rows.s3 import client

    try:
        client(attempts=1, silence=SILENCE).head_bucket(Bucket=url.removeprefix("s3://").partition("/")[0])
    except Exception as error:
        return refusal(error) != "missing"
    return True
