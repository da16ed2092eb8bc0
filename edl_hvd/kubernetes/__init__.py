"""Training jobs on Kubernetes: what the operator sees, decides and does.

objects.py     TrainingJobs, nodes and pods as frozen values, read from the API server's JSON
pods.py        the objects of one job: launcher, workers, service, token
turn.py        what follows from what is seen: pure
status.py      the status of a job, with conditions, and the events that its changes are
submission.py  the TrainingJob that 'edl-hvd train --kubernetes' submits
api.py         the API server: lists, watches and writes
informer.py    the objects of a cluster, kept up by watches
operator.py    one operator: leader election, and turn after turn
manifests/     what `kubectl apply -f` installs
"""
