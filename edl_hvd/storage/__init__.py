"""Bytes by URL: ``file://`` and plain paths, ``s3://``, ``gs://``, ``az://``, ``memory://``, others by fsspec.

Reading order: ``base`` (the contract), ``opening`` (URL to storage), then one module per kind of storage. ``pieces`` is
data to be written, ``parts`` how large objects are taken apart, ``retries`` when a request is made again.
"""

from edl_hvd.storage.base import Storage, StoredObject
from edl_hvd.storage.opening import open_storage

__all__ = ["Storage", "StoredObject", "open_storage"]
