"""Training jobs on Kubernetes: what the operator sees, decides and does.

snapshot.py       the cluster in one turn, as frozen values
parsing.py        the API server's JSON as these values
turn.py           what follows from what is seen: pure
succession.py     which workers of a job leave, and when
kueue.py          what Kueue lets a job have
pods.py           the objects of one job: launcher, workers, service, token
status.py         the status of a job, with conditions, and the events that its changes are
submission.py     the TrainingJob that 'edl-hvd train --kubernetes' submits
api.py            the API server: lists, watches and writes
informer.py       the objects of a cluster, kept up by watches
reports.py        what jobs say of their work
leadership.py     which of several operators acts
action_runner.py  the actions of a turn, carried out and counted
operator.py       one operator: turn after turn
checks.py         checks of the doctor
manifests/        what `kubectl apply -f` installs
"""
