"""What is run: micro-batches, the rule, a stage's forward and backward, and the driver.

Nothing in this folder knows a socket or Lightning's Trainer.

driver.py      runs `training_step` once per micro-batch, with the stages at work between
turns.py       a function on another thread that runs only when it is given the turn
arenas.py      one memory arena for those threads
handover.py    where the coordinator's part of the model is left and entered again
microbatch.py  cuts a batch, and says how much each loss counts
pieces.py      cuts a hand-over of a whole batch instead
results.py     puts together what the micro-batches returned and logged
metrics.py     torchmetrics objects among it
seeds.py       random numbers that do not depend on who runs when

rule.py        which action a stage takes next
runner.py      what a worker does with what arrives, by that rule
stage.py       a stage's layers: forward and backward
activation.py  what goes from stage to stage
narrowing.py   in fewer bits
caches.py      key-value caches on a stage
compiling.py   layers compiled one by one
gradients.py   gradients of a running step, apart from Lightning's
optimizer.py   a stage's part of the optimizer
averaging.py   a running average of weights

copies.py      copies from and to a device that nobody waits for
streams.py     what they want of a device

bench.py       layers with values made up, to be measured
measure.py     what their forwards and backwards take
memory.py      and how much memory
stopwatch.py   what actions take while a step runs
recording.py   who did what when
"""
