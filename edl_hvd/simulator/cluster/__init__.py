"""Many jobs on one cluster under several policies, in virtual time; one of them is the planner itself.

profiles.py        what applications do on a placement with a batch, as it was measured: Pollux's profiles
workload.py        when which jobs were submitted
throughput_fit.py  the model that a job makes of its own steps, and the batch that it chooses by it
blas.py            scipy is loaded so that it computes in one thread
jobs.py            one job of a workload: its progress, its batch, what it knows of itself
play.py            the cluster in virtual time, and what comes out
picture.py         the GPUs of each job over time
speedups.py        how much faster jobs are on more GPUs, where only duration and GPUs were recorded
recorded.py        jobs of a production cluster that were recorded so: ElasticFlow's traces
recorded_play.py   months of them in virtual time, from event to event
view.py            what a policy sees of a cluster, and the placing that several of them share
policies/          one policy per file
"""
