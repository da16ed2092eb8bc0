"""How a worker ended, for decisions and for people."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class Exit:
    """How a worker ended.

    Attributes:
        code: Its exit code, or that of ssh when there was no worker or it was lost; ``None`` if a signal ended it.
        signal: The signal that ended it, else ``None``. A shell says the same of exit code 128 + n and signal n;
            from another host it is taken for the signal.
        problem: Why there was no worker or it was lost, in a sentence; else ``None``.
        certain: Whether the worker has ended for sure. Not when only the connection to it did.
    """

    code: int | None
    signal: int | None
    problem: str | None = None
    certain: bool = True

    @classmethod
    def of_child(cls, returncode: int, problem: str | None = None, certain: bool = True) -> Exit:
        """From what ``subprocess`` says: signal n is -n.

        >>> Exit.of_child(-9).text
        'killed by SIGKILL'
        """
        code, number = (returncode, None) if returncode >= 0 else (None, -returncode)
        return cls(code, number, problem, certain)

    @classmethod
    def of_shell(cls, status: int) -> Exit:
        """From what a shell says: signal n is 128 + n.

        >>> Exit.of_shell(137).text, Exit.of_shell(255).text
        ('killed by SIGKILL', 'exit code 255')
        """
        return cls(None, status - 128) if status - 128 in signal.valid_signals() else cls(status, None)

    @property
    def text(self) -> str:
        """For people: ``exit code 3``, ``killed by SIGKILL``, or the problem."""
        if self.problem is not None:
            return self.problem
        if self.signal is None:
            return f"exit code {self.code}"
        named = {int(member): member.name for member in signal.Signals}
        return f"killed by {named.get(self.signal, f'signal {self.signal}')}"
