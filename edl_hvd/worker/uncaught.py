"""How an error that says what to do ends a script: in its own sentence, without the lines of this package before it.

A traceback is for whoever has to find out what happened. The errors of ``errors.py`` say it themselves, but for
``InternalError``, and the lines of this package tell a user nothing. Of an error that the script can mend the last line
of the script stays.
"""

from __future__ import annotations

import functools
import logging
import sys
import traceback
from pathlib import Path
from types import TracebackType

from edl_hvd.errors import EdlHvdError, InternalError, UsageError

logger = logging.getLogger(__name__)

_PACKAGE = str(Path(__file__).parent.parent)


def words_of(error: BaseException, trace: TracebackType | None) -> str | None:
    """What is printed of an error that nobody has caught; ``None`` for all of it.

    Args:
        error: The error.
        trace: Its traceback.
    """
    if not isinstance(error, EdlHvdError) or isinstance(error, InternalError):
        return None
    words = f"{type(error).__name__}: {error}"
    own = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_PACKAGE)]
    if not isinstance(error, UsageError) or not own:
        return words
    where = own[-1]
    return f'File "{where.filename}", line {where.lineno}, in {where.name}\n    {where.line}\n{words}'


@functools.cache
def shorten_tracebacks() -> None:
    """From now on an uncaught error of this package is printed by :func:`words_of`, and as a whole at DEBUG in the log.

    A hook that is there already goes on to print all other errors. A second call does nothing. Not collective.
    """
    before = sys.excepthook

    def print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        words = words_of(error, trace)
        if words is None:
            before(kind, error, trace)
            return
        logger.debug("uncaught", exc_info=(kind, error, trace))
        print(words, file=sys.stderr, flush=True)

    sys.excepthook = print_error
