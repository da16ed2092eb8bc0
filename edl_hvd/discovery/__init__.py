"""Where hosts come from.

    source.py     the one interface, ``Source.answer()``, and the ``Answer``
    sources/      a class for each kind: files, plans, clouds, schedulers
    registry.py      every kind by its name; words of a command line (flags.py) -> a source and how long its
                  answers count (question.py)
    polling/      for the programs in ``discovery_scripts/``: the last good answer on disk, and when it may be served
    watch.py      for ``edlrun``: asks a source in a thread, and decides what to believe of its answers
    trust.py      when it is believed that hosts are gone; the same rule for all of these

A source answers with every host it has, or raises; it never guesses. Everything about time limits,
outages and stale answers is in ``polling/`` and ``watch.py``, the same for every source.
"""
