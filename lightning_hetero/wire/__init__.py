"""What is said between coordinator and workers: messages, their bytes, and the rules of talking.

Nothing in this folder knows a socket, a thread or a clock.
"""
