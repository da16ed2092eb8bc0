"""Whose storage it is: endpoint and credentials of Google's and Azure's storage."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from datetime import timezone
from pathlib import Path
from typing import Any

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore

from edl_hvd.errors import UsageError
from edl_hvd.settings import process_environment
from edl_hvd.storage.cloud import AZURE, GOOGLE, CloudStorage, client_options, retry_config, short_words
from edl_hvd.storage.retries import Patience

_KINDS_OF_OBSTORE = ("service_account", "authorized_user")
# Kinds of credential file that obstore reads by itself.

_HTTP = "http://"


def open_google(bucket: str, prefix: str, memory_mb: float, patience: Patience | None = None) -> CloudStorage:
    """Storage under ``gs://bucket/prefix``; nothing is contacted yet.

    Raises:
        UsageError: The variables of the environment cannot be used.
    """
    environ = process_environment()
    url = f"gs://{bucket}/{prefix}"
    options = _options(patience or Patience(), environ.get("GOOGLE_BASE_URL", ""))
    with_token = _google_auth(url, environ)
    if with_token is not None:
        options["credential_provider"] = with_token
    return CloudStorage(_made(GCSStore, url, bucket, prefix, options), url, GOOGLE, memory_mb)


def open_azure(
    container: str, prefix: str, memory_mb: float, account: str = "", patience: Patience | None = None
) -> CloudStorage:
    """Storage under ``az://container/prefix``; nothing is contacted yet.

    Args:
        account: Name of the storage account; ``AZURE_STORAGE_ACCOUNT_NAME`` if left out.

    Raises:
        UsageError: No account is named, or the variables of the environment cannot be used.
    """
    environ = process_environment()
    url = f"az://{container}/{prefix}"
    endpoint = environ.get("AZURE_STORAGE_ENDPOINT") or environ.get("AZURE_ENDPOINT") or ""
    named = account or environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
    emulated = environ.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in ("1", "true")
    if not named and not emulated:
        raise UsageError(f"{url!r} names no storage account; set AZURE_STORAGE_ACCOUNT_NAME")
    options = _options(patience or Patience(), _HTTP if emulated else endpoint)
    if account:
        options["account_name"] = account
    return CloudStorage(_made(AzureStore, url, container, prefix, options), url, AZURE, memory_mb)


def _options(patience: Patience, endpoint: str) -> dict[str, Any]:
    return {
        # Whoever names an endpoint without encryption, such as an emulator's, wants it so.
        "client_options": client_options(patience, allow_http=endpoint.startswith(_HTTP)),
        "retry_config": retry_config(patience),
    }


def _made(kind: Callable[..., Any], url: str, place: str, prefix: str, options: Mapping[str, Any]) -> Any:
    try:
        return kind(place, prefix=prefix or None, **options)
    except (BaseError, ValueError, OSError) as error:
        raise UsageError(
            f"{url!r} cannot be opened: {short_words(error)}; correct the variables or files it names"
        ) from error


def _google_auth(url: str, environ: Mapping[str, str]) -> Callable[[], dict[str, Any]] | None:
    """A function that returns tokens of google-auth, for a credential file of which obstore does not know the kind.

    Such are the files of workload identity federation and of impersonated service accounts.
    """
    path = environ.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    if not path:
        return None
    try:
        kind = json.loads(Path(path).read_text(encoding="utf-8")).get("type", "")
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{url!r} cannot be opened: GOOGLE_APPLICATION_CREDENTIALS names {path!r}, which is no file of credentials "
            f"({error}); correct or unset it"
        ) from error
    if kind in _KINDS_OF_OBSTORE:
        return None
    try:
        import google.auth
        import google.auth.transport.requests
    except ImportError as error:
        raise UsageError(
            f"{url!r} needs google-auth for credentials of the type {kind!r} in {path!r}; run: "
            "pip install 'edl-hvd[google]'"
        ) from error
    request = google.auth.transport.requests.Request()
    loaded: list[Any] = []

    def token() -> dict[str, Any]:
        if not loaded:  # not before it is needed: it may ask Google for the project's name
            with warnings.catch_warnings():
                # It warns of files from strangers; this one is named by whoever started the process.
                warnings.simplefilter("ignore", DeprecationWarning)
                load: Callable[..., Any] = google.auth.load_credentials_from_file
                loaded.append(load(path, scopes=_SCOPES)[0])
        loaded[0].refresh(request)
        # google-auth gives times in UTC that do not say so.
        return {"token": loaded[0].token, "expires_at": loaded[0].expiry.replace(tzinfo=timezone.utc)}

    return token


_SCOPES = ["https://www.googleapis.com/auth/devstorage.read_write"]
