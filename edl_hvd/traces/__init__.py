"""When hosts came and went: traces of spot markets, recorded or made up.

trace.py       the values: ``Trace``, ``Change``, and what can be asked of them
text.py        the CSV form, read and written
market.py      a market described by distributions, and a trace that it makes
"""
