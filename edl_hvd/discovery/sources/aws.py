"""Client of AWS: credentials, region, endpoint and retries as in boto3; each failure is one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from edl_hvd.discovery.source import Permission
from edl_hvd.discovery.sources.aws_model import MODELS
from edl_hvd.errors import DiscoveryError

_NAMES = {"ec2": "EC2", "autoscaling": "Auto Scaling"}
_NOT_ALLOWED = ("UnauthorizedOperation", "AccessDenied", "AccessDeniedException")
_WRONG = "the credentials are not valid for this account and region"
_NO_CREDENTIALS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, name a profile in AWS_PROFILE, or run where an instance role is "
    "attached"
)
_OLD = "renew the credentials and check this machine's clock"
_OFTEN = "the account asks too often; raise --refresh"
_NEXT_STEPS = {
    "AuthFailure": _WRONG,
    "InvalidClientTokenId": _WRONG,
    "UnrecognizedClientException": _WRONG,
    "SignatureDoesNotMatch": f"{_WRONG}, or this machine's clock is wrong",
    "ExpiredToken": "renew the credentials",
    "RequestExpired": _OLD,
    "RequestTimeTooSkewed": _OLD,
    "RequestLimitExceeded": _OFTEN,
    "Throttling": _OFTEN,
    "OptInRequired": "the account may not use this region or service yet; look at its console",
}
# What botocore raises by itself.
_BEFORE_ASKING = {
    "NoRegionError": "give --region, or set AWS_DEFAULT_REGION, or a region in ~/.aws/config",
    "InvalidRegionError": "correct --region, or AWS_DEFAULT_REGION, e.g. eu-central-1",
    "NoCredentialsError": _NO_CREDENTIALS,
    "PartialCredentialsError": _NO_CREDENTIALS,
    "CredentialRetrievalError": _NO_CREDENTIALS,
    "NoAuthTokenError": _NO_CREDENTIALS,
    "TokenRetrievalError": "renew the login, e.g. with 'aws sso login'",
    "SSOTokenLoadError": "renew the login, e.g. with 'aws sso login'",
    "UnauthorizedSSOTokenError": "renew the login, e.g. with 'aws sso login'",
    "ProfileNotFound": "correct AWS_PROFILE, or add this profile to ~/.aws/config",
    "EndpointConnectionError": "look at the region (--region, AWS_DEFAULT_REGION), at AWS_ENDPOINT_URL and the network",
    "ConnectTimeoutError": "look at the region, at AWS_ENDPOINT_URL, and whether this host may connect there",
}


class Aws:
    """Client of AWS, for one thread at a time.

    Credentials, profile and endpoint are found as boto3 finds them: environment, ``~/.aws``, instance profile.

    Args:
        region: AWS region; ``None`` for that of boto3's configuration.
    """

    def __init__(self, region: str | None = None) -> None:
        self._region = region
        self._session: Any = None
        self._clients: dict[str, Any] = {}

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Context of calls and the reading of their answers: each failure in it becomes a ``DiscoveryError``."""
        try:
            from botocore.exceptions import BotoCoreError, ClientError
            from botocore.parsers import ResponseParserError
        except ImportError as error:
            raise DiscoveryError(
                "asking AWS needs boto3, which this Python does not have; "
                'pip install "edl-hvd[aws]", or set EDL_HVD_PYTHON to a Python that has it'
            ) from error
        try:
            yield
        except ClientError as error:
            self._forget()
            raise DiscoveryError(_explain(error)) from error
        except (BotoCoreError, ResponseParserError, KeyError, ValueError) as error:  # as botocore raises them
            self._forget()
            kind = type(error).__name__
            step = _BEFORE_ASKING.get(kind)
            if step is not None:
                raise DiscoveryError(f"AWS cannot be asked: {str(error).rstrip('.')}; {step}") from error
            raise DiscoveryError(f"AWS did not answer properly: {kind}: {error}") from error

    def _forget(self) -> None:
        """Drop the session, which reads credentials from files once only; they may have been renewed."""
        self._session, self._clients = None, {}

    def pages(self, service: str, operation: str, items: str, **parameters: Any) -> Iterator[Any]:
        """The items of all pages of an answer; call it inside of ``asking``.

        Args:
            service: "ec2" or "autoscaling".
            operation: Name of the operation in botocore's client, e.g. "describe_instances".
            items: Member of the answer that lists them.
            parameters: Parameters of the operation.
        """
        client = self._client(service)
        token: dict[str, str] = {}
        while True:
            page = getattr(client, operation)(**parameters, **token)
            if items not in page:
                raise DiscoveryError(
                    f"{_NAMES[service]} answered {operation} with something that has no {items}; expected its list, "
                    "not e.g. a web page of a proxy; look at AWS_ENDPOINT_URL and the proxy"
                )
            yield from page[items]
            if not page.get("NextToken"):
                return
            token = {"NextToken": page["NextToken"]}

    def try_permission(self, service: str, operation: str, **parameters: Any) -> Permission:
        """Try whether this account may do that; with ``DryRun`` EC2 answers without doing it."""
        name = f"{service}:{''.join(map(str.capitalize, operation.split('_')))}"
        try:
            with self.asking():
                getattr(self._client(service), operation)(**parameters)
        except DiscoveryError as error:
            code = getattr(error.__cause__, "response", {}).get("Error", {}).get("Code", "")
            if code != "DryRunOperation":
                return Permission(name, False if code in _NOT_ALLOWED else None, str(error))
        return Permission(name, True, f"{_NAMES[service]} allows it")

    def _client(self, service: str) -> Any:
        if service not in self._clients:
            from botocore.config import Config

            self._session = self._session or _new_session()
            config = Config(connect_timeout=3, read_timeout=8, retries={"mode": "standard", "total_max_attempts": 3})
            self._clients[service] = self._session.create_client(service, region_name=self._region, config=config)
        return self._clients[service]


def _new_session() -> Any:
    """A session of botocore that reads its services from ``aws_model``."""
    from botocore.loaders import Loader
    from botocore.session import Session

    class SmallModels(Loader):  # type: ignore[misc]  # botocore is not typed
        def load_service_model(self, service_name: str, type_name: str, api_version: str | None = None) -> Any:
            model = MODELS[service_name]()
            if type_name == "service-2":
                return model
            # The endpoints of the service. The usual way lists the folders of all 400 services first.
            return self.load_data(f"{service_name}/{model['metadata']['apiVersion']}/{type_name}")

    session = Session()
    session.register_component("data_loader", SmallModels())
    return session


def _explain(error: Any) -> str:
    """Describe a refusal in one line: the operation, the service's code and message, what to do."""
    code = error.response.get("Error", {}).get("Code", "unknown")
    words = error.response.get("Error", {}).get("Message", "")
    service = "autoscaling" if "AutoScaling" in error.operation_name else "ec2"
    step = _NEXT_STEPS.get(code, "see the message of AWS")
    if code in _NOT_ALLOWED:
        step = f"allow {service}:{error.operation_name} to this role or user"
    return f"{_NAMES[service]} refused {error.operation_name}: {code}: {words}; {step}"
