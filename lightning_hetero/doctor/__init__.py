"""Finds out why a worker cannot be used, hop by hop.

findings.py  the checks in their order, and what each found
greeting.py  what the opening of a conversation says of TLS, the token, the clocks and the versions
demand.py    what a plan needs of a link, against what was measured
route.py     by which interface and address this machine reaches another one
measuring.py measures the link to a worker that has welcomed us
visit.py     carries the checks out on a real worker
"""
