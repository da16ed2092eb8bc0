"""Amazon EC2: spot interruptions and rebalance recommendations, from the instance metadata (IMDSv2).

Source: EC2 User Guide, "Spot Instance interruption notices", "EC2 instance rebalance recommendations", "Use the
Instance Metadata Service".
"""

from __future__ import annotations

import json

from edl_hvd.clock import SYSTEM_CLOCK, Clock
from edl_hvd.errors import PlatformError
from edl_hvd.http_client import HttpAnswer, seconds_since_epoch
from edl_hvd.notices.notice import Notice
from edl_hvd.notices.request import refusal, request

ADDRESS = "http://169.254.169.254"
_TOKEN = "/latest/api/token"
_ACTION = "/latest/meta-data/spot/instance-action"
_REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
TOKEN_S = 21_600
# Seconds: six hours, the longest life of a token.
RENEW_S = 300.0
# Seconds before a token expires; a request takes at most some seconds.


class Ec2Notices:
    """Provider of Amazon EC2, for one thread at a time.

    Args:
        address: URL of the metadata service (``AWS_EC2_METADATA_SERVICE_ENDPOINT``).
    """

    name = "ec2"
    every_s = 5.0
    # Seconds, as the User Guide recommends: a twenty-fourth of a notice.

    def __init__(self, address: str = ADDRESS, clock: Clock = SYSTEM_CLOCK) -> None:
        self._address = address.rstrip("/")
        self._clock = clock
        self._token = ""
        self._token_until_s = 0.0

    def ask(self) -> Notice | None:
        action = self._get(_ACTION)
        if action is not None:
            return read_action(action.text, action.now_s(self._clock))
        rebalance = self._get(_REBALANCE)
        return None if rebalance is None else read_rebalance(rebalance.text)

    def _get(self, path: str) -> HttpAnswer | None:
        """Read an entry, ``None`` if the service has none there; a token that it refuses is renewed once."""
        answer = request(self._address, path, {"X-aws-ec2-metadata-token": self._find_token()}, self._clock)
        if answer.status == 401:
            self._token_until_s = 0.0
            answer = request(self._address, path, {"X-aws-ec2-metadata-token": self._find_token()}, self._clock)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise refusal(self._address, path, answer)
        return answer

    def _find_token(self) -> str:
        now_s = self._clock.monotonic_s()
        if not self._token or now_s >= self._token_until_s:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            answer = request(self._address, _TOKEN, headers, self._clock, method="PUT")
            if answer.status != 200:
                raise refusal(self._address, _TOKEN, answer)
            self._token, self._token_until_s = answer.text, now_s + TOKEN_S - RENEW_S
        return self._token


def read_action(text: str, now_s: float) -> Notice:
    """Read the notice in the entry "spot/instance-action".

    >>> read_action('{"action": "terminate", "time": "2017-09-18T08:22:00Z"}', 1505722800.0).deadline_s
    120.0

    Raises:
        PlatformError: The entry is not understood.
    """
    try:
        told = json.loads(text)
        action, time = str(told["action"]), str(told["time"])
        left_s = max(0.0, seconds_since_epoch(time) - now_s)
    except (ValueError, KeyError, TypeError) as error:
        raise PlatformError(f"the notice of EC2 is not understood: {text[:200]!r}") from error
    if action == "hibernate":
        left_s = 0.0  # begins with the notice
    return Notice("spot interruption", left_s, f"EC2 will {action} this spot instance at {time}", time)


def read_rebalance(text: str) -> Notice:
    """Read the notice in "events/recommendations/rebalance": a higher risk of an interruption, without a time.

    Raises:
        PlatformError: The entry is not understood.
    """
    try:
        time = str(json.loads(text)["noticeTime"])
        seconds_since_epoch(time)
    except (ValueError, KeyError, TypeError) as error:
        raise PlatformError(f"the recommendation of EC2 is not understood: {text[:200]!r}") from error
    words = f"EC2 recommended at {time} to leave this spot instance, which is likelier than others to be interrupted"
    return Notice("rebalance recommendation", None, words, time)
