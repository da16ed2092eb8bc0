"""Who gets how many slots of a cluster, where, and why: one pure function.

plan.py          that function: claims, then the least of each job, then ranked shares of the rest
values.py        what goes in and what comes out
rooms.py         what is left on each host beside others
floors.py        who gets its least, who waits, who is stopped
making_room.py   where the room for it comes from
ranks.py         what slots are worth to each job, from the order of the rests
climb.py         envelopes, and the numbers with the largest sum of worths
kinds.py         on which kind of hosts each job is
places.py        from numbers to hosts
change_costs.py  which changes are worth their cost
sentences.py     why a job has what it has
"""
