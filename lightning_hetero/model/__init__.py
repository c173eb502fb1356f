"""What is cut: finding the decoder layers, hollowing them, and the recipe that rebuilds them.

layers.py       finds the decoder layers, and refuses what they share with the rest
hollow.py       layers that stay in the module tree while their weights are elsewhere
calls.py        how the model calls a layer, and what the layer answers
caches.py       key-value caches of hollow layers
layers_away.py  what stands in such a cache for them
collecting.py   outputs from inside layers, such as router logits
tensors.py      parameters and buffers: naming, emptying, filling
hollow_state.py what state dicts say of hollow layers
state_dicts.py  the keys of a module's own tensors in state dicts
passing.py      layers that compute nothing, and note how the model calls them

kinds.py        which layers cost alike
sizes.py        bytes of layers, whether their content is there or not
made_up.py      layers with values made up, to be measured

recipe.py       what a worker rebuilds its layers from; of transformers' own classes
configs.py      Hugging Face configs as plain data
adapters.py     PEFT's adapters in them
four_bit.py     bitsandbytes' 4-bit weights in them
packed.py       what one such weight is made of
libraries.py    the libraries behind both, which are an extra
blocks.py       the recipe of the user's own classes
attributes.py   their plain attributes as data
imports.py      what may be imported for them

pretrained.py          makes models whose weights stay on disk
checkpoint_weights.py  those weights, until they are needed
checkpoint.py          reads them, tensor by tensor
safetensors_files.py   the files that they are in
"""
