"""Measures a model on its devices, before anything is deployed.

options.py   what may be chosen
run.py       from the Trainer to the profile: what is known is read, the rest is measured
cache.py     the file of what is known

sample.py    the first training batch
traces.py    runs of the user's code that leave no trace
ends.py      the coordinator's embedding, head and loss
subject.py   what is measured of the model: kinds of layers, their recipe, their arguments, sizes
benches.py   a layer on a device: here, or over the wire
stepping.py  the optimizer of the run to come
"""
