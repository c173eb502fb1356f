"""Workers that are found and asked from outside of a run.

announcement.py  what a worker tells its local network, and which of it is for us
discovery.py     tells and hears it, by multicast DNS
finding.py       those of our token that take a conversation
asking.py        what a worker does now
sightings.py     what was seen of running workers, from one look to the next
"""
