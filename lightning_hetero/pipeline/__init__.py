"""What is run: micro-batches, the rule, a stage's forward and backward, and the driver.

Nothing in this folder knows a socket or Lightning's Trainer.
"""
