"""What a job would get out of the hosts of a trace, in virtual time, under three systems.

costs.py       how long things take; defaults with their sources
measured.py    the same from the event log of a real run
course.py      when a job trained, with how many hosts, and what came of it
project.py     this project: the driver's own membership, with workers that are puppets (``puppets.py``,
               ``timers.py``)
stock.py       models of restarting from checkpoints, and of stock Horovod elastic
comparison.py  all three on one trace
picture.py     draws them
"""
