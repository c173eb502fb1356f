"""What is cut: finding the decoder layers, hollowing them, and the recipe that rebuilds them.

finding, emptying   layers  tensors  hollow  calls  collecting
rebuilding          recipe  configs;  for layers of the user's own: blocks  attributes  imports
changed layers      adapters (PEFT);  four_bit  packed (bitsandbytes)
weights on disk     checkpoint  pretrained
"""
