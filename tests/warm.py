"""What is done before workers are forked from a process, so that none of them has to do it again.

Layers of a model are built and run, and the device is described. That compiles patterns and fills
caches, which would take the process of each session longer than its training. Nothing here may
start a thread, as threads do not survive a fork: there is one thread of torch, and there are no
gradients.
"""

from __future__ import annotations

import gc

import torch

from lightning_hetero.devices.description import equipment_here
from lightning_hetero.model.layers import find_decoder_layers
from lightning_hetero.model.recipe import Recipe, build_layers, write_recipe

from .families import CONFIGS, tiny_model
from .models import VOCABULARY, tiny_llama
from .qlora import with_lora

torch.set_num_threads(1)
_model = tiny_llama(1)
_families = map(tiny_model, CONFIGS)
for _root in (_model, with_lora(tiny_llama(1), "llama"), *_families):
    _recipe = write_recipe(_root, list(enumerate(find_decoder_layers(_root))))
    build_layers(Recipe.from_json(_recipe.to_json()))
with torch.no_grad():
    _model(torch.arange(VOCABULARY).view(1, -1), use_cache=False)
equipment_here(torch.device("cpu"))
# Garbage collectors of forked processes would write to every object, and so copy its memory.
gc.collect()
gc.freeze()
