"""Fine-tune a language model of the Hub on data of one's own, as one YAML file says.

rows.py       the file or data set: rows of fields
labels.py     a row as token ids, and which of them are learnt
packing.py    several samples in one sequence
data.py       the LightningDataModule: rows, labels, packs, the held-out part
loading.py    the base model: 4 bits and LoRA, here or over workers
module.py     the LightningModule: loss, optimizer, schedule
callbacks.py  the adapter that is saved, and samples that are written at each validation
adapter.py    afterwards: answer, merge, push
cards.py      before: what fits on which cards
__main__.py   the command line
offline/      a small model and data, made without a network
"""
