"""Where hosts come from.

    source.py       the one interface, ``Source.hosts()``
    static_file.py  a hostfile          schedule.py  a plan of coming and going
    ec2.py          EC2 instances by tag
    flags.py        words of a command line -> a source and how long its answers count
    cached.py       the last good answer on disk, and when it may be served
    poll.py         what the programs in ``discovery_scripts/`` run, once per poll

A source answers with every host it has, or raises; it never guesses. Everything about time limits,
outages and stale answers is in ``cached.py``, the same for every source.
"""
