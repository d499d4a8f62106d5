"""s3:// for fsspec through boto3, which mosaicml-streaming needs anyway.

Why not s3fs (as of 2026-12-07): its newest version, 2026.9.0, needs aiobotocore, whose newest version, 3.10.0, allows botocore
1.43.115 to 1.43.117 only. boto3 1.44.18, which is installed here, needs botocore 1.44.18 or later. So s3fs would hold boto3
back at each release. Besides, s3fs 2026.9.0 needs fsspec 2026.9.0 where datasets 5.0.1 allows 2026.6.0 at most.
This file holds the little that we need of s3fs.

The endpoint, keys and region come from the variables that streaming reads (S3_ENDPOINT_URL, AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION) or from boto3's own configuration files. None of them is ever shown or stored.
"""

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

DELETE_AT_ONCE = 1000  # objects that one request may name


def connected() -> "S3FileSystem":
    """The connection that this process shares as long as the settings stay the same, for making one costs 0.3 s."""
    return _connected(tuple(sorted(item for item in os.environ.items() if item[0].startswith(("AWS_", "S3_")))))


@lru_cache(maxsize=1)
def _connected(settings: tuple[tuple[str, str], ...]) -> "S3FileSystem":
    return S3FileSystem()


def client(attempts: int, silence: float) -> Any:
    """boto3's client. It makes `attempts` at each request, and ends one after 10 s without a connection or `silence` s without a byte."""
    import boto3
    from botocore.config import Config

    retries = {"mode": "standard", "total_max_attempts": attempts}
    config = Config(retries=retries, connect_timeout=10, read_timeout=silence)
    # A new session, for the default one keeps the credentials it saw first.
    return boto3.session.Session().client("s3", endpoint_url=os.environ.get("S3_ENDPOINT_URL") or None, config=config)


class S3FileSystem(AbstractFileSystem):
    """Lists objects, reads ranges of them, writes and deletes whole ones. Paths are `bucket/key`. Raises OSError."""

    protocol = "s3"
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(use_listings_cache=False, **options)
        self.client = client(attempts=6, silence=60)

    def _pages(self, path: str, delimiter: str) -> Iterator[dict[str, Any]]:
        bucket, _, prefix = path.partition("/")
        with _plain_errors():
            pages = self.client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=bucket, Prefix=prefix, Delimiter=delimiter):
                for entry in page.get("Contents", []):
                    if entry["Key"] != prefix or not prefix.endswith(
                        "/"
                    ):  # not the empty object that stands for a folder
                        yield _file(f"{bucket}/{entry['Key']}", entry)
                for entry in page.get("CommonPrefixes", []):
                    yield {"name": f"{bucket}/{entry['Prefix'].rstrip('/')}", "size": 0, "type": "directory"}

    def ls(self, path: str, detail: bool = True, **ignored: Any) -> list[Any]:
        path = self._strip_protocol(path)
        found = list(self._pages(f"{path}/", "/"))
        found = found or [entry for entry in self._pages(path, "/") if entry["name"] == path]
        if not found:
            raise FileNotFoundError(errno.ENOENT, "no such object or folder")
        return found if detail else [entry["name"] for entry in found]

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **ignored: Any
    ) -> Any:
        path = self._strip_protocol(path)
        found = {entry["name"]: entry for entry in self._pages(f"{path}/" if path else "", "")}
        return found if detail else sorted(found)

    def info(self, path: str, **ignored: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        bucket, _, key = path.partition("/")
        try:
            if key:
                with _plain_errors():
                    return _file(path, self.client.head_object(Bucket=bucket, Key=key))
        except FileNotFoundError:
            pass
        if next(self._pages(f"{path}/", "/"), None) is None:
            raise FileNotFoundError(errno.ENOENT, "no such object or folder")
        return {"name": path, "size": 0, "type": "directory"}

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        if mode != "rb":
            raise io.UnsupportedOperation("objects are written whole, with pipe_file")
        return _S3File(self, path, mode, block_size or 1 << 22, cache_type="readahead", **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **ignored: Any) -> bytes:
        bucket, _, key = self._strip_protocol(path).partition("/")
        span: dict[str, str] = {}
        if start is not None or end is not None:
            span["Range"] = f"bytes={start or 0}-{'' if end is None else end - 1}"
        with _plain_errors():
            return bytes(self.client.get_object(Bucket=bucket, Key=key, **span)["Body"].read())

    def pipe_file(self, path: str, value: bytes, **ignored: Any) -> None:
        """Write an object, which appears whole or not at all."""
        bucket, _, key = self._strip_protocol(path).partition("/")
        with _plain_errors():
            self.client.put_object(Bucket=bucket, Key=key, Body=value)

    def rm_file(self, path: str) -> None:
        self.rm(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        paths = [path] if isinstance(path, str) else list(path)
        names = [self._strip_protocol(p) for p in paths]
        if recursive:
            names = [name for path in names for name in self.find(path)]
        for at in range(0, len(names), DELETE_AT_ONCE):
            keys = [name.partition("/") for name in names[at : at + DELETE_AT_ONCE]]
            objects = [{"Key": parts[2]} for parts in keys]
            with _plain_errors():
                self.client.delete_objects(Bucket=keys[0][0], Delete={"Objects": objects})


class _S3File(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.path, start, end))


def _file(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    size = entry.get("Size", entry.get("ContentLength", 0))
    return {"name": name, "size": size, "type": "file", "ETag": entry.get("ETag", "")}


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn boto3's errors into OSError with messages of our own, for boto3's messages quote keys and addresses."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    try:
        yield
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in ("404", "NoSuchKey", "NotFound"):
            raise FileNotFoundError(errno.ENOENT, "no such object") from None
        if code == "NoSuchBucket":
            raise OSError(errno.ENXIO, "no such bucket") from None
        if code in ("403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"):
            raise PermissionError(errno.EACCES, "the object store refuses these credentials") from None
        raise OSError(errno.EIO, f"the object store answered {code or 'with an error'}") from None
    except NoCredentialsError:
        raise PermissionError(errno.EACCES, "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from None
    except BotoCoreError as error:
        raise OSError(errno.EIO, f"the object store cannot be reached ({type(error).__name__})") from None
