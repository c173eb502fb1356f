"""A WireGuard mesh for workers of several networks.

mesh.py   which nodes there are, and who reaches whom how
files.py  the inventory with all keys, and what `wg-quick` reads
"""
