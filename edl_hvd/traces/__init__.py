"""Traces of spot markets, recorded or synthetic: when hosts came and went.

trace.py       the values: ``Trace``, ``HostChange``, and what follows from them
text.py        the CSV form, read and written
market.py      a market described by distributions, and a trace that it makes
"""
