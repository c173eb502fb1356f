"""The process on a device of the fleet: waits for coordinators, and serves one at a time.

worker.py        listens, greets, and lives on when a session fails
lobby.py         connections that have not said yet who they are
owner.py         what the worker's owner allows, and is told
tally.py         what the worker does, in numbers that any thread may read

serving.py       a session: one coordinator's stage, from Deploy to Goodbye; put together from
measured.py        trials before anything is deployed
stage_layers.py    the stage's layers, until the last of their tensors is there
neighbors.py       the channels to the stages beside it
timed.py           forwards and backwards, and what they took
trained.py         its optimizers and gradients
recorded.py        who did what when
"""
