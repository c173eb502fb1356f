"""Finds the worker that computes wrongly: one batch through each stage, against one device.

errors.py     how far apart tensors are, how far apart rounding may bring them, and the verdict
observing.py  one training step of a module, and what is to be compared of it
rehearsal.py  the step on one device, with each stage away by itself, and with all of them away
"""
