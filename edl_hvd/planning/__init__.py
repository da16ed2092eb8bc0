"""Who gets how many slots of a cluster, where, and why: one pure function.

values.py      what goes in and what comes out
"""
