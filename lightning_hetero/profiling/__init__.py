"""Measures a model on its devices, before anything is deployed.

choosing.py  the plan of a run: given, even, or the best one for what was measured
run.py       from the Trainer to the profile: what is known is read, the rest is measured
cache.py     the file of what is known
measuring.py what is not known: ends and layers here, layers on workers, links

sample.py    the first training batch
traces.py    runs of the user's code that leave no trace
stepping.py  the optimizer of the run to come
ends.py      the coordinator's embedding, head and loss, while no layer computes
sighting.py  looks at a model: its kinds of layers, and what it passes to them
blueprint.py one layer of each kind, as everybody who measures builds it
subject.py   these, with examples of their arguments
parts.py     what the planner has to know of the model itself

benches.py   a device's part: which trial is next, and what came of the last one
here.py      the coordinator's device
workers.py   the workers, all at the same time, and the links
"""
