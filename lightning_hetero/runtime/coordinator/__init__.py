"""The process of the Trainer: reaches the workers, brings them their stages, and drives them.

fleet.py               the workers of a run: found, dialled or started here
local.py               worker processes of this machine, started and ended by us

conversations.py       who the workers are, asking them, and hearing them
observed.py            what they did, and what their clocks show
remote_tensors.py      brings the stages their tensors, and gets them back
sending.py             to several workers at once
coordinator.py         steps, gradients, optimizers
remote_stage.py        what is asked of one worker
arguments.py           what the model passed to its layers, on its way

deployment.py          a model over workers: its hollow layers, and the conversations behind them
own_layers.py          what the plan asks of the layers that stay here
remote_optimizer.py    a user's optimizer, with the stages' parts behind it
trained_parameters.py  which of the stages' parameters train
progress.py            how far something long has come
"""
