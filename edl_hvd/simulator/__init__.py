"""Simulate what a job would get out of the hosts of a trace, in virtual time, under three systems.

costs.py         how long things take; defaults with their sources
measured.py      costs from the event log of a real run
timeline.py      when a job trained, with how many hosts, and the goodput of it
virtual_time.py  event queue, ticks and polls, simulated workers and names of hosts
edlrun_model.py  this project: the driver's own membership, with simulated workers
baselines.py     models of restarting from checkpoints, and of stock Horovod elastic
comparison.py    all three on one trace
picture.py       draws a comparison
cluster/         many jobs on one cluster, under the planner and under other policies
"""
