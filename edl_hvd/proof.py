"""How both ends of a connection prove that they hold the same token, before either of them sends data.

Each sends a nonce, and then HMAC-SHA256 of its role and both nonces under the token. The role keeps a proof from being
sent back to its maker, and the nonces keep an old one from being used again.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from pathlib import Path

from edl_hvd.errors import UsageError

STUDENT, TEACHER = "distill 1|student", "distill 1|teacher"
DRIVER, AGENT = "agents 1|driver", "agents 1|agent"
# Who sends a proof, in which protocol.
LEAST_TOKEN = 16
# Characters. Who hears a proof can try tokens against it; 16 random characters are beyond that.
_HOW_TO_MAKE = (
    f"expected at least {LEAST_TOKEN} visible ASCII, as python -c 'import secrets; print(secrets.token_urlsafe())' "
    "prints"
)
_NONCE = re.compile(r"[0-9a-f]{64}")


def check_token(token: str) -> str:
    """The token, if it may serve as one; an empty one stands for none.

    Raises:
        UsageError: It is too short, or not visible ASCII.
    """
    if token and (len(token) < LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token):
        raise UsageError(f"the token has {len(token)} characters; {_HOW_TO_MAKE}")
    return token


def read_token(path: str) -> str:
    """The token that a file holds.

    Raises:
        UsageError: The file cannot be read, or holds no token.
    """
    try:
        token = check_token(Path(path).read_text(encoding="utf-8").strip())
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot read the token from {path!r}: {error}") from error
    if not token:
        raise UsageError(f"the token file {path!r} is empty; {_HOW_TO_MAKE}")
    return token


def new_nonce() -> str:
    """A number that was never used before, as 64 hexadecimal digits."""
    return secrets.token_hex(32)


def is_nonce(text: str) -> bool:
    """Whether a text has the form of a nonce."""
    return _NONCE.fullmatch(text) is not None


def prove(token: str, role: str, own_nonce: str, other_nonce: str) -> str:
    """The proof that one side sends.

    Args:
        token: Token, which does not travel.
        role: ``STUDENT``, ``TEACHER``, ``DRIVER`` or ``AGENT``, whichever the sender is.
        own_nonce: Nonce of the sender.
        other_nonce: Nonce of the receiver.
    """
    text = f"edl_hvd {role}|{own_nonce}|{other_nonce}"
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def is_proof(proof: str, token: str, role: str, own_nonce: str, other_nonce: str) -> bool:
    """Whether a proof is right; the arguments after the first are those with which its sender made it."""
    expected = prove(token, role, own_nonce, other_nonce)
    return hmac.compare_digest(proof.encode(errors="replace"), expected.encode())
