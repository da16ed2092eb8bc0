"""Where hosts come from.

    source.py      the one interface, ``Source.answer()``, and the ``Answer``
    sources/       a class for each kind: files, plans, clouds, schedulers
    registry.py    kinds by their names; flags (flags.py) -> a source, how often to poll it, how long answers count
    expression.py  sources and their combinations as text
    polling/       for the programs in ``discovery_scripts/``: the last good answer on disk, and when it may be served
    watch.py       for ``edlrun``: polls a source in a thread, and decides which hosts to trust
    trust.py       when hosts count as gone; the same rule for all of these
    damping.py     leaves out hosts that come and go repeatedly
    leasing.py     holds a lease, for the source ``leases:``
    inspection.py  for ``edl-hvd discover`` and ``doctor``: hosts with all details

A source answers with every host it has, or raises; it never guesses. Time limits, outages and stale answers are in
``polling/`` and ``watch.py``, the same for every source.
"""
